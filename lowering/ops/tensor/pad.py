"""Pad: constant, edge, reflect and wrap; amounts are static, sizes, or dynamic."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from tvm import relax, tirx
from tvm.script.ir_builder import tirx as T

from ...importing.node import Node
from ...importing.values import Size, Value
from .. import op
from ..helpers import symbolic
from ..helpers.assertions import assert_in_bounds, assert_nonnegative, assert_shape, require
from ..helpers.channels import unify_layouts
from ..helpers.contents import normalize_axis, read_constant_ints, read_sizes
from ..helpers.kernels import compute
from ..helpers.requirements import read_choice, read_length
from ..helpers.run_time import bind_sizes, compute_sizes
from .reshape import reshape_to
from .slice import emit_slice

# Beyond any dimension: adding to it does not wrap.
_MAX_AMOUNT = 2**48
_MODES = ("constant", "edge", "reflect", "wrap")


@op("Pad", since=2)
def pad_2(node: Node, data: Value) -> Value:
    amounts = node.attr("pads")
    value = node.constant(np.array(node.attr("value", 0.0), data.dtype))
    return _emit_pad(node, data, amounts[: data.rank], amounts[data.rank :], value)


@op("Pad", since=11)
def pad_11(node: Node, data: Value, pads: Value, value: Value | None = None, axes: Value | None = None) -> Value:
    fill = reshape_to(node, _make_zero(node, data) if value is None else value, ())
    amounts = read_sizes(pads)
    if amounts is None or (axes is not None and axes.constant is None):
        return _pad_at_run_time(node, data, pads, axes, fill)
    static_axes = read_constant_ints(node, axes, None, "axes")
    chosen = (
        range(data.rank)
        if static_axes is None
        else [normalize_axis(node, a, data.rank, "axes entry") for a in static_axes]
    )
    count = len(chosen)
    if len(amounts) != 2 * count:
        raise node.error(
            "pad.count_mismatch",
            f"input pads has {len(amounts)} entries for {count} axes.",
            "Give two numbers for each axis.",
        )
    before, after = [0] * data.rank, [0] * data.rank
    for k, axis in enumerate(chosen):
        before[axis], after[axis] = amounts[k], amounts[count + k]
    return _emit_pad(node, data, before, after, fill)


def _emit_pad(node: Node, data: Value, before: Sequence[Size], after: Sequence[Size], fill: Value) -> Value:
    mode = _read_mode(node)
    shape = tuple(node.simplify(b + d + a) for b, d, a in zip(before, data.shape, after))
    data = assert_nonnegative(node, data, shape, "input pads")
    idle = [isinstance(b, int) and isinstance(a, int) and a == b == 0 for b, a in zip(before, after)]

    if mode != "constant":
        for axis, (size, padded, is_idle) in enumerate(zip(data.shape, shape, idle)):
            if not is_idle:
                has_elements = symbolic.logical_or(symbolic.less(0, size), symbolic.equal(padded, 0))
                data = require(
                    node,
                    data,
                    has_elements,
                    "pad.input_empty",
                    f"dimension {axis} is empty: mode {mode} has nothing to repeat.",
                )

    (data,), order, back = unify_layouts(node, data)
    idle, before, shape = [idle[a] for a in order], [before[a] for a in order], tuple(shape[a] for a in order)

    def element(index: Any, x: Any, value: Any, *scalars: Any) -> Any:
        starts, dims = scalars[: data.rank], scalars[data.rank :]
        position = [i if is_idle else i - b for i, b, is_idle in zip(index, starts, idle)]
        return _read_element(mode, x, value, position, dims, idle)

    return back(compute(node, "pad", element, [data, fill], shape, [*before, *data.shape]))


def _pad_at_run_time(node: Node, data: Value, pads: Value, axes: Value | None, fill: Value) -> Value:
    """Emit a kernel that computes the padding before each dimension, and the dimensions of the result."""
    mode, rank = _read_mode(node), data.rank
    axes = node.constant(np.arange(rank)) if axes is None else axes
    count = read_length(node, "axes", axes)
    axes = assert_in_bounds(node, axes, rank, bound_name=f"the rank of {node.describe(data, False)}")
    if pads.rank != 1 or (isinstance(pads.shape[0], int) and pads.shape[0] != 2 * count):
        raise node.error(
            "pad.count_mismatch",
            f"input pads has the shape {list(pads.shape)}, for {count} axes.",
            "Give two numbers for each axis.",
        )
    pads = assert_shape(node, pads, (2 * count,))
    static_axes = None if axes.constant is None else {int(a) % rank for a in axes.constant}
    idle = [static_axes is not None and k not in static_axes for k in range(rank)]
    inputs = [node.emit(relax.op.astype(node.tensor(v), "int64")) for v in (pads, axes)]

    def amounts(amount: Any, axis: Any) -> list[Any]:
        def total(k: int, offset: int) -> Any:
            matches = (tirx.floormod(axis[j], rank) == k for j in range(count))
            clamped = (tirx.max(tirx.min(amount[offset + j], far), -far) for j in range(count))
            return sum(tirx.Select(h, a, zero) for a, h in zip(clamped, matches)) + zero

        zero, far = tirx.IntImm("int64", 0), tirx.IntImm("int64", _MAX_AMOUNT)
        before = [T.bind(total(k, 0)) for k in range(rank)]
        padded = [T.bind(before[k] + data.shape[k] + total(k, count)) for k in range(rank)]
        if mode != "constant":
            for k in range(rank):
                text = f"[pad.input_empty] {node.where}: dimension {k} is empty: mode {mode} has nothing to repeat."
                with T.Assert(tirx.Or(data.shape[k] + zero > 0, padded[k] <= 0), text, "ValueError"):
                    pass
        return before + padded

    table = compute_sizes(node, "pad_amounts", 2 * rank, amounts, inputs, data.shape)
    padded = bind_sizes(node, emit_slice(node, table, [rank], [1], (rank,)), ((), data.dtype), source=pads)
    shape = [d if is_idle else p for d, p, is_idle in zip(data.shape, padded, idle)]

    def element(index: Any, x: Any, value: Any, before: Any, *dims: Any) -> Any:
        position = [i if is_idle else i - before(k) for k, (i, is_idle) in enumerate(zip(index, idle))]
        return _read_element(mode, x, value, position, dims, idle)

    return compute(node, "pad", element, [data, fill, table], tuple(shape), data.shape)


def _read_element(mode: str, x: Any, value: Any, position: list[Any], dims: Sequence[Any], idle: Sequence[bool]) -> Any:
    """Return the element at `position`, which can be outside in every dimension that is not idle."""
    if mode != "constant":
        return x(*(p if is_idle else _map_inside(mode, p, d) for p, d, is_idle in zip(position, dims, idle)))
    conditions = [tirx.And(p >= 0, p < d) for p, d, is_idle in zip(position, dims, idle) if not is_idle]
    return tirx.if_then_else(tirx.all(*conditions), x(*position), value()) if conditions else x(*position)


def _map_inside(mode: str, position: Any, dim: Any) -> Any:
    unit = tirx.IntImm("int64", 1)
    if mode == "edge":
        return tirx.max(tirx.min(position, dim - 1), unit * 0)
    if mode == "wrap":
        return tirx.floormod(position, tirx.max(dim * unit, unit))
    period = tirx.max((dim - 1) * 2 * unit, unit)
    folded = tirx.floormod(position, period)
    return tirx.Select(folded < dim, folded, period - folded)


def _read_mode(node: Node) -> str:
    return str(read_choice(node, "mode", "constant", _MODES, code="pad.mode_unsupported"))


def _make_zero(node: Node, data: Value) -> Value:
    if data.dtype == "string":
        return node.constant(np.array("", object))
    return node.constant(np.zeros((), data.dtype))
