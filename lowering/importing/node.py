"""`Node`: the view of an ONNX node in a lowering function - attributes, errors, and the Relax builder."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import onnx_ir as ir
from tvm import relax, te, tirx
from tvm.ir import prim

from ..errors import NodeError
from ..graph.caches.donation import has_same_declared_shape
from .quantized_matrix import QuantizedMatrix
from .sizes.open_sizes import broadcast_open_sizes
from .values import (
    MAX_TENSOR_BYTES,
    Shape,
    Size,
    Symbols,
    Value,
    format_size,
    is_empty,
    numpy_dtype,
    storage_dtype,
    storage_shape,
    strip_types,
)

if TYPE_CHECKING:
    from .importer import Importer

_REQUIRED: Any = object()


class Node:
    """An ONNX node that is being lowered; `version` is the opset version of its domain."""

    def __init__(self, importer: Importer, node: ir.Node, version: int, inputs: Sequence[Value | None] = ()) -> None:
        self._importer = importer
        self._ir = node
        self._inputs = inputs
        self._checked: list[tuple[Value, Value]] = []
        self.version = version
        self.op_type, self.domain, self.name = node.op_type, node.domain or "ai.onnx", node.name or ""
        self.where = describe_node(node, importer.declared_version(node, version)) + importer.inside
        # Names of the outputs; "" marks an omitted one.
        self.outputs = tuple(v.name or "" for v in node.outputs)

    # -- declarations of the node ------------------------------------------------------------------------------------

    def attr(self, name: str, default: Any = _REQUIRED) -> Any:
        """Return an attribute as a Python value: tensors as NumPy arrays, graphs as onnx_ir graphs.

        Raise NodeError if it is missing and has no default.
        """
        attribute = self._ir.attributes.get(name)
        if attribute is None:
            if default is _REQUIRED:
                raise self.error(
                    "node.attribute_missing", f"attribute {name} is missing.", "Add it; the operator requires it."
                )
            return default
        if attribute.type == ir.AttributeType.TENSOR:
            return read_array(attribute.as_tensor())
        if attribute.type in (ir.AttributeType.INTS, ir.AttributeType.FLOATS, ir.AttributeType.STRINGS):
            return list(attribute.value)
        return attribute.value

    def error(self, code: str, what: str, remedy: str = "") -> NodeError:
        """Return the error for a node that cannot be lowered.

        Args:
            code: The stable code of the cause, such as "attention.heads_not_divisible".
            what: The reason.
            remedy: The user's fix.
        """
        return NodeError(code, self.where, strip_types(what), strip_types(remedy))

    def has_output(self, output: int) -> bool:
        """Return whether the node has that output, and its name is not empty."""
        return output < len(self.outputs) and self.outputs[output] != ""

    def describe(self, value: Value, full: bool = True) -> str:
        """Return a value's name in errors: as an input of this node, if it is one; `full` adds the node."""
        value = next((old for new, old in self._checked if new is value), value)
        names = (
            v.name for v, bound_value in zip(self._ir.inputs, self._inputs) if bound_value is value and v is not None
        )
        name = next(names, None)
        short = "a tensor inside" if name is None else f"input '{name}'"
        return f"{self.where}: {short}" if full else short

    def keep_name_after_check(
        self, value: Value, expr: relax.Expr, shape: Shape | None = None, keep_contents: bool = True
    ) -> Value:
        """Return the checked value, under the name of the value in errors.

        Without `keep_contents` its contents are dropped, since readers of contents do not depend on the check.
        """
        contents = value.contents if keep_contents else None
        return self.keep_name(Value(value.dtype, value.shape if shape is None else shape, expr, contents), value)

    def keep_name(self, result: Value, value: Value) -> Value:
        """Return the result, under the name of the value in errors."""
        old = next((old for new, old in self._checked if new is value), value)
        self._checked.append((result, old))
        return result

    def declares_same_shape(self, input: int, output: int) -> bool:
        """Return whether the model declares the input and the output with the same shape of numbers and names."""
        source, result = self._ir.inputs[input], self._ir.outputs[output]
        return source is not None and has_same_declared_shape(source, result)

    def declared_size(self, output: int, axis: int) -> int | None:
        """Return the number that the model declares for that dimension of that output, None if it declares none."""
        shape = self._ir.outputs[output].shape
        size = shape[axis] if shape is not None and axis < len(shape) else None
        return size if isinstance(size, int) and size > 0 else None

    def declared_rank(self, output: int) -> int | None:
        """Return the rank that the model declares for that output, None if it declares none."""
        shape = self._ir.outputs[output].shape
        return None if shape is None else len(shape)

    def warn(self, message: str) -> None:
        """Warn the user, once per node, about code that compiles but may not be intended."""
        self._importer.warnings.append(f"{self.where}: {message}")

    # -- sizes --------------------------------------------------------------------------------------------------------

    @property
    def symbols(self) -> Symbols:
        return self._importer.symbols

    def simplify(self, size: Size) -> Size:
        return self.symbols.simplify(size)

    # -- tensors ------------------------------------------------------------------------------------------------------

    def constant(self, array: np.ndarray) -> Value:
        """Return a constant value; it is materialized as a tensor only where one is needed."""
        return self._importer.constant(np.asarray(array))

    def quantized(self, matrix: QuantizedMatrix) -> Value:
        """Return a constant matrix that matmuls read as integers; other readers get floats."""
        return self._importer.quantized(matrix)

    def encode_strings(self, texts: np.ndarray) -> np.ndarray:
        """Return int32 numbers that represent strings in tensors: equal ones for equal strings."""
        return self._importer.encode_strings(texts)

    def sizes(self, contents: Any, dtype: str = "int64") -> Value:
        """Return a value of sizes (ints and TensorIR expressions), given as a nested list or object array."""
        array = np.empty(np.shape(contents), dtype=object)
        array[...] = contents
        simplified = np.frompyfunc(self._importer.shorten, 1, 1)(array) if array.size else array
        simplified = np.asarray(simplified, dtype=object).reshape(array.shape)
        return Value(dtype, array.shape, contents=simplified)

    def tensor(self, value: Value) -> relax.Expr:
        """Return the value as a Relax tensor of its storage type; contents are materialized here and only here."""
        return self._importer.tensor(value)

    def emit(self, expr: relax.Expr, dtype: str | None = None) -> Value:
        """Emit a Relax expression and return its value.

        dtype is the ONNX type if the storage type hides it. If Relax cannot infer the shape of a result of static rank,
        it gets fresh symbols that are bound at run time.
        """
        value = self._importer.emit(expr, dtype, hint=self.outputs[0] if self.outputs else self.op_type)
        self.check_volume(value.shape, value.dtype)
        return value

    def check_volume(self, shape: Shape, dtype: str) -> None:
        """Raise NodeError for a tensor that is provably larger than any memory, unless a symbolic size is 0."""
        factors = [_read_static_factor(d) for d in storage_shape(dtype, shape)]
        if math.prod(factors) * numpy_dtype(storage_dtype(dtype)).itemsize > MAX_TENSOR_BYTES:
            text = ", ".join(format_size(size) for size in shape)
            unless = "" if all(isinstance(size, int) for size in shape) else ", unless a size is 0"
            raise self.error(
                "node.result_too_large", f"its result of shape [{text}], {dtype}, is larger than any memory{unless}."
            )

    def reshape_to(self, value: Value, shape: Shape) -> Value:
        """Return the value in another shape of as many elements."""
        stored = storage_shape(value.dtype, shape)
        if is_empty(stored):  # 0 has another meaning in relax.reshape
            zero = tirx.const(0, storage_dtype(value.dtype))
            return self.emit_te(
                lambda _: te.compute(stored, lambda *_: zero),
                self.tensor(value),
                dtype=value.dtype,
                primfunc_name_hint="zeros",
            )
        return self.emit(relax.op.reshape(self.tensor(value), self.shape_expr(stored)), value.dtype)

    def emit_te(self, function: Callable[..., Any], *args: Any, dtype: str | None = None, **kwargs: Any) -> Value:
        """Emit a call of the PrimFunc that a tensor-expression function (topi, te.compute) describes."""
        return self.emit(self._importer.builder.call_te(function, *args, **kwargs), dtype)

    def call_tir(
        self, function: tirx.PrimFunc, args: Sequence[Any], outputs: Sequence[tuple[Shape, str]], name: str
    ) -> tuple[Value, ...]:
        """Emit a call of a destination-passing PrimFunc.

        args are Relax tensors and then int64 scalars, in the order of its parameters. outputs are the ONNX shape and
        dtype of each result.
        """
        for shape, dtype in outputs:
            self.check_volume(shape, dtype)
        types = [relax.TensorType(self.shape_expr(storage_shape(d, s)), storage_dtype(d)) for s, d in outputs]
        # Without its original name: the module gives every function a unique one.
        variable = self._importer.builder.add_func(function.without_attr("global_symbol"), name)
        call = relax.op.call_tir(variable, list(args), out_ty=types[0] if len(types) == 1 else types)
        result = self._importer.builder.emit(call)
        if len(types) == 1:
            return (self._importer.shorten_shape(Value(outputs[0][1], outputs[0][0], result)),)
        items = [self._importer.builder.emit(relax.TupleGetItem(result, k)) for k in range(len(types))]
        return tuple(self._importer.shorten_shape(Value(d, s, item)) for item, (s, d) in zip(items, outputs))

    def shape_expr(self, shape: Sequence[Size]) -> relax.ShapeExpr:
        """Return the sizes as a Relax shape."""
        return relax.ShapeExpr([tirx.IntImm("int64", d) if isinstance(d, int) else d for d in shape])

    def cast_shape(self, value: Value, shape: Shape, name: str = "", why: str = "") -> Value:
        """Return the same tensor, asserted at run time to have `shape` unless it provably has; binds its new symbols.

        name is the tensor's name in errors, if it is not an input of the node. why is the reason in the error text, if
        present.
        """
        if len(shape) == value.rank and all(map(self.symbols.equal, value.shape, shape)):
            return value
        called = f"{self.where}: {name}" if name else self.describe(value)
        result = self._importer.cast_shape(value, shape, called, why)
        assert result.expr is not None
        return self.keep_name_after_check(value, result.expr, shape)

    def unify(self, *values: Value, may_differ: bool = True) -> tuple[Value, ...]:
        """Return the values with equal sizes for right-aligned broadcasting.

        ONNX lets either of two unequal symbolic sizes be 1 at run time. If the model names their common size and
        may_differ is set, the size is decided at run time (open_sizes.py). Otherwise they are asserted equal at run
        time. If one cannot be more than 1, it is asserted to be 1. A violation is an error, never a wrong result. Raise
        NodeError for sizes that provably differ.
        """
        rank = max(v.rank for v in values)
        may_differ = may_differ and not self._importer.inside
        sizes: list[Size] = [1] * rank
        declared_names = self._declared_result_names(rank)
        is_open = [False] * rank
        for value in values:
            for axis, size in enumerate(value.shape, start=rank - value.rank):
                current = sizes[axis]
                common = (
                    self._importer.common_sizes.broadcast(current, size, declared_names[axis]) if may_differ else None
                )
                if common is not None:
                    sizes[axis], is_open[axis] = common, True
                elif self._is_broadcast_against(current, size):
                    sizes[axis] = size
                elif isinstance(size, int) and size != 1:
                    if isinstance(current, int) and current != size:
                        shapes = " and ".join(str(tuple(v.shape)) for v in values)
                        raise self.error("node.shapes_not_broadcastable", f"shapes {shapes} do not broadcast.")
                    sizes[axis] = size
        result = []
        for value in values:
            target = tuple(
                1 if self._is_broadcast_against(size, sizes[axis]) else sizes[axis]
                for axis, size in enumerate(value.shape, start=rank - value.rank)
            )
            same = all(self.symbols.equal(a, b) for a, b in zip(target, value.shape))
            if any(is_open[rank - value.rank :]):
                result.append(broadcast_open_sizes(self, value, target))
            else:
                result.append(
                    value if same else self.cast_shape(value, target, why=self._explain_assumed_equality(value, target))
                )
        return tuple(result)

    def _explain_assumed_equality(self, value: Value, shape: Shape) -> str:
        """Return the explanation in errors for sizes that inputs declare under two names; "" if there are none."""
        pairs = (
            (have, want)
            for have, want in zip(value.shape, shape)
            if self.symbols.is_declared(have) and self.symbols.is_declared(want) and not self.symbols.equal(have, want)
        )
        have, want = next(pairs, (None, None))
        if have is None or want is None:
            return ""
        return (
            f", as {format_size(have)} and {format_size(want)} are taken to be equal (if one may be 1, declare the "
            "result of the node with a size of a third name)"
        )

    def _declared_result_names(self, rank: int) -> list[str | None]:
        """Return the declared names of the sizes of the first output, if it has that rank; None for other sizes."""
        shape = self._ir.outputs[0].shape if self._ir.outputs else None
        if shape is None or len(shape) != rank:
            return [None] * rank
        return [dim.value if isinstance(dim, ir.SymbolicDim) else None for dim in shape]

    def _is_broadcast_against(self, size: Size, other: Size) -> bool:
        """Return whether the size is 1, or must be for broadcasting against another one.

        `x[:, :1]` and `x[:, -1:]` leave such a size of a symbolic dimension.
        """
        if isinstance(size, (int, tirx.Var)):
            return isinstance(size, int) and size == 1
        return not self.symbols.equal(size, other) and self.symbols.prove(size <= 1)

    # -- subgraphs ----------------------------------------------------------------------------------------------------

    def subgraph(
        self, name: str, *inputs: Value, recipes: bool = False, conditions: int = 0, is_open: bool = False
    ) -> list[Value]:
        """Lower the body graph in attribute `name` inline with these inputs, and return its outputs.

        It sees the values of the surrounding graph. recipes, conditions and is_open are as in `Importer.lower_body`.
        """
        where = f" in {name} of {self.where}"
        return self._importer.lower_body(self.attr(name), inputs, where, recipes, conditions, is_open)

    @property
    def output_values(self) -> Sequence[ir.Value]:
        """The outputs, as the model declares them."""
        return self._ir.outputs

    @property
    def importer(self) -> Importer:
        """The importer, for operators with control flow only."""
        return self._importer


def read_array(tensor: ir.TensorProtocol) -> np.ndarray:
    """Return the elements of a tensor of the model, strings as objects."""
    if not isinstance(tensor, ir.StringTensor):
        return tensor.numpy()
    return np.array([text.decode() for text in tensor.string_data()], dtype=object).reshape(tensor.numpy().shape)


def describe_node(node: ir.Node, version: int) -> str:
    """Return a node's description in errors: domain, operator, version, and name, or first output without a name."""
    label = f"'{node.name}'" if node.name else f"giving '{node.outputs[0].name if node.outputs else ''}'"
    return f"{node.domain or 'ai.onnx'}.{node.op_type}-{version} {label}"


def _read_static_factor(size: Size) -> int:
    """Return the static factor of a size: the number, or the multiplier of a symbolic size."""
    if isinstance(size, int):
        return size
    return size.b.value if isinstance(size, prim.Mul) and isinstance(size.b, prim.IntImm) else 1
