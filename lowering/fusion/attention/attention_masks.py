"""The masks of one attention, combined into its attn_mask."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import numpy as np
import onnx_ir as ir

from ...graph.rewriting.matching import Rewrite, Size, can_broadcast, dims, read_number
from .attention_keys import restore_heads


@dataclass(frozen=True)
class ScoreMask:
    """An additive mask times `scale`, or a condition if `fill` is set.

    With a condition, scores stay where it equals `visible_when`, and are `fill`, of type `dtype`, elsewhere. `rank` is
    that of the scores; `lowest`, if set, is the bound of a clamp.
    """

    value: ir.Value
    rank: int
    scale: float = 1.0
    fill: float | None = None
    visible_when: bool = True
    dtype: ir.DataType | None = None
    lowest: ir.Value | None = None


@dataclass(frozen=True)
class ScoreMasks:
    """Masks in the order in which the scores are read."""

    masks: tuple[ScoreMask, ...] = ()
    lowest: ir.Value | None = None

    def add(self, mask: ScoreMask) -> ScoreMasks:
        bound = read_number(self.lowest)
        if mask.fill is not None and bound is not None:
            mask = replace(mask, fill=max(mask.fill, bound))
        return replace(self, masks=(*self.masks, replace(mask, lowest=self.lowest)))

    def clamp(self, lowest: ir.Value) -> ScoreMasks:
        """Return masks of which those added from here on are inside Max(., lowest)."""
        return replace(self, lowest=lowest)

    def list_types(self, types: Sequence[ir.DataType | None]) -> list[ir.DataType]:
        """Return the types of the masks and the types passed."""
        return [
            t for t in (*types, *(m.dtype or m.value.dtype for m in self.masks if m.fill != -np.inf)) if t is not None
        ]

    def has_matching_shapes(self, scores: tuple[Size, ...], flat: Size) -> bool:
        """Return whether no mask enlarges the scores.

        The scores are [B, H, S, T], or [flat, S, T] if they have three dimensions. If they have five, [B, Hkv, G, S,
        T], masks have no heads.
        """
        for mask in self.masks:
            shape, dtype = dims(mask.value), mask.value.dtype
            if mask.value.shape is None or dtype is None or len(shape) > mask.rank:
                return False
            if mask.fill is None and not dtype.is_floating_point():
                return False
            leading = {3: (flat,), 4: scores[:2], 5: (scores[0], 1, 1)}[mask.rank]
            shape_of_scores = (*leading, *scores[2:])[mask.rank - len(shape) :]
            if not all(can_broadcast(size, target) for size, target in zip(shape, shape_of_scores)):
                return False
        return True

    def emit_combined(
        self,
        new: Rewrite,
        scores: tuple[Size, ...],
        key_count: Callable[[], ir.Value],
        dtype: ir.DataType,
        heads: tuple[Size, int] | None,
    ) -> ir.Value | None:
        """Emit one mask for all: bool if all are, else of type dtype.

        Its last size is that of the keys, since from opset 24 on a shorter mask would hide keys, even one of size 1.
        """
        if not self.masks:
            return None
        masks = [self._emit_mask(new, mask, dtype, heads) for mask in self.masks]
        bools = [value for value in masks if value.dtype == ir.DataType.BOOL]
        floats = [value for value in masks if value.dtype != ir.DataType.BOOL]
        total: ir.Value | None = None
        for term in floats:
            total = term if total is None else new.emit("Add", [total, term], shape=_broadcast_shape(total, term))
        visible: ir.Value | None = None
        for term in bools:
            visible = (
                term if visible is None else new.emit("And", [visible, term], shape=_broadcast_shape(visible, term))
            )
        if total is None or visible is None:
            mask = visible if total is None else total
        else:
            hidden = new.emit_constant(np.array(-np.inf), dtype)
            mask = new.emit("Where", [visible, total, hidden], dtype=dtype, shape=_broadcast_shape(visible, total))
        assert mask is not None
        if dims(mask) == scores[3:]:
            return new.emit("Unsqueeze", [mask, new.emit_integers(0)], shape=(1, scores[3]))
        if dims(mask)[-1:] == scores[3:]:
            return mask
        shape = new.emit("Concat", [new.emit_integers(1), key_count()], {"axis": 0}, ir.DataType.INT64, [2])
        rows = dims(mask)[:-1] or (1,)
        return new.emit("Expand", [mask, shape], shape=(*rows, scores[3]))

    @staticmethod
    def _emit_mask(new: Rewrite, mask: ScoreMask, dtype: ir.DataType, heads: tuple[Size, int] | None) -> ir.Value:
        value = mask.value
        if mask.rank == 3 and len(dims(value)) == 3 and dims(value)[0] != 1:
            value = restore_heads(new, value, heads)
        if mask.rank == 5 and len(dims(value)) > 3:
            axis = len(dims(value)) - 3  # axis of the group, which has size 1 in a mask
            value = new.emit(
                "Squeeze", [value, new.emit_integers(axis)], shape=[*dims(value)[:axis], *dims(value)[axis + 1 :]]
            )
        if mask.fill is None:
            if mask.scale != 1.0:
                assert value.dtype is not None
                value = new.emit(
                    "Mul", [value, new.emit_constant(np.array(mask.scale), value.dtype)], shape=dims(value)
                )
            if mask.lowest is not None:
                value = new.emit("Max", [value, mask.lowest], shape=dims(value))
            return new.emit_cast(value, dtype)
        if mask.fill == -np.inf:
            return value if mask.visible_when else new.emit("Not", [value], shape=dims(value))
        zero, fill = (new.emit_constant(np.array(fill_value), dtype) for fill_value in (0.0, mask.fill))
        return new.emit(
            "Where", [value, zero, fill] if mask.visible_when else [value, fill, zero], dtype=dtype, shape=dims(value)
        )


def _broadcast_shape(a: ir.Value, b: ir.Value) -> list[Size]:
    """Return the shape to which two values broadcast."""
    rank = max(len(dims(a)), len(dims(b)))
    columns = zip(*((1,) * (rank - len(dims(v))) + dims(v) for v in (a, b)))
    return [y if x == 1 else x for x, y in columns]
