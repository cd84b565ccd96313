"""Where the keys of a cache lie: from (batch, key) to indices on the axes of a buffer.

What tables say is data. Readers are given indices that are in the buffer whatever the tables hold; writers are told
whether that took a change, and leave such rows alone.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

from tvm import tirx
from tvm.ir import Expr
from tvm.script.ir_builder import tirx as T

from .cache_layout import CacheLayout, GivenRing, Offset, Pages
from .parameters import Size, int64


@dataclass(frozen=True)
class Slot:
    """The index on each axis that does not depend on head and element, none outside the buffer; inside says that none
    had to be changed for that."""

    where: dict[str, Expr]
    inside: Expr


class Slots:
    """The slots of a cache with these tables, for so many batches. extent(axis) is a buffer's size on that axis."""

    def __init__(self, layout: CacheLayout, tables: Mapping[str, tirx.Buffer], batches: Size) -> None:
        self.layout, self.tables, self.batches = layout, tables, batches

    def of(self, b: Expr, j: Expr, part: int, extent: Callable[[str], Size]) -> Slot:
        """The slot in which batch b finds key j (part 0) or its value (1)."""
        fixed = self._fixed(part)
        if not self.layout.looked_up:
            return Slot({"b": b, "t": j, **fixed}, tirx.const(True, "bool"))
        return self._looked_up(self._beam(int64(b), int64(j)), int64(b), int64(j), part, extent)

    def own(self, b: Expr, j: Expr, part: int, extent: Callable[[str], Size]) -> Slot:
        """The slot in which batch b itself keeps key j or its value: that of its own beam."""
        if self.layout.looked_up:
            return self._looked_up(int64(b), int64(b), int64(j), part, extent, may_be_empty=True)
        inside = tirx.all(_within(int64(b), extent("b")), _within(int64(j), extent("t")))
        return Slot({"b": b, "t": j, **self._fixed(part)}, inside)

    def _fixed(self, part: int) -> dict[str, Expr]:
        return {"l": T.int64(self.layout.layer), "c": T.int64(part)}

    def _looked_up(
        self, row: Expr, b: Expr, j: Expr, part: int, extent: Callable[[str], Size], may_be_empty: bool = False
    ) -> Slot:
        """may_be_empty: tables may have no entry, as those of keys that are read have."""
        slots, where, slot = self.layout.slots, self._fixed(part), self._turn(j)
        limits: list[tuple[Expr, Size]] = []

        def limited(value: Expr, size: Size) -> Expr:
            limits.append((value, size))
            return clamp(value, int64(size) - 1)

        if isinstance(slots, Offset):
            slot = self.tables["slot_starts"][b] + slot
        elif isinstance(slots, Pages):
            pages, column = self.tables["pages"], T.int64(0)
            if slots.size is not None:
                column, slot = tirx.floordiv(slot, T.int64(slots.size)), tirx.floormod(slot, T.int64(slots.size))
            plane = [T.int64(part)] if slots.apart else []
            entry = pages[(row, *plane, limited(column, pages.shape[-1]))]
            if may_be_empty:
                entry = tirx.if_then_else(int64(pages.shape[-1]) > 0, entry, T.int64(-1))
            if slots.entries == "slot":
                slot = entry + slot
            else:
                where["p"] = limited(entry, extent("p"))
        if "p" not in where or getattr(slots, "size", 0) is None:
            slot = limited(slot, extent("t"))
        where["t"] = slot
        if "b" in self.layout.axes:
            where["b"] = limited(row, extent("b"))
        return Slot(where, tirx.all(*(_within(*limit) for limit in limits)))

    def _turn(self, j: Expr) -> Expr:
        """The slot of key j in a ring."""
        ring = self.ring()
        if ring is None:
            return j
        sinks, first, capacity = ring
        turned = tirx.floormod(tirx.max(j - sinks, T.int64(0)), capacity) + first
        return tirx.Select(j < sinks, j, turned)

    def ring(self) -> tuple[Expr, Expr, Expr] | None:
        """Sinks, first slot and capacity of the ring, if there is one; the capacity is at least 1."""
        ring = self.layout.ring
        if ring is None:
            return None
        if isinstance(ring, GivenRing):
            sinks, first, capacity = (self.tables["ring"][T.int64(k)] for k in range(3))
            return sinks, first, tirx.max(capacity, T.int64(1))
        return T.int64(ring.sinks), T.int64(ring.first), T.int64(ring.capacity)

    def _beam(self, b: Expr, j: Expr) -> Expr:
        """The row of the cache in which batch b finds key j."""
        beams = self.layout.beams
        if beams is None:
            return b
        table, request = self.tables["beam_of"], tirx.floordiv(b, T.int64(beams.count))
        found = table[request, tirx.floormod(b, T.int64(beams.count)), clamp(j, table.shape[2] - 1)]
        found = tirx.if_then_else(int64(table.shape[2]) > 0, found, T.int64(0))
        source = tirx.Select(j < self.tables["prompts"][request], T.int64(0), clamp(found, T.int64(beams.count - 1)))
        return tirx.min(request * beams.count + source, int64(self.batches) - 1)


def clamp(value: Expr, end: Expr) -> Expr:
    """value, at least 0 and at most `end`, where that is not negative."""
    return tirx.max(tirx.min(value, end), 0)


def _within(value: Expr, size: Size) -> Expr:
    return tirx.all(value >= 0, value < int64(size))
