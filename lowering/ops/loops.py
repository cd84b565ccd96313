"""Loop and Scan, written out: one body for each step, where the number of steps is known before the run.

Bodies see their step as a number, so that what depends on it alone is computed now, and so do conditions that end a
loop.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import onnx_ir as ir

from ..importing.compute import in_groups
from ..importing.node import Node
from ..importing.values import Size, Value
from . import op
from .asserted import asserted
from .contents import sizes as contents_of
from .contents import static_axis
from .movement import join
from .reshape import reshape_to
from .slice import cut

_MOST_NODES = 1 << 13
"""Nodes of all steps together: each takes its part of the compiler's time."""


@op("Loop", since=1)
def loop(node: Node, trips: Value | None, condition: Value | None, *carried: Value) -> tuple[Value, ...]:
    """The carried values behind the last step, and then what each step gives out, stacked."""
    most = None if trips is None else contents_of(reshape_to(node, trips, (1,)))
    if trips is not None and (most is None or not isinstance(most[0], int)):
        raise _unknown(node, "the number of steps")
    last = None if most is None else int(most[0])
    state, given, step = list(carried), list[list[Value]](), 0
    goes_on = _decided(node, condition)
    while goes_on and (last is None or step < last):
        _check_length(node, step + 1)
        number, yes = node.constant(np.asarray(step, np.int64)), node.constant(np.asarray(True))
        condition, *results = node.subgraph("body", number, yes, *state)
        state, step = results[: len(state)], step + 1
        given.append(results[len(state) :])
        goes_on = _decided(node, condition)
    return *state, *_stacked(node, given, len(node.outputs) - len(state), [0], [0])


@op("Scan", since=9)
def scan(node: Node, *inputs: Value) -> tuple[Value, ...]:
    """The carried values behind the last step, and then what each step gives out, stacked."""
    count = node.attr("num_scan_inputs")
    if not 1 <= count <= len(inputs):
        raise node.error(f"attribute num_scan_inputs is {count}, for {len(inputs)} inputs.")
    state, read = list(inputs[: len(inputs) - count]), inputs[len(inputs) - count :]
    axes = node.attr("scan_input_axes", None) or [0] * count
    backwards = node.attr("scan_input_directions", None) or [0] * count
    axes = [static_axis(node, axis, x.rank, "scan_input_axes") for axis, x in zip(axes, read, strict=True)]
    lengths: list[Size] = [x.shape[axis] for axis, x in zip(axes, read)]
    length = lengths[0]
    if not isinstance(length, int) or any(other != length for other in lengths):
        raise _unknown(node, f"the number of steps ({', '.join(map(str, lengths))})")
    _check_length(node, length)
    given: list[list[Value]] = []
    for step in range(length):
        places = [length - 1 - step if back else step for back in backwards]
        parts = [_step_of(node, x, axis, at) for x, axis, at in zip(read, axes, places)]
        results = node.subgraph("body", *state, *parts)
        state = results[: len(state)]
        given.append(results[len(state) :])
    made = len(node.outputs) - len(state)
    out_axes = node.attr("scan_output_axes", None) or [0] * made
    return *state, *_stacked(node, given, made, out_axes, node.attr("scan_output_directions", None) or [0] * made)


@op("Scan", since=8)
def scan_8(node: Node, *inputs: Value | None) -> Value:
    raise node.error("Scan-8 goes over batches.", "Export the model for opset 9 or newer.")


def _unknown(node: Node, what: str) -> Exception:
    return node.error(
        f"{what} is not known before the run, and only loops that can be written out are supported.",
        "Fix the sizes that decide it (dims), unroll the loop in the exporter, or run it in the host program around "
        "the compiled body.",
    )


def _decided(node: Node, condition: Value | None) -> bool:
    if condition is None:
        return True
    if condition.constant is None:
        raise _unknown(node, "the condition to go on")
    return bool(condition.constant.all())


def _check_length(node: Node, steps: int) -> None:
    body: ir.Graph = node.attr("body")
    nodes = max(sum(1 for _ in ir.traversal.RecursiveGraphIterator(body)), 1)
    if steps * nodes > _MOST_NODES:
        raise node.error(
            f"{steps} steps of {nodes} nodes would be written out, and {_MOST_NODES} nodes are the most.",
            "Run the loop in the host program around the compiled body.",
        )


def _step_of(node: Node, x: Value, axis: int, at: int) -> Value:
    shape = [1 if k == axis else size for k, size in enumerate(x.shape)]
    begins: list[Size] = [at if k == axis else 0 for k in range(x.rank)]
    return reshape_to(node, cut(node, x, begins, [1] * x.rank, tuple(shape)), (*x.shape[:axis], *x.shape[axis + 1 :]))


def _stacked(
    node: Node, given: list[list[Value]], count: int, axes: Sequence[int], backwards: Sequence[int]
) -> list[Value]:
    """For each output the values of all steps, along a new axis."""
    if count and not given:
        raise node.error("it has no steps, which leaves the shape of what they give out unknown.")
    axes, backwards = [*axes, *[0] * count], [*backwards, *[0] * count]
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
