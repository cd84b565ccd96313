"""LabelEncoder (https://onnx.ai/onnx/operators/onnx_aionnxml_LabelEncoder.html): a lookup table from keys to values.

Keys are sorted at compile time, and each element is found by binary search. Strings are numbers that are equal exactly
if the strings are, so that a table of strings is a table of numbers.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from tvm import tirx
from tvm.script.ir_builder import tirx as T

from ...importing.node import Node
from ...importing.values import Value, storage_dtype
from ...tensorir.independent_loops import independent_loops
from .. import op
from ..helpers.compute import is_float
from ..helpers.kernels import emit_loops, let, serial
from ..tensor.reshape import reshape_to
from . import DOMAIN

_DEFAULTS = {"string": "_Unused", "int64": -1, "float32": -0.0, "int32": -1, "int16": -1, "float64": -0.0}
"""The default values of elements that are not keys, by type of the values.

Its keys are also the supported types of keys and values.
"""

_LISTS = {"int64s": "int64", "floats": "float32", "strings": "string"}
_DEFAULT_NAMES = {"int64": "default_int64", "float32": "default_float", "string": "default_string"}


@op("LabelEncoder", since=1, domain=DOMAIN)
def label_encoder_1(node: Node, x: Value) -> Value:
    """Map strings to their indices in classes_strings, or indices to strings."""
    classes = np.array(node.attr("classes_strings", []), object)
    indices = np.arange(len(classes), dtype=np.int64)
    keys, values = (classes, indices) if x.dtype == "string" else (indices, classes)
    return _look_up(node, x, keys, values, _read_default(node, _dtype_of(values)))


@op("LabelEncoder", since=2, domain=DOMAIN)
def label_encoder(node: Node, x: Value) -> Value:
    keys, values = _read_array(node, "keys"), _read_array(node, "values")
    if len(keys) != len(values):
        raise node.error(
            "label_encoder.count_mismatch",
            f"it has {len(keys)} keys and {len(values)} values.",
            "Give one value for each key.",
        )
    return _look_up(node, x, keys, values, _read_default(node, _dtype_of(values)))


def _read_array(node: Node, name: str) -> np.ndarray:
    """Return the keys or values [n]; strings are objects."""
    names = [*(f"{name}_{kind}" for kind in _LISTS), f"{name}_tensor"]
    present = [attribute for attribute in names if node.attr(attribute, None) is not None]
    if len(present) != 1:
        raise node.error(
            "label_encoder.attribute_count_mismatch",
            f"it has {len(present)} of the attributes {', '.join(names)}: {', '.join(present) or 'none'}.",
            "Give exactly one of them.",
        )
    kind = _LISTS.get(present[0].removeprefix(f"{name}_"))
    array = np.asarray(node.attr(present[0]), object if kind == "string" else kind)
    if _dtype_of(array) not in _DEFAULTS:
        raise node.error(
            "node.dtype_unsupported",
            f"attribute {present[0]} is {_dtype_of(array)}.",
            f"Use one of {', '.join(_DEFAULTS)}.",
        )
    return array.reshape(-1)


def _dtype_of(array: np.ndarray) -> str:
    return "string" if array.dtype == object else array.dtype.name


def _read_default(node: Node, dtype: str) -> Any:
    """Return the value of elements that are not keys."""
    named = node.attr(_DEFAULT_NAMES.get(dtype, "default_tensor"), None)
    tensor = node.attr("default_tensor", None) if named is None else np.asarray(named)
    if tensor is None:
        return _DEFAULTS[dtype]
    kind = "string" if tensor.dtype.kind in "OU" else tensor.dtype.name
    if tensor.size != 1 or (named is None and kind != dtype):
        raise node.error(
            "label_encoder.default_mismatch",
            f"attribute default_tensor is {kind}{list(tensor.shape)}, for values of {dtype}.",
            f"Make it one element of {dtype}.",
        )
    return tensor.reshape(-1).tolist()[0]


def _look_up(node: Node, x: Value, keys: np.ndarray, values: np.ndarray, default: Any) -> Value:
    """Return the value of each element, or the default if it is not a key.

    Of equal keys the last one counts.
    """
    if _dtype_of(keys) != x.dtype:
        raise node.error(
            "node.dtype_mismatch",
            f"input X is {x.dtype}, and the keys are {_dtype_of(keys)}.",
            "Give both the same type.",
        )
    dtype, nan = _dtype_of(values), default
    table = {}
    for key, value in zip(keys.tolist(), values.tolist()):
        if key == key:
            table[key] = value
        else:
            nan = value
    if x.constant is not None:
        looked_up = [table.get(key, default) if key == key else nan for key in x.constant.reshape(-1).tolist()]
        array = np.asarray(looked_up, object if dtype == "string" else dtype)
        return node.constant(array.reshape(x.constant.shape))
    texts = np.array([*table.values(), default, nan], object if dtype == "string" else dtype)
    return _emit_search(node, x, _as_numbers(node, np.array(list(table), keys.dtype)), _as_numbers(node, texts), dtype)


def _as_numbers(node: Node, array: np.ndarray) -> np.ndarray:
    return node.encode_strings(array) if array.dtype == object else array


def _emit_search(node: Node, x: Value, keys: np.ndarray, values: np.ndarray, dtype: str) -> Value:
    """Emit the search of keys [n] for values [n + 2], whose last two are the default and the value of NaN."""
    count = len(keys)
    order = np.argsort(keys, kind="stable")
    numbers = node.constant(np.append(keys[order], keys[:1]) if count else np.zeros(1, storage_dtype(x.dtype)))
    table = node.constant(np.concatenate([values[:count][order], values[count:]]))
    steps = max(count - 1, 0).bit_length()

    def statements(x: Any, keys: Any, values: Any, y: Any) -> None:
        with independent_loops(*x.shape) as index:
            element = let(x[index])
            low = T.alloc_buffer((1,), "int64")
            T.buffer_store(low, tirx.const(0, "int64"), [0])
            with serial(steps) as step:
                candidate = low[0] + tirx.shift_right(tirx.const(1 << max(steps - 1, 0), "int64"), step)
                is_below = keys[tirx.min(candidate, tirx.const(count, "int64"))] <= element
                T.buffer_store(low, tirx.Select(tirx.all(candidate < count, is_below), candidate, low[0]), [0])
            is_key = tirx.all(tirx.const(count > 0, "bool"), tirx.EQ(keys[low[0]], element))
            missing = tirx.const(count, "int64")
            if is_float(x.dtype):
                missing = tirx.Select(tirx.isnan(element), missing + 1, missing)
            index_of_value = let(tirx.Select(is_key, low[0], missing))
            T.buffer_store(y, values[index_of_value], list(index))

    shape = x.shape or (1,)
    (y,) = emit_loops(node, "label_encoder", statements, [reshape_to(node, x, shape), numbers, table], [(shape, dtype)])
    return reshape_to(node, y, x.shape)
