"""Loop and Scan: written out, one body for each step, where their number is known before the run and small; else loops
of the virtual machine (repeated.py).

Bodies that are written out see their step as a number, so that what depends on it alone is computed now, and so do
conditions that end a loop.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import onnx_ir as ir

from ..importing.compute import agreed, in_groups, number
from ..importing.node import Node
from ..importing.values import ABSENT, Size, Value
from . import op
from .asserted import asserted
from .contents import sizes as contents_of
from .contents import static_axis
from .kernels import compute
from .matmul import permuted
from .movement import join
from .repeated import repeated
from .reshape import reshape_to
from .slice import cut

_FOREVER = 2**63 - 1
_MOST_NODES = 1 << 9
"""Nodes of all steps together: each takes its part of the compiler's time."""


@op("Loop", since=1)
def loop(node: Node, trips: Value | None, condition: Value | None, *given: Value | None) -> tuple[Value, ...]:
    """The carried values behind the last step, and then what each step gives out, stacked."""
    carried = [ABSENT if value is None else value for value in given]
    most = None if trips is None else contents_of(reshape_to(node, trips, (1,)))
    known = trips is None or (most is not None and isinstance(most[0], int))
    last = None if most is None or not known else int(most[0])
    found = _written_out(node, last, condition, carried) if known else None
    if found is not None:
        return found
    count = node.constant(np.asarray(_FOREVER)) if trips is None else reshape_to(node, trips, ())
    go = node.constant(np.asarray(True)) if condition is None else reshape_to(node, condition, ())

    def step(number: Value, yes: Value, state: Sequence[Value]) -> tuple[Value, Sequence[Value]]:
        goes_on, *results = node.subgraph("body", number, yes, *state, conditions=1)
        return goes_on, results

    return tuple(repeated(node, count, go, carried, step))


def _written_out(
    node: Node, last: int | None, condition: Value | None, carried: Sequence[Value]
) -> tuple[Value, ...] | None:
    """A body for each step; None where there would be many, or a condition is not known."""
    state, given, step = list(carried), list[list[Value]](), 0
    goes_on = _decided(condition)
    size = _nodes(node)
    while goes_on and (last is None or step < last):
        if (step + 1 if last is None else last) * size > _MOST_NODES:
            return None
        number, yes = node.constant(np.asarray(step, np.int64)), node.constant(np.asarray(True))
        condition, *results = node.subgraph("body", number, yes, *state, conditions=1)
        state, step = results[: len(state)], step + 1
        given.append(results[len(state) :])
        goes_on = _decided(condition)
    if goes_on is None or (not given and len(node.outputs) > len(state)):
        return None
    return *state, *_stacked(node, given, len(node.outputs) - len(state), [0], [0])


@op("Scan", since=9)
def scan(node: Node, *inputs: Value) -> tuple[Value, ...]:
    """The carried values behind the last step, and then what each step gives out, stacked."""
    return _scanned(node, inputs, node.attr("scan_input_directions", None))


def _scanned(node: Node, inputs: Sequence[Value], backwards: Sequence[int] | None, times: int = 1) -> tuple[Value, ...]:
    """Scan, which the node is so many times; backwards says of each scanned input whether its last element comes
    first."""
    count = node.attr("num_scan_inputs")
    if not 1 <= count <= len(inputs):
        raise node.error(f"attribute num_scan_inputs is {count}, for {len(inputs)} inputs.")
    state, read = list(inputs[: len(inputs) - count]), list(inputs[len(inputs) - count :])
    axes = node.attr("scan_input_axes", None) or [0] * count
    backwards = backwards or [0] * count
    axes = [static_axis(node, axis, x.rank, "scan_input_axes") for axis, x in zip(axes, read, strict=True)]
    length = agreed(node, "the number of steps", *(x.shape[axis] for axis, x in zip(axes, read)))
    made = len(node.outputs) - len(state)
    out_axes = [*(node.attr("scan_output_axes", None) or []), *[0] * made]
    out_backwards = [*(node.attr("scan_output_directions", None) or []), *[0] * made]
    if isinstance(length, int) and 0 < length * times * _nodes(node) <= _MOST_NODES:
        given: list[list[Value]] = []
        for number in range(length):
            places = [length - 1 - number if back else number for back in backwards]
            parts = [_step_of(node, x, axis, at) for x, axis, at in zip(read, axes, places)]
            results = node.subgraph("body", *state, *parts)
            state = results[: len(state)]
            given.append(results[len(state) :])
        return *state, *_stacked(node, given, made, out_axes, out_backwards)
    read = [asserted(node, x, (*x.shape[:a], length, *x.shape[a + 1 :])) for x, a in zip(read, axes)]

    def step(number: Value, yes: Value, state: Sequence[Value]) -> tuple[Value, Sequence[Value]]:
        parts = [_read_at(node, x, a, number, length, back) for x, a, back in zip(read, axes, backwards)]
        return yes, node.subgraph("body", *state, *parts)

    steps = reshape_to(node, node.sizes([length]), ())
    results = repeated(node, steps, node.constant(np.asarray(True)), state, step)
    outputs = [
        _in_place(node, asserted(node, y, (length, *y.shape[1:]), "what the steps give out"), axis, back)
        for y, axis, back in zip(results[len(state) :], out_axes, out_backwards)
    ]
    return *results[: len(state)], *outputs


def _read_at(node: Node, x: Value, axis: int, number: Value, length: Size, back: int) -> Value:
    """x at a step along an axis, which is left out."""

    def element(index: Any, x: Any, number: Any, length: Any) -> Any:
        at = length - 1 - number() if back else number()
        return x(*index[:axis], at, *index[axis:])

    return compute(node, "step", element, [x, number], (*x.shape[:axis], *x.shape[axis + 1 :]), sizes=[length])


def _in_place(node: Node, stacked: Value, axis: int, back: int) -> Value:
    """Values of all steps along the first axis with that axis where it belongs, and the last step first if back."""
    axis = static_axis(node, axis, stacked.rank, "scan_output_axes")
    if back:
        length = stacked.shape[0]
        stacked = cut(
            node, stacked, [length - 1, *[0] * (stacked.rank - 1)], [-1, *[1] * (stacked.rank - 1)], stacked.shape
        )
    return permuted(node, stacked, [*range(1, axis + 1), 0, *range(axis + 1, stacked.rank)])


@op("Scan", since=8)
def scan_8(node: Node, lengths: Value | None, *inputs: Value) -> tuple[Value, ...]:
    """Scan of each entry of a batch, which is the first axis of all inputs and outputs."""
    if lengths is not None:
        raise node.error("input sequence_lens is given.", "Leave it out, or export the model for opset 9 or newer.")
    if not all(x.rank for x in inputs):
        raise node.error("an input has no dimensions.", "Scan-8 goes over batches: the first one is the batch.")
    batch = number(node, "the batch", agreed(node, "the batch", *(x.shape[0] for x in inputs)))
    if not 1 <= batch * _nodes(node) <= _MOST_NODES:
        raise node.error(
            f"a batch of {batch} has its body, of {_nodes(node)} nodes, written out for each entry.",
            f"Make that 1 to {_MOST_NODES} nodes, or export the model for opset 9 or newer.",
        )
    inputs = tuple(asserted(node, x, (batch, *x.shape[1:])) for x in inputs)
    entries = [
        list(_scanned(node, [_step_of(node, x, 0, k) for x in inputs], node.attr("directions", None), batch))
        for k in range(batch)
    ]
    count = len(entries[0])
    return tuple(_stacked(node, entries, count, [0] * count, [0] * count))


def _decided(condition: Value | None) -> bool | None:
    """Whether to go on; None where that is not known."""
    if condition is None:
        return True
    return None if condition.constant is None else bool(condition.constant.all())


def _nodes(node: Node) -> int:
    """Of the body."""
    body: ir.Graph = node.attr("body")
    return max(sum(1 for _ in ir.traversal.RecursiveGraphIterator(body)), 1)


def _step_of(node: Node, x: Value, axis: int, at: int) -> Value:
    shape = [1 if k == axis else size for k, size in enumerate(x.shape)]
    begins: list[Size] = [at if k == axis else 0 for k in range(x.rank)]
    return reshape_to(node, cut(node, x, begins, [1] * x.rank, tuple(shape)), (*x.shape[:axis], *x.shape[axis + 1 :]))


def _stacked(
    node: Node, given: list[list[Value]], count: int, axes: Sequence[int], backwards: Sequence[int]
) -> list[Value]:
    """For each output the values of all steps, along a new axis."""
    made = []
    for k in range(count):
        parts = [results[k] for results in given]
        parts = parts[::-1] if backwards[k] else parts
        if any(p.rank != parts[0].rank or p.dtype != parts[0].dtype for p in parts):
            raise node.error(f"what the steps give out as output {k} has different ranks or types.")
        axis = static_axis(node, axes[k], parts[0].rank + 1, "scan_output_axes")
        alike = [parts[0], *(asserted(node, part, parts[0].shape) for part in parts[1:])]
        apart = [reshape_to(node, p, (*p.shape[:axis], 1, *p.shape[axis:])) for p in alike]
        made.append(in_groups(lambda group, axis=axis: join(node, group, axis), apart))  # type: ignore[misc]
    return made
