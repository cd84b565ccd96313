"""Tensors of the function under construction: what the importer emits of values, constants and sizes."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import numpy as np
from tvm import relax, tirx

from ..errors import ModelError
from .channels import channels_second_axes
from .expected_sizes import ExpectedSizes
from .open_sizes import CommonSizes
from .origins import Builder
from .quantized import Quantized
from .size_kernel import size_kernel
from .values import Shape, Size, Symbols, Value, as_text, is_long, storage_array, storage_dtype, storage_shape
from .weights import Weights


@dataclass
class Scope:
    """Bindings with a value of their own: a branch, or the body of a function."""

    result: relax.Expr | None = None
    sequence: relax.SeqExpr | None = None


class Tensors:
    """The contents of a function: bindings, symbolic sizes, weights, and the dictionary of strings."""

    def __init__(self) -> None:
        self.symbols = Symbols()
        self.common_sizes = CommonSizes(self.symbols)
        self.builder = Builder()
        self.inside = ""  # which graph inside the model is lowered, for errors
        self.expected = ExpectedSizes()
        self.strings: dict[str, int] = {}  # their codes, which count from 0
        self._assertions: dict[str, str] = {}
        self._weights = Weights()
        self._materialized: dict[int, tuple[Value, relax.Expr]] = {}

    @contextmanager
    def scope(self) -> Iterator[Scope]:
        """What is emitted inside is a sequence of its own, whose value is what is set as its result."""
        known, scope = dict(self._materialized), Scope()
        self.builder._begin_binding_block()
        try:
            yield scope
            value = self.builder.emit(scope.result)
        finally:
            block = self.builder._end_block()
            self._materialized = known  # what was made inside cannot be read outside
        scope.sequence = relax.SeqExpr([block], value)

    def constant(self, array: np.ndarray) -> Value:
        if array.dtype.kind in "OUS":
            return Value("string", array.shape, contents=array.astype(object))
        return Value(array.dtype.name, array.shape, contents=array)

    def tensor(self, value: Value) -> relax.Expr:
        if value.expr is not None:
            return value.expr
        source = value.contents if value.contents is not None else value.channels_last
        known = self._materialized.get(id(source))
        if known is None:
            # The value is kept with the result: an id is only unique while its object lives.
            known = self._materialized[id(source)] = (value, self._materialize(value))
        return known[1]

    def _materialize(self, value: Value) -> relax.Expr:
        if value.channels_last is not None:
            return self.builder.emit(relax.op.permute_dims(value.channels_last, channels_second_axes(value.rank)))
        if value.dtype == "string":
            assert value.contents is not None
            return self._weights.numbers(self.string_codes(value.contents))
        numbers = value.constant
        if numbers is not None:
            return self._weights.numbers(storage_array(numbers))
        return self._size_tensor(value)

    def string_codes(self, texts: np.ndarray) -> np.ndarray:
        """The int32 numbers that stand for strings: equal ones for equal strings."""
        codes = [self.strings.setdefault(text, len(self.strings)) for text in texts.flat]
        return np.array(codes, np.int32).reshape(texts.shape)

    def quantized(self, matrix: Quantized) -> Value:
        """A weight of the matrix's elements, which are computed only where they are not multiplied by."""
        return Value(matrix.dtype.name, matrix.shape, self._weights.quantized(matrix))

    def _size_tensor(self, value: Value) -> relax.Expr:
        """A tensor of sizes that is computed at run time."""
        assert value.contents is not None
        kernel, symbols = size_kernel(value.contents, value.dtype)
        flat = relax.TensorType((value.contents.size,), value.dtype)
        function = self.builder.add_func(kernel, "sizes")
        result = self.builder.emit(relax.op.call_tir(function, symbols, out_ty=flat))
        return self.builder.emit(relax.op.reshape(result, shape_expr(value.shape)))

    def emit(self, expr: relax.Expr, dtype: str | None, hint: str) -> Value:
        result = self.builder.emit(expr)
        kind = result.ty
        if not isinstance(kind, relax.TensorType):
            raise ModelError(f"'{hint}' is not a tensor.")
        dtype = dtype or str(kind.dtype)
        if kind.shape is None or not hasattr(kind.shape, "values"):
            shape: Shape = tuple(self.symbols.fresh(f"{hint}_{k}") for k in range(kind.ndim))
            result = self.builder.match_cast(result, relax.TensorType(shape_expr(shape), str(kind.dtype)))
        else:
            shape = tuple(self.symbols.simplify(d) for d in kind.shape.values)
        return self.shortened(Value(dtype, shape[:-1] if dtype == "complex128" else shape, result))

    def expect(self, condition: Size) -> None:
        """Note which sizes a condition, which the run asserts, makes equal wherever the model runs."""
        if not self.inside:
            self.expected.add_condition(condition)

    def cast_shape(self, value: Value, shape: Shape, name: str, why: str = "") -> Value:
        """The value with that shape, asserted at run time; name says in the error what it is, and why has its
        reason."""
        if not self.inside:
            for have, want in zip(value.shape, shape):
                self.expected.add(have, want)
        stored = tensor_type(value.dtype, shape)
        # Forgotten first: TVM's CanonicalizeBindings takes a cast between two known shapes as the proof that they are
        # equal, and removes it.
        rank = relax.TensorType(None, storage_dtype(value.dtype), ndim=len(storage_shape(value.dtype, shape)))
        forgotten = self.builder.match_cast(self.tensor(value), rank)
        result = self.builder.match_cast(forgotten, stored, f"assertion_{len(self._assertions)}")
        self._assertions[result.name] = f"{name} must be [{', '.join(map(as_text, shape))}]{why}"
        return Value(value.dtype, shape, result, value.contents)

    def size_of(self, name: str, param: relax.Var) -> Value:
        """An int64 scalar whose content becomes a symbol."""
        symbol = self.symbols.named(name)
        self._define(symbol, param)
        contents = np.empty((), object)
        contents[()] = symbol
        return Value("int64", (), param, contents)

    def _define(self, symbol: tirx.Var, scalar: relax.Expr) -> None:
        """Gives a symbol the value of an int64 tensor of one element."""
        vector = self.builder.emit(relax.op.reshape(scalar, shape_expr((1,))))
        self.builder.match_cast(self.builder.emit(relax.op.tensor_to_shape(vector)), relax.ShapeType([symbol]))

    def short(self, size: Size) -> Size:
        """The size, simplified; one whose expression has become long as a symbol, whose value is computed at run
        time."""
        size = self.symbols.simplify(size)
        if not is_long(size):
            return size
        truth = str(size.ty.dtype) == "bool"
        contents = np.empty((), object)
        contents[()] = size.astype("int64")
        symbol = self.symbols.fresh("size", signed=True)
        self._define(symbol, self._size_tensor(Value("int64", (), contents=contents)))
        return symbol != 0 if truth else symbol

    def shortened(self, value: Value) -> Value:
        """The tensor, with symbols in place of dimensions whose expressions have become long."""
        if not any(is_long(d) for d in value.shape):
            return value
        names = tuple(self.symbols.fresh("size") if is_long(d) else d for d in value.shape)
        return self.cast_shape(value, names, "what the model computes")


def shape_expr(shape: Shape) -> relax.ShapeExpr:
    return relax.ShapeExpr([tirx.IntImm("int64", d) if isinstance(d, int) else d for d in shape])


def tensor_type(dtype: str, shape: Shape) -> relax.TensorType:
    return relax.TensorType(shape_expr(storage_shape(dtype, shape)), storage_dtype(dtype))
