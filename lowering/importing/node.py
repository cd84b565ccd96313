"""`Node`: what a lowering function sees of the ONNX node it lowers - attributes, errors, and the Relax builder."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import onnx_ir as ir
from tvm import relax, te, tirx
from tvm.ir import prim

from ..errors import NodeError
from ..graph.donation import declared_alike
from .open_sizes import stretched
from .quantized import Quantized
from .values import (
    MOST_BYTES,
    Shape,
    Size,
    Symbols,
    Value,
    as_text,
    empty,
    numpy_dtype,
    storage_dtype,
    storage_shape,
    without_types,
)

if TYPE_CHECKING:
    from .importer import Importer

_REQUIRED: Any = object()


class Node:
    """One ONNX node, of opset version `version` of its domain, under lowering."""

    def __init__(self, importer: Importer, node: ir.Node, version: int, inputs: Sequence[Value | None] = ()) -> None:
        self._importer = importer
        self._ir = node
        self._inputs = inputs
        self._checked: list[tuple[Value, Value]] = []
        self.version = version
        self.op_type, self.domain, self.name = node.op_type, node.domain or "ai.onnx", node.name or ""
        self.where = describe(node, importer.said_version(node, version)) + importer.inside
        # Which outputs somebody reads: "" marks a hole.
        self.outputs = tuple(v.name or "" for v in node.outputs)

    # -- what the node says -------------------------------------------------------------------------------------------

    def attr(self, name: str, default: Any = _REQUIRED) -> Any:
        """The attribute as a Python value (tensors as NumPy arrays, graphs as onnx_ir graphs); NodeError if
        required."""
        attribute = self._ir.attributes.get(name)
        if attribute is None:
            if default is _REQUIRED:
                raise self.error(f"attribute {name} is missing.", "Add it; the operator requires it.")
            return default
        if attribute.type == ir.AttributeType.TENSOR:
            return array_of(attribute.as_tensor())
        if attribute.type in (ir.AttributeType.INTS, ir.AttributeType.FLOATS, ir.AttributeType.STRINGS):
            return list(attribute.value)
        return attribute.value

    def error(self, what: str, remedy: str = "") -> NodeError:
        """The error to raise when this node cannot be lowered: `what` blocks it, `remedy` is what the user can do."""
        return NodeError(self.where, without_types(what), without_types(remedy))

    def wants(self, output: int) -> bool:
        """Whether the node has that output, and it is no hole."""
        return output < len(self.outputs) and self.outputs[output] != ""

    def name_of(self, value: Value, full: bool = True) -> str:
        """How errors name a value: as an input of this node, if it is one; full names the node, too."""
        value = next((old for new, old in self._checked if new is value), value)
        names = (v.name for v, given in zip(self._ir.inputs, self._inputs) if given is value and v is not None)
        name = next(names, None)
        short = "a tensor inside" if name is None else f"input '{name}'"
        return f"{self.where}: {short}" if full else short

    def checked(self, value: Value, expr: relax.Expr, shape: Shape | None = None, known: bool = True) -> Value:
        """The value behind a check of it, which is called what it was. Without known its contents are forgotten: who
        reads those does not wait for the check."""
        contents = value.contents if known else None
        return self.called(Value(value.dtype, value.shape if shape is None else shape, expr, contents), value)

    def called(self, result: Value, value: Value) -> Value:
        """The result, which errors call what the value is called."""
        old = next((old for new, old in self._checked if new is value), value)
        self._checked.append((result, old))
        return result

    def same_shape(self, input: int, output: int) -> bool:
        """Whether the model declares that input and that output with one shape, of numbers and names."""
        one, other = self._ir.inputs[input], self._ir.outputs[output]
        return one is not None and declared_alike(one, other)

    def declared_size(self, output: int, axis: int) -> int | None:
        """The number that the model declares for that dimension of that output; None where it declares none."""
        shape = self._ir.outputs[output].shape
        size = shape[axis] if shape is not None and axis < len(shape) else None
        return size if isinstance(size, int) and size > 0 else None

    def declared_rank(self, output: int) -> int | None:
        """The number of dimensions that the model declares for that output; None where it declares none."""
        shape = self._ir.outputs[output].shape
        return None if shape is None else len(shape)

    def warn(self, message: str) -> None:
        """Tells the user, once per node, about something that compiles but may not be what they meant."""
        self._importer.warnings.append(f"{self.where}: {message}")

    # -- sizes --------------------------------------------------------------------------------------------------------

    @property
    def symbols(self) -> Symbols:
        return self._importer.symbols

    def simplify(self, size: Size) -> Size:
        return self.symbols.simplify(size)

    # -- tensors ------------------------------------------------------------------------------------------------------

    def constant(self, array: np.ndarray) -> Value:
        """A value with known numbers; becomes a tensor only where one is needed."""
        return self._importer.constant(np.asarray(array))

    def quantized(self, matrix: Quantized) -> Value:
        """A constant matrix that matmuls read as integers; what else reads it gets floats."""
        return self._importer.quantized(matrix)

    def string_codes(self, texts: np.ndarray) -> np.ndarray:
        """The int32 numbers that stand for strings in tensors: equal ones for equal strings."""
        return self._importer.string_codes(texts)

    def sizes(self, contents: Any, dtype: str = "int64") -> Value:
        """A value whose contents are sizes (ints and TensorIR expressions), given as a nested list or object array."""
        array = np.empty(np.shape(contents), dtype=object)
        array[...] = contents
        simplified = np.frompyfunc(self._importer.short, 1, 1)(array) if array.size else array
        simplified = np.asarray(simplified, dtype=object).reshape(array.shape)
        return Value(dtype, array.shape, contents=simplified)

    def tensor(self, value: Value) -> relax.Expr:
        """The value as a Relax tensor of its storage type; known contents are materialized here and only here."""
        return self._importer.tensor(value)

    def emit(self, expr: relax.Expr, dtype: str | None = None) -> Value:
        """Emits a Relax expression and describes the result.

        dtype is the ONNX type where the storage type hides it.         A result of known rank whose shape Relax cannot
        tell gets fresh symbols, bound at run time.
        """
        value = self._importer.emit(expr, dtype, hint=self.outputs[0] if self.outputs else self.op_type)
        self.check_volume(value.shape, value.dtype)
        return value

    def check_volume(self, shape: Shape, dtype: str) -> None:
        """Raises NodeError for a tensor that is known to be larger than any memory, unless a symbolic size is 0."""
        known = [_factor(d) for d in storage_shape(dtype, shape)]
        if math.prod(known) * numpy_dtype(storage_dtype(dtype)).itemsize > MOST_BYTES:
            text = ", ".join(as_text(size) for size in shape)
            unless = "" if all(isinstance(size, int) for size in shape) else ", where no size is 0"
            raise self.error(f"its result of shape [{text}], {dtype}, is larger than any memory{unless}.")

    def reshaped(self, value: Value, shape: Shape) -> Value:
        """The elements of a value in another shape, of as many."""
        stored = storage_shape(value.dtype, shape)
        if empty(stored):  # a 0 has another meaning in Relax
            zero = tirx.const(0, storage_dtype(value.dtype))
            return self.emit_te(
                lambda _: te.compute(stored, lambda *_: zero),
                self.tensor(value),
                dtype=value.dtype,
                primfunc_name_hint="zeros",
            )
        return self.emit(relax.op.reshape(self.tensor(value), self.shape_expr(stored)), value.dtype)

    def emit_te(self, function: Callable[..., Any], *args: Any, dtype: str | None = None, **kwargs: Any) -> Value:
        """Emits a call to the PrimFunc that a tensor-expression function (topi, te.compute) describes."""
        return self.emit(self._importer.builder.call_te(function, *args, **kwargs), dtype)

    def call_tir(
        self, function: tirx.PrimFunc, args: Sequence[Any], outputs: Sequence[tuple[Shape, str]], name: str
    ) -> tuple[Value, ...]:
        """Emits a call of a destination-passing PrimFunc.

        args are tensors (Relax) and then int64 scalars, in the order of its parameters; outputs give ONNX shape and
        dtype of each result.
        """
        for shape, dtype in outputs:
            self.check_volume(shape, dtype)
        types = [relax.TensorType(self.shape_expr(storage_shape(d, s)), storage_dtype(d)) for s, d in outputs]
        # Without the name it was built with: the module gives every function its own.
        variable = self._importer.builder.add_func(function.without_attr("global_symbol"), name)
        call = relax.op.call_tir(variable, list(args), out_ty=types[0] if len(types) == 1 else types)
        result = self._importer.builder.emit(call)
        if len(types) == 1:
            return (self._importer.shortened(Value(outputs[0][1], outputs[0][0], result)),)
        parts = [self._importer.builder.emit(relax.TupleGetItem(result, k)) for k in range(len(types))]
        return tuple(self._importer.shortened(Value(d, s, part)) for part, (s, d) in zip(parts, outputs))

    def shape_expr(self, shape: Sequence[Size]) -> relax.ShapeExpr:
        """The sizes as a Relax shape."""
        return relax.ShapeExpr([tirx.IntImm("int64", d) if isinstance(d, int) else d for d in shape])

    def cast_shape(self, value: Value, shape: Shape, name: str = "", why: str = "") -> Value:
        """The same tensor, asserted at run time to have `shape` (sizes, in which new symbols are defined by it).

        name is what errors call it, where it is no input of the node; why, where it is given, is the reason they say.
        """
        called = f"{self.where}: {name}" if name else self.name_of(value)
        result = self._importer.cast_shape(value, shape, called, why)
        assert result.expr is not None
        return self.checked(value, result.expr, shape)

    def unify(self, *values: Value, may_differ: bool = True) -> tuple[Value, ...]:
        """The values with the dimensions that must be equal for right-aligned broadcasting made so.

        ONNX lets either of two unequal symbolic sizes be 1 at run time. Where the model gives their common size a name
        of its own, and may_differ, the run decides (open_sizes.py); else they are asserted equal at run time, or one
        of them to be 1 where it cannot be more: a violation is an error, never a wrong result. Raises NodeError for
        sizes known to differ.
        """
        rank = max(v.rank for v in values)
        may_differ = may_differ and not self._importer.inside
        wanted: list[Size] = [1] * rank
        named = self._names_of_result(rank)
        is_open = [False] * rank
        for value in values:
            for axis, size in enumerate(value.shape, start=rank - value.rank):
                now = wanted[axis]
                common = self._importer.common_sizes.of(now, size, named[axis]) if may_differ else None
                if common is not None:
                    wanted[axis], is_open[axis] = common, True
                elif self._is_one_beside(now, size):
                    wanted[axis] = size
                elif isinstance(size, int) and size != 1:
                    if isinstance(now, int) and now != size:
                        shapes = " and ".join(str(tuple(v.shape)) for v in values)
                        raise self.error(f"shapes {shapes} do not broadcast.")
                    wanted[axis] = size
        result = []
        for value in values:
            target = tuple(
                1 if self._is_one_beside(size, wanted[axis]) else wanted[axis]
                for axis, size in enumerate(value.shape, start=rank - value.rank)
            )
            same = all(self.symbols.equal(a, b) for a, b in zip(target, value.shape))
            if any(is_open[rank - value.rank :]):
                result.append(stretched(self, value, target))
            else:
                result.append(
                    value if same else self.cast_shape(value, target, why=self._taken_for_equal(value, target))
                )
        return tuple(result)

    def _taken_for_equal(self, value: Value, shape: Shape) -> str:
        """What errors say of sizes that inputs declare by two names; "" where there are none."""
        pairs = (
            (have, want)
            for have, want in zip(value.shape, shape)
            if self.symbols.is_declared(have) and self.symbols.is_declared(want) and not self.symbols.equal(have, want)
        )
        have, want = next(pairs, (None, None))
        if have is None or want is None:
            return ""
        return (
            f", as {as_text(have)} and {as_text(want)} are taken to be equal (if one may be 1, declare the result of "
            "the node with a size of a third name)"
        )

    def _names_of_result(self, rank: int) -> list[str | None]:
        """What the model calls the sizes of the first output, which has that rank; None for numbers and for nothing."""
        shape = self._ir.outputs[0].shape if self._ir.outputs else None
        if shape is None or len(shape) != rank:
            return [None] * rank
        return [dim.value if isinstance(dim, ir.SymbolicDim) else None for dim in shape]

    def _is_one_beside(self, size: Size, other: Size) -> bool:
        """Whether the size is 1, or has to be for broadcasting with another: such is what `x[:, :1]` or `x[:, -1:]`
        leaves of a symbolic dimension."""
        if isinstance(size, (int, tirx.Var)):
            return isinstance(size, int) and size == 1
        return not self.symbols.equal(size, other) and self.symbols.prove(size <= 1)

    # -- subgraphs ----------------------------------------------------------------------------------------------------

    def subgraph(
        self, name: str, *inputs: Value, recipes: bool = False, conditions: int = 0, is_open: bool = False
    ) -> list[Value]:
        """Lowers the body graph that is the attribute `name` in place, with these inputs; it sees the values around the
        node. recipes, conditions and is_open are as in `Importer.body`.

        Returns its outputs.
        """
        where = f" in {name} of {self.where}"
        return self._importer.body(self.attr(name), inputs, where, recipes, conditions, is_open)

    @property
    def output_values(self) -> Sequence[ir.Value]:
        """The outputs, as the model declares them."""
        return self._ir.outputs

    @property
    def importer(self) -> Importer:
        """For operators with control flow only."""
        return self._importer


def array_of(tensor: ir.TensorProtocol) -> np.ndarray:
    """The elements of a tensor of the model, strings as objects."""
    if not isinstance(tensor, ir.StringTensor):
        return tensor.numpy()
    return np.array([text.decode() for text in tensor.string_data()], dtype=object).reshape(tensor.numpy().shape)


def describe(node: ir.Node, version: int) -> str:
    """How errors name a node: domain, operator, version, node name, and the first output for nodes without a name."""
    label = f"'{node.name}'" if node.name else f"giving '{node.outputs[0].name if node.outputs else ''}'"
    return f"{node.domain or 'ai.onnx'}.{node.op_type}-{version} {label}"


def _factor(size: Size) -> int:
    """What is known of a size: the number, or the one by which a symbolic size is multiplied."""
    if isinstance(size, int):
        return size
    return size.b.value if isinstance(size, prim.Mul) and isinstance(size.b, prim.IntImm) else 1
