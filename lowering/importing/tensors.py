"""Tensors of the function under construction: emission of values, constants and sizes."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace

import numpy as np
from tvm import relax, tirx

from .. import scratch
from ..errors import ModelError
from ..graph.options.weight_schemes import NodeSchemes
from .origins import OriginBuilder
from .quantized_matrix import QuantizedMatrix
from .sizes.expected_sizes import ExpectedSizes
from .sizes.open_sizes import CommonSizes
from .sizes.size_kernel import make_size_kernel
from .values import (
    Shape,
    Size,
    Symbols,
    Value,
    channels_second_axes,
    format_size,
    is_long,
    storage_array,
    storage_dtype,
    storage_shape,
)
from .weights import ModelWeights


@dataclass
class BindingScope:
    """Bindings with a result of their own: a branch, or the body of a function."""

    result: relax.Expr | None = None
    sequence: relax.SeqExpr | None = None


class FunctionTensors:
    """The contents of a function: bindings, symbolic sizes, weights, and the dictionary of strings."""

    def __init__(self, schemes: NodeSchemes | None) -> None:
        self.symbols = Symbols()
        self.common_sizes = CommonSizes(self.symbols)
        self.builder = OriginBuilder(schemes)
        self.inside = ""  # description of the graph that is being lowered, for errors
        self.expected = ExpectedSizes()
        self.strings: dict[str, int] = {}  # their numbers, counted from 0
        self._assertions: dict[str, str] = {}
        self._weights = ModelWeights()
        self._materialized: dict[int, tuple[Value, relax.Expr]] = {}

    @contextmanager
    def scope(self) -> Iterator[BindingScope]:
        """Collect emitted bindings in a sequence whose value is the scope's result."""
        outer, scope = dict(self._materialized), BindingScope()
        self.builder._begin_binding_block()
        try:
            yield scope
            value = self.builder.emit(scope.result)
        finally:
            block = self.builder._end_block()
            self._materialized = outer  # tensors of the scope cannot be read outside
        scope.sequence = relax.SeqExpr([block], value)

    def constant(self, array: np.ndarray) -> Value:
        if array.dtype.kind in "OUS":
            return Value("string", array.shape, contents=array.astype(object))
        return Value(array.dtype.name, array.shape, contents=scratch.store(array))

    def tensor(self, value: Value) -> relax.Expr:
        if value.expr is not None:
            return value.expr
        source = value.contents if value.contents is not None else value.channels_last
        cached = self._materialized.get(id(source))
        if cached is None:
            # The value is stored with the result: an id is only unique while its object lives.
            cached = self._materialized[id(source)] = (value, self._materialize(value))
        return cached[1]

    def _materialize(self, value: Value) -> relax.Expr:
        if value.channels_last is not None:
            return self.builder.emit(relax.op.permute_dims(value.channels_last, channels_second_axes(value.rank)))
        if value.dtype == "string":
            assert value.contents is not None
            return self._weights.add_array(self.encode_strings(value.contents))
        numbers = value.constant
        if numbers is not None:
            return self._weights.add_array(storage_array(numbers))
        return self._size_tensor(value)

    def encode_strings(self, texts: np.ndarray) -> np.ndarray:
        """Return int32 numbers that represent strings: equal ones for equal strings."""
        numbers = [self.strings.setdefault(text, len(self.strings)) for text in texts.flat]
        return np.array(numbers, np.int32).reshape(texts.shape)

    def quantized(self, matrix: QuantizedMatrix) -> Value:
        """Return a weight with the elements of the matrix, dequantized only for readers other than matmuls."""
        stored = replace(matrix, values=scratch.store(matrix.values))
        return Value(matrix.dtype.name, matrix.shape, self._weights.add_quantized(stored))

    def _size_tensor(self, value: Value) -> relax.Expr:
        """Return a tensor of sizes that is computed at run time."""
        assert value.contents is not None
        kernel, symbols = make_size_kernel(value.contents, value.dtype)
        flat = relax.TensorType((value.contents.size,), value.dtype)
        function = self.builder.add_func(kernel, "sizes")
        result = self.builder.emit(relax.op.call_tir(function, symbols, out_ty=flat))
        return self.builder.emit(relax.op.reshape(result, shape_expr(value.shape)))

    def emit(self, expr: relax.Expr, dtype: str | None, hint: str) -> Value:
        result = self.builder.emit(expr)
        kind = result.ty
        if not isinstance(kind, relax.TensorType):
            raise ModelError("model.value_not_tensor", f"'{hint}' is not a tensor.")
        dtype = dtype or str(kind.dtype)
        if kind.shape is None or not hasattr(kind.shape, "values"):
            shape: Shape = tuple(self.symbols.fresh(f"{hint}_{k}") for k in range(kind.ndim))
            result = self.builder.match_cast(result, relax.TensorType(shape_expr(shape), str(kind.dtype)))
        else:
            shape = tuple(self.symbols.simplify(d) for d in kind.shape.values)
        return self.shorten_shape(Value(dtype, shape[:-1] if dtype == "complex128" else shape, result))

    def expect(self, condition: Size) -> None:
        """Record the equalities of sizes in a condition that every run asserts."""
        if not self.inside:
            self.expected.add_condition(condition)

    def cast_shape(self, value: Value, shape: Shape, name: str, why: str = "") -> Value:
        """Return the value with that shape, asserted at run time; name is the tensor in the error, why the reason."""
        if not self.inside:
            for have, want in zip(value.shape, shape):
                self.expected.add(have, want)
        stored = tensor_type(value.dtype, shape)
        # The shape is dropped first: TVM's CanonicalizeBindings takes a cast between two static shapes as the proof
        # that they are equal, and removes it.
        rank = relax.TensorType(None, storage_dtype(value.dtype), ndim=len(storage_shape(value.dtype, shape)))
        shapeless = self.builder.match_cast(self.tensor(value), rank)
        result = self.builder.match_cast(shapeless, stored, f"assertion_{len(self._assertions)}")
        self._assertions[result.name] = f"{name} must be [{', '.join(map(format_size, shape))}]{why}"
        return Value(value.dtype, shape, result, value.contents)

    def bind_size_input(self, name: str, param: relax.Var) -> Value:
        """Return an int64 scalar whose content becomes a symbol."""
        symbol = self.symbols.get_named(name)
        self._define(symbol, param)
        contents = np.empty((), object)
        contents[()] = symbol
        return Value("int64", (), param, contents)

    def _define(self, symbol: tirx.Var, scalar: relax.Expr) -> None:
        """Bind a symbol to the value of an int64 tensor of one element."""
        vector = self.builder.emit(relax.op.reshape(scalar, shape_expr((1,))))
        self.builder.match_cast(self.builder.emit(relax.op.tensor_to_shape(vector)), relax.ShapeType([symbol]))

    def shorten(self, size: Size) -> Size:
        """Return the simplified size; an expression that has become long becomes a symbol, computed at run time."""
        size = self.symbols.simplify(size)
        if not is_long(size):
            return size
        is_bool = str(size.ty.dtype) == "bool"
        contents = np.empty((), object)
        contents[()] = size.astype("int64")
        symbol = self.symbols.fresh("size", signed=True)
        self._define(symbol, self._size_tensor(Value("int64", (), contents=contents)))
        return symbol != 0 if is_bool else symbol

    def shorten_shape(self, value: Value) -> Value:
        """Return the tensor with symbols for dimensions whose expressions have become long."""
        if not any(is_long(d) for d in value.shape):
            return value
        names = tuple(self.symbols.fresh("size") if is_long(d) else d for d in value.shape)
        return self.cast_shape(value, names, "what the model computes")


def shape_expr(shape: Shape) -> relax.ShapeExpr:
    return relax.ShapeExpr([tirx.IntImm("int64", d) if isinstance(d, int) else d for d in shape])


def tensor_type(dtype: str, shape: Shape) -> relax.TensorType:
    return relax.TensorType(shape_expr(storage_shape(dtype, shape)), storage_dtype(dtype))
