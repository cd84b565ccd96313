"""The masks of one attention, joined into its attn_mask."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import numpy as np
import onnx_ir as ir

from .attention_keys import split_heads
from .matching import Rewrite, Size, dims, may_broadcast, number


@dataclass(frozen=True)
class Mask:
    """An additive mask times `scale`; or where `fill` is given a condition: scores stay where it is `kept`, and are
    `fill`, of type `dtype`, elsewhere. `rank` is that of the scores; `lowest`, where given, is the bound of a clamp."""

    value: ir.Value
    rank: int
    scale: float = 1.0
    fill: float | None = None
    kept: bool = True
    dtype: ir.DataType | None = None
    lowest: ir.Value | None = None


@dataclass(frozen=True)
class Masks:
    """Masks in the order in which they were found."""

    masks: tuple[Mask, ...] = ()
    lowest: ir.Value | None = None

    def added(self, mask: Mask) -> Masks:
        bound = number(self.lowest)
        if mask.fill is not None and bound is not None:
            mask = replace(mask, fill=max(mask.fill, bound))
        return replace(self, masks=(*self.masks, replace(mask, lowest=self.lowest)))

    def clamped(self, lowest: ir.Value) -> Masks:
        """Those that are found from here on are inside of Max(., lowest)."""
        return replace(self, lowest=lowest)

    def types(self, types: Sequence[ir.DataType | None]) -> list[ir.DataType]:
        """The types that masks and the given ones are in."""
        return [
            t for t in (*types, *(m.dtype or m.value.dtype for m in self.masks if m.fill != -np.inf)) if t is not None
        ]

    def fit(self, scores: tuple[Size, ...], flat: Size) -> bool:
        """Whether no mask makes the scores larger: [B, H, S, T], or [flat, S, T] where they have three dimensions. Of
        five, [B, Hkv, G, S, T], masks have no heads."""
        for mask in self.masks:
            shape, dtype = dims(mask.value), mask.value.dtype
            if mask.value.shape is None or dtype is None or len(shape) > mask.rank:
                return False
            if mask.fill is None and not dtype.is_floating_point():
                return False
            front = {3: (flat,), 4: scores[:2], 5: (scores[0], 1, 1)}[mask.rank]
            full = (*front, *scores[2:])[mask.rank - len(shape) :]
            if not all(may_broadcast(size, to) for size, to in zip(shape, full)):
                return False
        return True

    def combined(
        self,
        new: Rewrite,
        scores: tuple[Size, ...],
        key_count: Callable[[], ir.Value],
        dtype: ir.DataType,
        heads: tuple[Size, int] | None,
    ) -> ir.Value | None:
        """One mask for all: bool if all are, else of type dtype. Its last size is that of the keys, since from opset 24
        on a shorter mask would hide keys, even one of size 1."""
        if not self.masks:
            return None
        parts = [self._part(new, mask, dtype, heads) for mask in self.masks]
        bools = [p for p in parts if p.dtype == ir.DataType.BOOL]
        floats = [p for p in parts if p.dtype != ir.DataType.BOOL]
        total: ir.Value | None = None
        for part in floats:
            total = part if total is None else new.emit("Add", [total, part], shape=_joined(total, part))
        visible: ir.Value | None = None
        for part in bools:
            visible = part if visible is None else new.emit("And", [visible, part], shape=_joined(visible, part))
        if total is None or visible is None:
            mask = visible if total is None else total
        else:
            hidden = new.constant(np.array(-np.inf), dtype)
            mask = new.emit("Where", [visible, total, hidden], dtype=dtype, shape=_joined(visible, total))
        assert mask is not None
        if dims(mask) == scores[3:]:
            return new.emit("Unsqueeze", [mask, new.integers(0)], shape=(1, scores[3]))
        if dims(mask)[-1:] == scores[3:]:
            return mask
        shape = new.emit("Concat", [new.integers(1), key_count()], {"axis": 0}, ir.DataType.INT64, [2])
        rows = dims(mask)[:-1] or (1,)
        return new.emit("Expand", [mask, shape], shape=(*rows, scores[3]))

    @staticmethod
    def _part(new: Rewrite, mask: Mask, dtype: ir.DataType, heads: tuple[Size, int] | None) -> ir.Value:
        value = mask.value
        if mask.rank == 3 and len(dims(value)) == 3 and dims(value)[0] != 1:
            value = split_heads(new, value, heads)
        if mask.rank == 5 and len(dims(value)) > 3:
            axis = len(dims(value)) - 3  # of the group, which a mask has one of
            value = new.emit(
                "Squeeze", [value, new.integers(axis)], shape=[*dims(value)[:axis], *dims(value)[axis + 1 :]]
            )
        if mask.fill is None:
            if mask.scale != 1.0:
                assert value.dtype is not None
                value = new.emit("Mul", [value, new.constant(np.array(mask.scale), value.dtype)], shape=dims(value))
            if mask.lowest is not None:
                value = new.emit("Max", [value, mask.lowest], shape=dims(value))
            return new.cast(value, dtype)
        if mask.fill == -np.inf:
            return value if mask.kept else new.emit("Not", [value], shape=dims(value))
        zero, fill = (new.constant(np.array(number), dtype) for number in (0.0, mask.fill))
        return new.emit(
            "Where", [value, zero, fill] if mask.kept else [value, fill, zero], dtype=dtype, shape=dims(value)
        )


def _joined(a: ir.Value, b: ir.Value) -> list[Size]:
    """The sizes of two broadcast values."""
    rank = max(len(dims(a)), len(dims(b)))
    columns = zip(*((1,) * (rank - len(dims(v))) + dims(v) for v in (a, b)))
    return [y if x == 1 else x for x, y in columns]
