"""The checks of the run of serving operators without a compiled model: what an imported model calls, on the arrays of a
call. Importing takes a part of the time that compiling does."""

from __future__ import annotations

import functools
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import tvm_ffi
from tvm import relax

from lowering.compiling.bundled_sources import compile_bundled_sources
from lowering.functions.gpt_attention import gpt_attention
from lowering.graph.model import load_model
from lowering.graph.written_inputs import name_written_inputs
from lowering.importing.checks import OPENPPL, TENSORRT_LLM, read_callee_name
from lowering.importing.importer import import_model
from lowering.importing.origins import iterate_bindings

_FUNCTION = sys.modules[gpt_attention.__module__]


def check_gpt(arguments: Mapping[str, Any]) -> None:
    """Raises ValueError for a call of GptAttention that a run refuses; arguments are those of the function."""
    check(*gpt_node(arguments))


def gpt_node(arguments: Mapping[str, Any], symbolic: bool = False) -> tuple[onnx.ModelProto, dict[str, np.ndarray]]:
    """The model of one node for such a call, and its inputs. symbolic: sizes that calls differ in have names."""
    asked = _FUNCTION.gpt_attention.__kwdefaults__ | dict(arguments)
    asked = {name: value for name, value in asked.items() if name not in ("return_lse", "check", "target")}
    arrays = _FUNCTION._collect_inputs(asked.pop("qkv"), asked)
    dims = {name: _FUNCTION._name_dims(name, arrays) if symbolic else array.shape for name, array in arrays.items()}
    inputs = tuple((name, arrays[name].dtype.name, tuple(dims[name])) for name in _FUNCTION.INPUTS if name in arrays)
    width = asked["num_heads"] * asked["hidden_size_per_head"]
    coded = asked["attention_output_orig_quant_scale"] is not None
    dtype = "float8_e4m3fn" if coded else arrays["qkv"].dtype.name
    return _FUNCTION.build_one_node_model(inputs, _FUNCTION._dump_attributes(asked), False, width, dtype), arrays


def check(model: onnx.ModelProto, arrays: Mapping[str, np.ndarray]) -> None:
    """Raises ValueError where the check of a model of one node, with static sizes, does."""
    loaded = load_model(model)
    name_written_inputs(loaded)
    imported = import_model(loaded)
    main = imported.module["main"]
    (call,) = (b.value for b in iterate_bindings(main.body) if read_callee_name(b.value) in (OPENPPL, TENSORRT_LLM))
    given = {param: arrays[port.name] for param, port in zip(main.params, imported.inputs)}
    name, *arguments = call.args
    _library()[name.global_symbol](*(_value(argument, given) for argument in arguments))


def _value(argument: Any, given: Mapping[relax.Var, np.ndarray]) -> Any:
    if isinstance(argument, relax.ShapeExpr):
        return tvm_ffi.Shape([int(size) for size in argument.values])
    if isinstance(argument, relax.Var):
        return tvm_ffi.from_dlpack(np.ascontiguousarray(given[argument]))
    return argument.value if isinstance(argument.value, str) else int(argument.value)


@functools.cache
def _library() -> Any:
    """The C code that every model.so carries."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "checks.so"
        subprocess.run(["cc", "-shared", "-o", path, *compile_bundled_sources("cc", folder)], check=True)
        return tvm_ffi.load_module(str(path))
