"""The last resort for an ai.onnx operator that has neither a lowering of ours nor a function body: TVM's own converter.

TVM's frontend picks converters by operator name alone, has no sound notion of shape arithmetic, and some of its
converters compute something else than the standard says. So it is asked only about single ai.onnx nodes whose input
shapes are numbers, and its answer is taken only if it agrees with onnx's reference evaluator on random inputs.
"""

from __future__ import annotations

import contextlib
import io
import warnings
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import onnx
import onnx_ir as ir
import tvm
from onnx.reference import ReferenceEvaluator
from tvm import relax

from ..graph.fold import is_ordinary
from .values import Value, numpy_dtype


def convert(
    node: ir.Node, version: int, inputs: Sequence[Value | None], tensor: Callable[[Value], Any]
) -> list[relax.Expr] | None:
    """Relax expressions of the outputs; None where TVM cannot convert the node or errs, or a shape is symbolic."""
    if node.domain not in ("", "ai.onnx") or any(v is not None and not v.static for v in inputs):
        return None
    given = {f"x{k}": v for k, v in enumerate(inputs) if v is not None}
    proto = ir.to_proto(node)
    del proto.input[:]
    proto.input.extend("" if v is None else f"x{k}" for k, v in enumerate(inputs))
    ports = []
    initializers = []
    for name, value in given.items():
        constant = value.constant
        if constant is not None and constant.dtype != object:
            initializers.append(onnx.numpy_helper.from_array(constant, name))
        elif value.dtype in ("string", "complex64", "complex128") or not is_ordinary(numpy_dtype(value.dtype)):
            return None
        else:
            element = onnx.helper.np_dtype_to_tensor_dtype(numpy_dtype(value.dtype))
            ports.append(onnx.helper.make_tensor_value_info(name, element, value.shape))
    results = [onnx.helper.make_value_info(n, onnx.TypeProto()) for n in proto.output if n]
    graph = onnx.helper.make_graph([proto], "single", ports, results, initializers)
    model = onnx.helper.make_model(graph, opset_imports=[onnx.helper.make_opsetid("", version)])
    try:
        # The frontend prints debug lines on failure, and warns about results without a declared type.
        with contextlib.redirect_stdout(io.StringIO()), warnings.catch_warnings():
            warnings.simplefilter("ignore")
            function = _from_onnx(model)
            right = _agrees(function, model, [given[p.name] for p in ports])
    except Exception:  # converters fail in any way
        return None
    if not right:
        return None
    arguments = [tensor(given[p.name]) for p in ports]
    body = _inlined(function, arguments)
    return [body] if len(results) == 1 else [relax.TupleGetItem(body, k) for k in range(len(results))]


def _from_onnx(model: onnx.ModelProto) -> relax.Function:
    from tvm.relax.frontend.onnx import from_onnx

    return from_onnx(model, keep_params_in_input=False)["main"]


def _agrees(function: relax.Function, model: onnx.ModelProto, inputs: list[Value]) -> bool:
    """Whether the converted function computes what the reference evaluator does, to 1e-5 of the output's range."""
    rng = np.random.default_rng(0)
    arrays = [
        rng.standard_normal(v.shape) if numpy_dtype(v.dtype).kind == "f" else rng.integers(0, 2, v.shape)
        for v in inputs
    ]
    arrays = [np.asarray(a, numpy_dtype(v.dtype)) for a, v in zip(arrays, inputs)]
    names = [port.name for port in model.graph.input]
    expected = ReferenceEvaluator(model).run(None, dict(zip(names, arrays)))
    executable = tvm.compile(tvm.IRModule({"main": function}), target="llvm")
    machine = relax.VirtualMachine(executable, tvm.cpu())
    results = machine["main"](*(tvm.runtime.tensor(a) for a in arrays))
    results = [results] if len(expected) == 1 else list(results)
    for result, wanted in zip(results, expected):
        wide, wanted = result.numpy().astype(np.float64), np.asarray(wanted, np.float64)
        scale = float(np.abs(wanted).max(initial=0.0))
        if wide.shape != wanted.shape or not np.allclose(wide, wanted, rtol=1e-5, atol=1e-5 * scale):
            return False
    return True


def _inlined(function: relax.Function, arguments: list[relax.Expr]) -> Any:
    function = relax.utils.copy_with_new_vars(function)
    return _Bind(dict(zip(function.params, arguments))).visit_expr(function.body)


@relax.expr_functor.mutator
class _Bind(relax.PyExprMutator):
    def __init__(self, values: dict[Any, relax.Expr]) -> None:
        super().__init__()
        self.values = values

    def visit_var_(self, var: Any) -> Any:
        return self.values.get(var, var)
