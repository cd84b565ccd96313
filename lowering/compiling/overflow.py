"""Detection of values that exceed float16's range in sample calls."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import onnx_ir as ir

from ..errors import InputError
from ..graph.rewriting.sizes import InferSizesPass

if TYPE_CHECKING:
    from ..runtime import Model

Call = Mapping[str, Any]
"""Arrays by the name of an input."""

LIMIT = float(np.finfo(np.float16).max) / 2
"""Half of float16's largest number, since other calls may have numbers twice as large."""

_PREFIX = "largest of "


def find_overflowing_values(
    model: ir.Model, calls: Sequence[Call], compile: Callable[[ir.Model], Model]
) -> set[ir.Value]:
    """Return the float32 values of the model's graph that have a finite number beyond LIMIT, or NaN, in a call.

    `compile` compiles the model with the largest number of each value as an output, and the model runs on the calls.
    Raise InputError for a call that does not match the model.
    """
    InferSizesPass()(model)
    values = {value for value in model.graph.inputs for call in calls if _is_beyond(call.get(value.name or ""))}
    observed = model.clone()
    names = [
        _observe(observed.graph, value, f"{_PREFIX}{n}")
        for n, value in enumerate(list(_iterate_float_outputs(observed.graph)))
    ]
    module = compile(observed)
    for number, call in enumerate(calls):
        try:
            largest = module.run(dict(call))
        except InputError as error:
            raise InputError(
                "option.calls_mismatch", f"call {number} of calls= does not fit the model: {error}"
            ) from error
        beyond = {n for n, name in enumerate(names) if not largest[name] <= LIMIT}
        values |= {value for n, value in enumerate(_iterate_float_outputs(model.graph)) if n in beyond}
    return values


def _is_beyond(array: Any) -> bool:
    numbers = np.asarray(0 if array is None else array)
    return numbers.dtype == np.float32 and bool((np.abs(numbers[np.isfinite(numbers)]) > LIMIT).any())


def _iterate_float_outputs(graph: ir.Graph) -> Iterator[ir.Value]:
    """Yield the float32 outputs of the nodes, in their order."""
    for node in graph:
        yield from (v for v in node.outputs if v.name and v.dtype == ir.DataType.FLOAT)


def _observe(graph: ir.Graph, value: ir.Value, name: str) -> str:
    """Add the largest finite magnitude of a value as an output of that name."""
    size = ir.node("Abs", [value])
    infinite = ir.node("IsInf", [value])
    zero = ir.node("Constant", [], {"value": ir.tensor(np.zeros((), np.float32))})
    finite = ir.node("Where", [infinite.outputs[0], zero.outputs[0], size.outputs[0]])
    largest = ir.node("ReduceMax", [finite.outputs[0]], {"keepdims": 0})
    nodes = (size, infinite, zero, finite, largest)
    for step, node in enumerate(nodes):
        node.outputs[0].name = f"{name}, step {step}"
        node.name = node.outputs[0].name
    output = largest.outputs[0]
    output.name, output.type, output.shape = name, ir.TensorType(ir.DataType.FLOAT), ir.Shape([])
    graph.extend(nodes)
    graph.outputs.append(output)
    return name
