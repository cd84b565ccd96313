"""Pad: constant, edge, reflect and wrap, with amounts that are numbers, sizes, or known at run time only."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from tvm import relax, tirx
from tvm.script.ir_builder import tirx as T

from ..importing import symbolic
from ..importing.channels import as_computed
from ..importing.node import Node
from ..importing.values import Size, Value
from . import op
from .asserted import asserted, inside, no_negative, required
from .contents import constant_ints, sizes, static_axis
from .kernels import compute
from .reshape import reshape_to
from .run_time import bind, compute_sizes
from .slice import cut

# Farther than any dimension: sums with it do not wrap.
_FAR = 2**48
_MODES = ("constant", "edge", "reflect", "wrap")


@op("Pad", since=2)
def pad_2(node: Node, data: Value) -> Value:
    amounts = node.attr("pads")
    value = node.constant(np.array(node.attr("value", 0.0), data.dtype))
    return _pad(node, data, amounts[: data.rank], amounts[data.rank :], value)


@op("Pad", since=11)
def pad_11(node: Node, data: Value, pads: Value, value: Value | None = None, axes: Value | None = None) -> Value:
    fill = reshape_to(node, _zero(node, data) if value is None else value, ())
    amounts = sizes(pads)
    if amounts is None or (axes is not None and axes.constant is None):
        return _pad_at_run_time(node, data, pads, axes, fill)
    given = constant_ints(node, axes, None, "axes")
    chosen = range(data.rank) if given is None else [static_axis(node, a, data.rank, "axes entry") for a in given]
    count = len(chosen)
    if len(amounts) != 2 * count:
        raise node.error(f"input pads has {len(amounts)} entries for {count} axes.", "Give two for each axis.")
    before, after = [0] * data.rank, [0] * data.rank
    for k, axis in enumerate(chosen):
        before[axis], after[axis] = amounts[k], amounts[count + k]
    return _pad(node, data, before, after, fill)


def _pad(node: Node, data: Value, before: Sequence[Size], after: Sequence[Size], fill: Value) -> Value:
    mode = _mode(node)
    shape = tuple(node.simplify(b + d + a) for b, d, a in zip(before, data.shape, after))
    data = no_negative(node, data, shape, "input pads")
    idle = [isinstance(b, int) and isinstance(a, int) and a == b == 0 for b, a in zip(before, after)]

    if mode != "constant":
        for axis, (size, padded, quiet) in enumerate(zip(data.shape, shape, idle)):
            if not quiet:
                some = symbolic.logical_or(symbolic.less(0, size), symbolic.equal(padded, 0))
                data = required(node, data, some, f"dimension {axis} is empty: mode {mode} has nothing to repeat.")

    (data,), order, back = as_computed(node, data)
    idle, before, shape = [idle[a] for a in order], [before[a] for a in order], tuple(shape[a] for a in order)

    def element(index: Any, x: Any, value: Any, *scalars: Any) -> Any:
        starts, dims = scalars[: data.rank], scalars[data.rank :]
        places = [i if quiet else i - b for i, b, quiet in zip(index, starts, idle)]
        return _element(mode, x, value, places, dims, idle)

    return back(compute(node, "pad", element, [data, fill], shape, [*before, *data.shape]))


def _pad_at_run_time(node: Node, data: Value, pads: Value, axes: Value | None, fill: Value) -> Value:
    """A kernel computes what goes before each dimension, and each dimension of the result."""
    mode, rank = _mode(node), data.rank
    axes = node.constant(np.arange(rank)) if axes is None else axes
    count = axes.shape[0]
    if not isinstance(count, int):
        raise node.error("input axes has a symbolic length.", "Give it a fixed one.")
    axes = inside(node, axes, rank, of=f"the rank of {node.name_of(data, False)}")
    if pads.rank != 1 or (isinstance(pads.shape[0], int) and pads.shape[0] != 2 * count):
        raise node.error(f"input pads is {list(pads.shape)}, for {count} axes.", "Give two for each axis.")
    pads = asserted(node, pads, (2 * count,))
    known = None if axes.constant is None else {int(a) % rank for a in axes.constant}
    idle = [known is not None and k not in known for k in range(rank)]
    inputs = [node.emit(relax.op.astype(node.tensor(v), "int64")) for v in (pads, axes)]

    def amounts(amount: Any, axis: Any) -> list[Any]:
        def total(k: int, offset: int) -> Any:
            here = (tirx.floormod(axis[j], rank) == k for j in range(count))
            given = (tirx.max(tirx.min(amount[offset + j], far), -far) for j in range(count))
            return sum(tirx.Select(h, a, zero) for a, h in zip(given, here)) + zero

        zero, far = tirx.IntImm("int64", 0), tirx.IntImm("int64", _FAR)
        before = [T.bind(total(k, 0)) for k in range(rank)]
        padded = [T.bind(before[k] + data.shape[k] + total(k, count)) for k in range(rank)]
        if mode != "constant":
            for k in range(rank):
                text = f"{node.where}: dimension {k} is empty: mode {mode} has nothing to repeat."
                with T.Assert(tirx.Or(data.shape[k] + zero > 0, padded[k] <= 0), text, "ValueError"):
                    pass
        return before + padded

    table = compute_sizes(node, "pad_amounts", 2 * rank, amounts, inputs, data.shape)
    padded = bind(node, cut(node, table, [rank], [1], (rank,)), ((), data.dtype), of=pads)
    shape = [d if quiet else p for d, p, quiet in zip(data.shape, padded, idle)]

    def element(index: Any, x: Any, value: Any, before: Any, *dims: Any) -> Any:
        places = [i if quiet else i - before(k) for k, (i, quiet) in enumerate(zip(index, idle))]
        return _element(mode, x, value, places, dims, idle)

    return compute(node, "pad", element, [data, fill, table], tuple(shape), data.shape)


def _element(mode: str, x: Any, value: Any, places: list[Any], dims: Sequence[Any], idle: Sequence[bool]) -> Any:
    """The element at `places`, which may lie outside in every dimension that is not idle."""
    if mode != "constant":
        return x(*(p if quiet else _inside(mode, p, d) for p, d, quiet in zip(places, dims, idle)))
    inside = [tirx.And(p >= 0, p < d) for p, d, quiet in zip(places, dims, idle) if not quiet]
    return tirx.if_then_else(tirx.all(*inside), x(*places), value()) if inside else x(*places)


def _inside(mode: str, place: Any, dim: Any) -> Any:
    one = tirx.IntImm("int64", 1)
    if mode == "edge":
        return tirx.max(tirx.min(place, dim - 1), one * 0)
    if mode == "wrap":
        return tirx.floormod(place, tirx.max(dim * one, one))
    period = tirx.max((dim - 1) * 2 * one, one)
    folded = tirx.floormod(place, period)
    return tirx.Select(folded < dim, folded, period - folded)


def _mode(node: Node) -> str:
    mode = node.attr("mode", "constant")
    if mode not in _MODES:
        raise node.error(f"attribute mode is '{mode}'.", f"Use one of {', '.join(_MODES)}.")
    return mode


def _zero(node: Node, data: Value) -> Value:
    if data.dtype == "string":
        return node.constant(np.array("", object))
    return node.constant(np.zeros((), data.dtype))
