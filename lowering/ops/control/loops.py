"""Loop and Scan: unrolled where the number of steps is static and small, else loops of the virtual machine.

The virtual-machine loops are in vm_loops.py. An unrolled body sees its step as a number. Computations that depend only
on the step are folded at compile time, and so are conditions that end a loop.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import onnx_ir as ir

from ...importing.node import Node
from ...importing.values import ABSENT, Size, Value
from .. import op
from ..helpers.assertions import assert_shape
from ..helpers.compute import combine_in_groups, number, unify_sizes
from ..helpers.contents import normalize_axis, read_sizes
from ..helpers.kernels import compute
from ..helpers.requirements import reject_input
from ..math.matmul import permute_axes
from ..tensor.concat import emit_concat
from ..tensor.reshape import reshape_to
from ..tensor.slice import emit_slice
from .vm_loops import emit_vm_loop

_MAX_TRIPS = 2**63 - 1
_MAX_UNROLLED_NODES = 1 << 9
"""The limit of nodes of all steps: each of them adds compile time."""


@op("Loop", since=1)
def loop(node: Node, trips: Value | None, condition: Value | None, *initial: Value | None) -> tuple[Value, ...]:
    """Emit the carried values after the last step, followed by the stacked outputs of all steps."""
    carried = [ABSENT if value is None else value for value in initial]
    trip_sizes = None if trips is None else read_sizes(reshape_to(node, trips, (1,)))
    is_static = trips is None or (trip_sizes is not None and isinstance(trip_sizes[0], int))
    last = None if trip_sizes is None or not is_static else int(trip_sizes[0])
    unrolled = _unroll(node, last, condition, carried) if is_static else None
    if unrolled is not None:
        return unrolled
    count = node.constant(np.asarray(_MAX_TRIPS)) if trips is None else reshape_to(node, trips, ())
    condition_value = node.constant(np.asarray(True)) if condition is None else reshape_to(node, condition, ())

    def step(number: Value, true_value: Value, state: Sequence[Value]) -> tuple[Value, Sequence[Value]]:
        condition, *results = node.subgraph("body", number, true_value, *state, conditions=1)
        return condition, results

    return tuple(emit_vm_loop(node, count, condition_value, carried, step))


def _unroll(
    node: Node, last: int | None, condition: Value | None, carried: Sequence[Value]
) -> tuple[Value, ...] | None:
    """Lower one body per step; return None if there would be many, or a condition is dynamic."""
    state, step_outputs, step = list(carried), list[list[Value]](), 0
    continues = _read_condition(condition)
    size = _count_nodes(node)
    while continues and (last is None or step < last):
        if (step + 1 if last is None else last) * size > _MAX_UNROLLED_NODES:
            return None
        number, true_value = node.constant(np.asarray(step, np.int64)), node.constant(np.asarray(True))
        condition, *results = node.subgraph("body", number, true_value, *state, conditions=1)
        state, step = results[: len(state)], step + 1
        step_outputs.append(results[len(state) :])
        continues = _read_condition(condition)
    if continues is None or (not step_outputs and len(node.outputs) > len(state)):
        return None
    return *state, *_stack_outputs(node, step_outputs, len(node.outputs) - len(state), [0], [0])


@op("Scan", since=9)
def scan(node: Node, *inputs: Value) -> tuple[Value, ...]:
    """Emit the carried values after the last step, followed by the stacked outputs of all steps."""
    return _emit_scan(node, inputs, node.attr("scan_input_directions", None))


def _emit_scan(
    node: Node, inputs: Sequence[Value], backwards: Sequence[int] | None, times: int = 1
) -> tuple[Value, ...]:
    """Emit a Scan, repeated `times` times.

    backwards gives for each scanned input whether its last element comes first.
    """
    count = node.attr("num_scan_inputs")
    if not 1 <= count <= len(inputs):
        raise node.error(
            "scan.input_count_out_of_range", f"attribute num_scan_inputs is {count}, for {len(inputs)} inputs."
        )
    state, read = list(inputs[: len(inputs) - count]), list(inputs[len(inputs) - count :])
    axes = node.attr("scan_input_axes", None) or [0] * count
    backwards = backwards or [0] * count
    axes = [normalize_axis(node, axis, x.rank, "scan_input_axes") for axis, x in zip(axes, read, strict=True)]
    length = unify_sizes(node, "the number of steps", *(x.shape[axis] for axis, x in zip(axes, read)))
    output_count = len(node.outputs) - len(state)
    out_axes = [*(node.attr("scan_output_axes", None) or []), *[0] * output_count]
    out_backwards = [*(node.attr("scan_output_directions", None) or []), *[0] * output_count]
    if isinstance(length, int) and 0 < length * times * _count_nodes(node) <= _MAX_UNROLLED_NODES:
        step_outputs: list[list[Value]] = []
        for number in range(length):
            step_indices = [length - 1 - number if back else number for back in backwards]
            step_inputs = [_slice_step(node, x, axis, index) for x, axis, index in zip(read, axes, step_indices)]
            results = node.subgraph("body", *state, *step_inputs)
            state = results[: len(state)]
            step_outputs.append(results[len(state) :])
        return *state, *_stack_outputs(node, step_outputs, output_count, out_axes, out_backwards)
    read = [assert_shape(node, x, (*x.shape[:a], length, *x.shape[a + 1 :])) for x, a in zip(read, axes)]

    def step(number: Value, true_value: Value, state: Sequence[Value]) -> tuple[Value, Sequence[Value]]:
        step_inputs = [_read_step(node, x, a, number, length, back) for x, a, back in zip(read, axes, backwards)]
        return true_value, node.subgraph("body", *state, *step_inputs)

    steps = reshape_to(node, node.sizes([length]), ())
    results = emit_vm_loop(node, steps, node.constant(np.asarray(True)), state, step)
    outputs = [
        _move_steps_axis(node, assert_shape(node, y, (length, *y.shape[1:]), "what the steps give out"), axis, back)
        for y, axis, back in zip(results[len(state) :], out_axes, out_backwards)
    ]
    return *results[: len(state)], *outputs


def _read_step(node: Node, x: Value, axis: int, number: Value, length: Size, back: int) -> Value:
    """Emit x at a step along an axis, without that axis."""

    def element(index: Any, x: Any, number: Any, length: Any) -> Any:
        step_index = length - 1 - number() if back else number()
        return x(*index[:axis], step_index, *index[axis:])

    return compute(node, "step", element, [x, number], (*x.shape[:axis], *x.shape[axis + 1 :]), sizes=[length])


def _move_steps_axis(node: Node, stacked: Value, axis: int, back: int) -> Value:
    """Move the leading axis of steps to `axis`; if back, the last step comes first."""
    axis = normalize_axis(node, axis, stacked.rank, "scan_output_axes")
    if back:
        length = stacked.shape[0]
        stacked = emit_slice(
            node, stacked, [length - 1, *[0] * (stacked.rank - 1)], [-1, *[1] * (stacked.rank - 1)], stacked.shape
        )
    return permute_axes(node, stacked, [*range(1, axis + 1), 0, *range(axis + 1, stacked.rank)])


@op("Scan", since=8)
def scan_8(node: Node, lengths: Value | None, *inputs: Value) -> tuple[Value, ...]:
    """Emit a Scan of each entry of a batch, which is the first axis of all inputs and outputs."""
    reject_input(
        node,
        "sequence_lens",
        lengths,
        "Leave it out, or export the model for opset 9 or newer.",
        code="scan.sequence_lens_unsupported",
    )
    if not all(x.rank for x in inputs):
        raise node.error(
            "scan.batch_missing",
            "an input has no dimensions.",
            "Give every input the batch as first dimension, over which Scan-8 runs.",
        )
    batch = number(node, "the batch", unify_sizes(node, "the batch", *(x.shape[0] for x in inputs)))
    if not 1 <= batch * _count_nodes(node) <= _MAX_UNROLLED_NODES:
        raise node.error(
            "scan.body_too_large",
            f"its body of {_count_nodes(node)} nodes is unrolled for each of {batch} entries of the batch.",
            f"Keep the total between 1 and {_MAX_UNROLLED_NODES} nodes, or export the model for opset 9 or newer.",
        )
    inputs = tuple(assert_shape(node, x, (batch, *x.shape[1:])) for x in inputs)
    entries = [
        list(_emit_scan(node, [_slice_step(node, x, 0, k) for x in inputs], node.attr("directions", None), batch))
        for k in range(batch)
    ]
    count = len(entries[0])
    return tuple(_stack_outputs(node, entries, count, [0] * count, [0] * count))


def _read_condition(condition: Value | None) -> bool | None:
    """Return whether to continue; None if that is dynamic."""
    if condition is None:
        return True
    return None if condition.constant is None else bool(condition.constant.all())


def _count_nodes(node: Node) -> int:
    """Return the number of nodes of the body, at least 1."""
    body: ir.Graph = node.attr("body")
    return max(sum(1 for _ in ir.traversal.RecursiveGraphIterator(body)), 1)


def _slice_step(node: Node, x: Value, axis: int, index: int) -> Value:
    shape = [1 if k == axis else size for k, size in enumerate(x.shape)]
    begins: list[Size] = [index if k == axis else 0 for k in range(x.rank)]
    return reshape_to(
        node, emit_slice(node, x, begins, [1] * x.rank, tuple(shape)), (*x.shape[:axis], *x.shape[axis + 1 :])
    )


def _stack_outputs(
    node: Node, step_outputs: list[list[Value]], count: int, axes: Sequence[int], backwards: Sequence[int]
) -> list[Value]:
    """Return for each output the values of all steps, along a new axis."""
    outputs = []
    for k in range(count):
        values = [results[k] for results in step_outputs]
        values = values[::-1] if backwards[k] else values
        if any(value.rank != values[0].rank or value.dtype != values[0].dtype for value in values):
            raise node.error(
                "node.scan_output_mismatch", f"scan output {k} has different ranks or types in different steps."
            )
        axis = normalize_axis(node, axes[k], values[0].rank + 1, "scan_output_axes")
        equal_shapes = [values[0], *(assert_shape(node, value, values[0].shape) for value in values[1:])]
        with_axis = [reshape_to(node, value, (*value.shape[:axis], 1, *value.shape[axis:])) for value in equal_shapes]
        outputs.append(combine_in_groups(lambda group, axis=axis: emit_concat(node, group, axis), with_axis))  # type: ignore[misc]
    return outputs
