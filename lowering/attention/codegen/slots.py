"""Where a cache stores its keys: from (batch, key) to indices on the axes of a buffer.

Table entries are untrusted data. Readers get indices that are inside the buffer whatever the tables contain. Writers
are told whether an index had to be clamped for that, and skip such rows.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

from tvm import tirx
from tvm.ir import Expr
from tvm.script.ir_builder import tirx as T

from ..record.cache_layout import CacheLayout, GivenRing, Offset, Pages
from .parameters import Size, int64


@dataclass(frozen=True)
class Slot:
    """The index on each axis that does not depend on head and element, clamped to the buffer.

    is_inside tells whether no index had to be clamped.
    """

    indices: dict[str, Expr]
    is_inside: Expr


class Slots:
    """The slots of a cache with these tables and number of batches. extent(axis) is a buffer's size on that axis.

    is_written: keys are written there. Then no sum of table entries may overflow: compilers assume so, and a slot that
    does not exist would seem to be inside.
    """

    def __init__(
        self, layout: CacheLayout, tables: Mapping[str, tirx.Buffer], batches: Size, is_written: bool = False
    ) -> None:
        self.layout, self.tables, self.batches, self.is_written = layout, tables, batches, is_written

    def locate(self, b: Expr, j: Expr, kv_index: int, extent: Callable[[str], Size]) -> Slot:
        """Return the slot from which batch b reads key j (kv_index 0) or its value (1)."""
        static_indices = self._static_indices(kv_index)
        if not self.layout.has_lookup:
            return Slot({"b": b, "t": j, **static_indices}, tirx.const(True, "bool"))
        return self._look_up_slot(self._find_beam_row(int64(b), int64(j)), int64(b), int64(j), kv_index, extent)

    def locate_own(self, b: Expr, j: Expr, kv_index: int, extent: Callable[[str], Size]) -> Slot:
        """Return the slot to which batch b itself writes key j or its value: that of its own beam."""
        if self.layout.has_lookup:
            return self._look_up_slot(int64(b), int64(b), int64(j), kv_index, extent)
        inside = tirx.all(_is_within(int64(b), extent("b")), _is_within(int64(j), extent("t")))
        return Slot({"b": b, "t": j, **self._static_indices(kv_index)}, inside)

    def _static_indices(self, kv_index: int) -> dict[str, Expr]:
        return {"l": T.int64(self.layout.layer), "c": T.int64(kv_index)}

    def _look_up_slot(self, row: Expr, b: Expr, j: Expr, kv_index: int, extent: Callable[[str], Size]) -> Slot:
        """Return the slot of a key by the tables."""
        slots, indices, slot = self.layout.slots, self._static_indices(kv_index), self._wrap_in_ring(j)
        limits: list[tuple[Expr, Size]] = []

        def limited(value: Expr, size: Size) -> Expr:
            limits.append((value, size))
            return clamp(value, int64(size) - 1)

        if isinstance(slots, Offset):
            slot = self._summand(self.tables["slot_starts"][b]) + slot
        elif isinstance(slots, Pages):
            pages, column = self.tables["pages"], T.int64(0)
            if slots.size is not None:
                column, slot = tirx.floordiv(slot, T.int64(slots.size)), tirx.floormod(slot, T.int64(slots.size))
            plane = [T.int64(kv_index)] if slots.apart else []
            entry = pages[(row, *plane, limited(column, pages.shape[-1]))]
            if self.is_written:  # tables may have no entries, unlike those of keys that are read
                entry = tirx.if_then_else(int64(pages.shape[-1]) > 0, entry, T.int64(-1))
            if slots.entries == "slot":
                slot = self._summand(entry) + slot
            else:
                indices["p"] = limited(entry, extent("p"))
        if "p" not in indices or getattr(slots, "size", 0) is None:
            slot = limited(slot, extent("t"))
        indices["t"] = slot
        if "b" in self.layout.axes:
            indices["b"] = limited(row, extent("b"))
        return Slot(indices, tirx.all(*(_is_within(*limit) for limit in limits)))

    def _summand(self, entry: Expr) -> Expr:
        """Return a table entry that may be added to others."""
        return saturate(entry) if self.is_written else entry

    def _wrap_in_ring(self, j: Expr) -> Expr:
        """Return the slot of key j in a ring."""
        ring = self.ring()
        if ring is None:
            return j
        sinks, first, capacity = ring
        wrapped = tirx.floormod(tirx.max(j - sinks, T.int64(0)), capacity) + first
        return tirx.Select(j < sinks, j, wrapped)

    def ring(self) -> tuple[Expr, Expr, Expr] | None:
        """Return sinks, first slot and capacity of the ring, if there is one; the capacity is at least 1."""
        ring = self.layout.ring
        if ring is None:
            return None
        if isinstance(ring, GivenRing):
            sinks, first, capacity = (self._summand(self.tables["ring"][T.int64(k)]) for k in range(3))
            return sinks, first, tirx.max(capacity, T.int64(1))
        return T.int64(ring.sinks), T.int64(ring.first), T.int64(ring.capacity)

    def _find_beam_row(self, b: Expr, j: Expr) -> Expr:
        """Return the row of the cache from which batch b reads key j."""
        beams = self.layout.beams
        if beams is None:
            return b
        table, request = self.tables["beam_of"], tirx.floordiv(b, T.int64(beams.count))
        beam = table[request, tirx.floormod(b, T.int64(beams.count)), clamp(j, table.shape[2] - 1)]
        beam = tirx.if_then_else(int64(table.shape[2]) > 0, beam, T.int64(0))
        source = tirx.Select(j < self.tables["prompts"][request], T.int64(0), clamp(beam, T.int64(beams.count - 1)))
        return tirx.min(request * beams.count + source, int64(self.batches) - 1)


def saturate(value: Expr) -> Expr:
    """Clamp an int64 to [-2^60, 2^60], which holds all slots: sums of a few such numbers do not overflow."""
    return tirx.max(tirx.min(value, T.int64(1 << 60)), T.int64(-1 << 60))


def clamp(value: Expr, end: Expr) -> Expr:
    """Clamp value to [0, end], if end is not negative."""
    return tirx.max(tirx.min(value, end), 0)


def _is_within(value: Expr, size: Size) -> Expr:
    return tirx.all(value >= 0, value < int64(size))
