"""Cast and CastLike between all number types."""

from __future__ import annotations

import re
from typing import Any

import numpy as np
import onnx_ir as ir
from tvm import DataType, relax, tirx

from ...importing.node import Node
from ...importing.values import Value, numpy_dtype, storage_dtype
from .. import op
from ..helpers import symbolic
from ..helpers.channels import call_in_common_layout
from ..helpers.compute import is_float, pointwise, widen_dtype
from ..helpers.float8 import FORMATS, SCALE, decode, encode, encode_scale
from ..helpers.kernels import compute
from ..helpers.requirements import require_choice

_NATIVE = (
    "bool", "int8", "int16", "int32", "int64", "uint8", "uint16", "uint32", "uint64",
    "float16", "bfloat16", "float32", "float64",
)  # fmt: skip
_NARROW = {"int2": 2, "uint2": 2, "int4": 4, "uint4": 4}
"""Integers of less than a byte, and their numbers of bits."""


@op("Cast", since=6)
def cast(node: Node, data: Value) -> Value:
    to = node.attr("to")
    if to not in set(ir.DataType) - {ir.DataType.UNDEFINED}:
        raise node.error(
            "cast.to_unsupported",
            f"attribute to is {to}, which is not an element type.",
            "Use a number of TensorProto.DataType.",
        )
    to = ir.DataType(to)
    return cast_to(node, data, "string" if to == ir.DataType.STRING else to.numpy().name)


@op("CastLike", since=15)
def cast_like(node: Node, data: Value, like: Value) -> Value:
    return cast_to(node, data, like.dtype)


def cast_to(node: Node, data: Value, dtype: str) -> Value:
    """Convert the elements to another type, by the rules of attributes saturate and round_mode."""
    if dtype == data.dtype:
        return data
    if "string" in (data.dtype, dtype):
        return _cast_strings(node, data, dtype)
    for name in (data.dtype, dtype):
        if name not in (*_NATIVE, *_NARROW, *FORMATS, SCALE):
            raise node.error(
                "cast.dtype_unsupported", f"cannot cast {data.dtype} to {dtype}: type {name} is not a number."
            )
    folded = _fold_cast(node, data, dtype)
    if folded is not None:
        return folded
    if data.dtype == "bool" and dtype in _NATIVE:
        # As a select: TVM's analyzer cannot read a cast of bool vectors, which a fused kernel can repeat.
        one, zero = (tirx.const(number, widen_dtype(dtype)) for number in (1, 0))
        return pointwise(node, lambda x: tirx.Select(x, one, zero), data, dtype=dtype, name="cast")
    if data.dtype in _NATIVE and dtype in _NATIVE and data.rank:
        return call_in_common_layout(node, lambda x: node.emit(relax.op.astype(node.tensor(x), dtype), dtype), [data])
    # TVM converts a constant of one element to a Python number, which not every type can represent.
    saturate, mode = bool(node.attr("saturate", 1)), node.attr("round_mode", "up")
    require_choice(node, "round_mode", mode, ("up", "down", "nearest"), code="cast.round_mode_unsupported")

    def element(index: Any, x: Any) -> Any:
        number = x(*index)
        if data.dtype in FORMATS or data.dtype == SCALE:
            number = decode(number, data.dtype)
        elif data.dtype in _NARROW:
            number = _sign_extend(number.astype("int64"), data.dtype)
        if dtype == SCALE:
            return encode_scale(number.astype("float32"), saturate, mode)
        if dtype in FORMATS:
            return encode(number.astype("float64"), dtype, saturate)
        if dtype in _NARROW:
            return (number.astype("int64") & _mask(dtype)).astype(storage_dtype(dtype))  # higher bits are discarded
        return number.astype(dtype)

    return compute(node, "cast", element, [data], data.shape, dtype=dtype)


def _cast_strings(node: Node, data: Value, dtype: str) -> Value:
    """Convert constants to or from strings.

    Numbers are formatted as NumPy does, and parsed as Python does.
    """
    constant = data.constant
    if constant is None:
        raise node.error(
            "node.string_at_run_time",
            f"cannot cast {data.dtype} to {dtype}: the elements are computed at run time, where compiled code can "
            "only compare strings for equality.",
            "Make the input a constant, or cast before or after the model.",
        )
    if dtype == "string":
        return node.constant(constant.astype(np.str_).astype(object))
    numbers = [_parse_number(node, text, dtype) for text in constant.flat]
    if not is_float(dtype):
        return cast_to(node, node.constant(np.array(numbers, np.int64).reshape(constant.shape)), dtype)
    array = np.array(numbers, np.float64).reshape(constant.shape)
    if dtype in _NATIVE:
        with np.errstate(over="ignore"):
            return node.constant(array.astype(numpy_dtype(dtype)))
    return cast_to(node, node.constant(array), dtype)


def _parse_number(node: Node, text: str, dtype: str) -> float | int:
    """Parse a number.

    Raises:
        NodeError: The text is not a number, or not a number of the type.
    """
    ranges = np.iinfo(dtype) if dtype in _NATIVE and dtype != "bool" and not is_float(dtype) else np.iinfo("int64")
    try:
        if is_float(dtype):
            return float(text)
        number = int(text) if re.fullmatch(r"\s*[+-]?\d+\s*", text) else int(float(text))
    except (ValueError, OverflowError):
        raise node.error(
            "cast.string_not_number", f"cannot cast the string '{text}' to {dtype}: it is not a number."
        ) from None
    if dtype == "bool" or not ranges.min <= number <= min(ranges.max, np.iinfo("int64").max):
        raise node.error(
            "cast.string_out_of_range",
            f"cannot cast the string '{text}' to {dtype}.",
            "Cast it to float64, or int64, first.",
        )
    return number


def _fold_cast(node: Node, data: Value, dtype: str) -> Value | None:
    """Return contents that are sizes, in types that can represent them, or None."""
    if dtype not in ("int32", "int64", "bool"):
        return None
    if dtype == "bool":
        return symbolic.elementwise(node, lambda a: symbolic.logical_not(symbolic.equal(a, 0)), data, dtype=dtype)
    if data.dtype == "bool":
        return symbolic.elementwise(node, lambda a: symbolic.where(a, 1, 0), data, dtype=dtype)
    return symbolic.elementwise(node, lambda a: a, data, dtype=dtype)


def _mask(dtype: str) -> int:
    return (1 << _NARROW[dtype]) - 1


def _sign_extend(byte: Any, dtype: str) -> Any:
    """Return the number that the low bits of a byte represent."""
    low, sign = byte & _mask(dtype), 1 << (_NARROW[dtype] - 1)
    return low if dtype.startswith("u") else (low ^ sign) - sign


@op("BitCast", since=26)
def bit_cast(node: Node, data: Value) -> Value:
    """Reinterpret the bits as elements of another type with as many bits."""
    dtype = ir.DataType(node.attr("to")).numpy().name
    for name in (data.dtype, dtype):
        if name not in (*_NATIVE, *FORMATS):
            raise node.error(
                "bit_cast.dtype_unsupported", f"the bits of {name} are not supported.", "Use numbers of 8 bits or more."
            )
    source_dtype, target_dtype = (storage_dtype(name) for name in (data.dtype, dtype))
    if DataType(source_dtype).bits != DataType(target_dtype).bits:
        raise node.error(
            "bit_cast.width_mismatch", f"elements of {data.dtype} and {dtype} have different numbers of bits."
        )
    if data.contents is not None and data.constant is not None:
        data = node.constant(data.constant.astype(numpy_dtype(data.dtype)).view(numpy_dtype(dtype)))
        return data
    if source_dtype == target_dtype:
        return Value(dtype, data.shape, node.tensor(data))

    def element(index: Any, x: Any) -> Any:
        if source_dtype == "bool":  # a byte of 0 or 1, which is one bit to LLVM
            return tirx.reinterpret(
                target_dtype, tirx.Select(x(*index), tirx.const(1, "uint8"), tirx.const(0, "uint8"))
            )
        if target_dtype == "bool":
            return tirx.reinterpret("uint8", x(*index)) != tirx.const(0, "uint8")
        return tirx.reinterpret(target_dtype, x(*index))

    return compute(node, "bit_cast", element, [data], data.shape, dtype=dtype)
