"""The run-time checks of serving operators without a compiled model: the checks that an imported model calls, on the
arrays of a call. Importing takes a fraction of the time of compiling."""

from __future__ import annotations

import functools
import sys
from collections.abc import Mapping
from typing import Any

import numpy as np
import onnx
import tvm_ffi
from tvm import relax

from lowering.compiling.build import load_bundled_functions
from lowering.functions.gpt_attention import gpt_attention
from lowering.functions.gpt_inputs import collect_inputs
from lowering.graph.loading.model import load_model
from lowering.graph.loading.written_inputs import name_written_inputs
from lowering.importing.checks import OPENPPL, TENSORRT_LLM, read_callee_name
from lowering.importing.importer import import_model
from lowering.importing.origins import iterate_bindings
from lowering.ops import lookup

_FUNCTION = sys.modules[gpt_attention.__module__]


def check_gpt(arguments: Mapping[str, Any]) -> None:
    """Raise ValueError for a call of GptAttention that a run refuses; arguments are those of the function."""
    check_node(*make_gpt_node(arguments))


def make_gpt_node(
    arguments: Mapping[str, Any], symbolic: bool = False
) -> tuple[onnx.ModelProto, dict[str, np.ndarray]]:
    """Return the model of one node for such a call, and its inputs. symbolic: sizes of calls have names."""
    call_arguments = _FUNCTION.gpt_attention.__kwdefaults__ | dict(arguments)
    call_arguments = {
        name: value for name, value in call_arguments.items() if name not in ("return_lse", "check", "target")
    }
    arrays = collect_inputs(call_arguments.pop("qkv"), call_arguments)
    dims = {name: _FUNCTION._name_dims(name, arrays) if symbolic else array.shape for name, array in arrays.items()}
    inputs = tuple((name, arrays[name].dtype.name, tuple(dims[name])) for name in _FUNCTION.INPUTS if name in arrays)
    width = call_arguments["num_heads"] * call_arguments["hidden_size_per_head"]
    is_quantized = call_arguments["attention_output_orig_quant_scale"] is not None
    dtype = "float8_e4m3fn" if is_quantized else arrays["qkv"].dtype.name
    return _FUNCTION.build_one_node_model(
        inputs, _FUNCTION._dump_attributes(call_arguments), False, width, dtype
    ), arrays


def check_node(model: onnx.ModelProto, arrays: Mapping[str, np.ndarray]) -> None:
    """Raise ValueError where the check of a model of one node, with static sizes, raises it."""
    loaded = load_model(model)
    name_written_inputs(loaded)
    imported = import_model(loaded, lookup)
    main = imported.module["main"]
    (call,) = (b.value for b in iterate_bindings(main.body) if read_callee_name(b.value) in (OPENPPL, TENSORRT_LLM))
    bindings = {param: arrays[port.name] for param, port in zip(main.params, imported.inputs)}
    name, *arguments = call.args
    _load_checks()[name.global_symbol](*(_convert_argument(argument, bindings) for argument in arguments))


def _convert_argument(argument: Any, bindings: Mapping[relax.Var, np.ndarray]) -> Any:
    if isinstance(argument, relax.ShapeExpr):
        return tvm_ffi.Shape([int(size) for size in argument.values])
    if isinstance(argument, relax.Var):
        return tvm_ffi.from_dlpack(np.ascontiguousarray(bindings[argument]))
    return argument.value if isinstance(argument.value, str) else int(argument.value)


@functools.cache
def _load_checks() -> tvm_ffi.Module:
    return load_bundled_functions((OPENPPL, TENSORRT_LLM))
