"""The size of every value, before anything is matched.

ONNX's own shape inference stops where a shape is computed from symbolic sizes. Exports are full of that: a Reshape to
what Shape, Gather, Slice, Mul and Concat made of another value's dimensions. Here integer arrays are followed as
expressions of the symbols, and the operators whose result depends on them are inferred from that; all other operators
are left to ONNX.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from typing import Any

import numpy as np
import onnx
import onnx_ir as ir

from ..graph.fold import fold
from .matching import Size, array, dims, is_op
from .size_rules import BROADCAST, CONTENTS, FOLLOWED, SHAPES, Shape, UnknownError, broadcast, settled, sizes_of

# No schema of this version, an attribute that it does not have, types that do not fit.
_NOT_INFERRED = (
    onnx.defs.SchemaError,
    onnx.checker.ValidationError,
    onnx.shape_inference.InferenceError,
    ValueError,  # of attributes that it cannot read
)


class InferSizesPass(ir.passes.InPlacePass):
    """Gives every value a type and a shape, and small known arrays a `const_value`.

    1. Arrays of sizes: Shape, Gather, Slice, Concat, Squeeze, Unsqueeze, Reshape, Cast, arithmetic, Equal, Where and
       ConstantOfShape on arrays of up to 64 sizes.
    2. Small constants: nodes whose inputs are all known, such as a scale computed as 1 / Sqrt(Cast(head size)).
    3. Shapes made of them: Reshape, Expand, Slice, Concat, Split, Tile, Range, ConstantOfShape.
    4. Broadcasts: of two symbols the first is taken; that they are equal is checked when the model runs.
    5. Everything else by ONNX's inference, and what that does not know by the model's own declaration; what nobody
       knows is a new symbol.
    """

    def call(self, model: ir.Model) -> ir.passes.PassResult:
        sizes = _Sizes(model)
        for node in model.graph.all_nodes():
            sizes.visit(node)
        return ir.passes.PassResult(model, modified=True)


def _forget_undecided_shapes(node: ir.Node) -> None:
    """Take the shapes off results whose branches declare different numbers of dimensions: it is that of one of them."""
    bodies = [a.as_graph() for a in node.attributes.values() if a.type == ir.AttributeType.GRAPH]
    for value, *results in zip(node.outputs, *(body.outputs for body in bodies)):
        if len({len(result.shape) for result in results if result.shape is not None}) > 1:
            value.shape = None


class _Sizes:
    def __init__(self, model: ir.Model) -> None:
        self._opsets = {"" if d == "ai.onnx" else d: v for d, v in model.opset_imports.items()}
        self._contents: dict[ir.Value, np.ndarray] = {}  # of ints, bools and SymbolicDims
        self._unknown = 0
        for value in model.graph.inputs:
            if value.shape is not None:
                value.shape = ir.Shape(_named(d, f"{value.name}_{k}") for k, d in enumerate(value.shape))
        for value in model.graph.initializers.values():
            tensor = value.const_value
            if tensor is not None:
                value.type, value.shape = ir.TensorType(tensor.dtype), ir.Shape(tensor.shape.numpy())

    def visit(self, node: ir.Node) -> None:
        version = self._opsets.get("" if node.domain == "ai.onnx" else node.domain)
        if version is None:
            return
        if is_op(node, "If"):
            _forget_undecided_shapes(node)
        self._fold(node, version)
        inferred = self._by_onnx(node, version)
        shape = self._shape(node)
        for k, value in enumerate(node.outputs):
            if k in inferred:
                value.type = inferred[k][0]
            declared = None if value.shape is None else dims(value)
            candidates = [
                shape[k] if shape is not None and k < len(shape) else None,
                inferred.get(k, (None, None))[1],
                declared,
            ]
            best = self._merged([c for c in candidates if c is not None])
            if best is not None:
                value.shape = ir.Shape(best)
        if any(value.const_value is not None for value in node.outputs):
            return
        contents = self._follow(node)
        if contents is not None:
            self._contents[node.outputs[0]] = contents
            if not any(isinstance(c, ir.SymbolicDim) for c in contents.flat):
                dtype = node.outputs[0].dtype or ir.DataType.INT64
                with suppress(OverflowError):  # operands of several types: the importer has words for them
                    node.outputs[0].const_value = ir.tensor(contents.astype(dtype.numpy()), dtype=dtype)

    # -- shapes -------------------------------------------------------------------------------------------------------

    def _merged(self, candidates: Sequence[Shape]) -> list[Size] | None:
        """Each size from the first candidate that knows it, a number where one has a number."""
        if not candidates:
            return None
        result: list[Size] = []
        for sizes in zip(*(c for c in candidates if len(c) == len(candidates[0]))):
            some = [s for s in sizes if s is not None and not (isinstance(s, ir.SymbolicDim) and s.value is None)]
            numbers = [s for s in some if isinstance(s, int)]
            result.append((numbers or some or [self._fresh()])[0])
        return result

    def _fresh(self) -> ir.SymbolicDim:
        self._unknown += 1
        return ir.SymbolicDim(f"unknown_{self._unknown}")

    def _by_onnx(self, node: ir.Node, version: int) -> dict[int, tuple[ir.TypeProtocol, Shape | None]]:
        """Types and shapes by ONNX's inference, by output position; nothing where it fails."""
        if any(a.type in (ir.AttributeType.GRAPH, ir.AttributeType.GRAPHS) for a in node.attributes.values()):
            return {}
        given = [v for v in node.inputs if v is not None]
        if any(v.type is None for v in given):
            return {}
        try:
            schema: Any = onnx.defs.get_schema(node.op_type, version, node.domain)
            proto = ir.serde.serialize_node(node)
            names = {id(v): f"x{k}" for k, v in enumerate(given)}
            del proto.input[:], proto.output[:]
            proto.input.extend("" if v is None else names[id(v)] for v in node.inputs)
            proto.output.extend(f"y{k}" for k in range(len(node.outputs)))
            types = {names[id(v)]: _type_proto(v) for v in given}
            data = {
                names[id(v)]: ir.serde.serialize_tensor(v.const_value)
                for v in given
                if v.const_value is not None and _small(v)
            }
            found = onnx.shape_inference.infer_node_outputs(schema, proto, types, data)
        except _NOT_INFERRED:
            return {}  # what ONNX cannot infer keeps its declaration
        result: dict[int, tuple[ir.TypeProtocol, Shape | None]] = {}
        for k in range(len(node.outputs)):
            kind = found.get(f"y{k}")
            if kind is not None and kind.HasField("tensor_type") and kind.tensor_type.elem_type:
                tensor = kind.tensor_type
                shape = [_dim(d) for d in tensor.shape.dim] if tensor.HasField("shape") else None
                result[k] = ir.TensorType(ir.DataType(tensor.elem_type)), shape
        return result

    def _shape(self, node: ir.Node) -> list[Shape | None] | None:
        """The shapes of the outputs of operators that depend on contents or broadcast."""
        try:
            if node.domain not in ("", "ai.onnx"):
                return None
            if node.op_type in BROADCAST:
                return [broadcast([sizes_of(v) for v in node.inputs if v is not None])]
            rule = SHAPES.get(node.op_type)
            return None if rule is None else rule(self, node)
        except (UnknownError, ValueError, TypeError, IndexError, ZeroDivisionError):
            return None

    def contents(self, value: ir.Value | None) -> np.ndarray:
        """An array of sizes; raises UnknownError."""
        if value is None:
            raise UnknownError
        if value in self._contents:
            return self._contents[value]
        if not _small(value):
            raise UnknownError
        found = array(value)
        if found is None or found.dtype.kind not in "iub":
            raise UnknownError
        return found.astype(object)

    # -- contents -----------------------------------------------------------------------------------------------------

    def _fold(self, node: ir.Node, version: int) -> None:
        """Case 2, and Constant nodes of any size."""
        if is_op(node, "Constant"):
            node.outputs[0].const_value = ir.convenience.get_const_tensor(node.outputs[0])
            return
        if not node.inputs or not all(v is None or _small(v) for v in node.inputs):
            return
        if any(v is not None and v.dtype == ir.DataType.STRING for v in node.inputs):
            return
        results = fold(node, version, [array(v) for v in node.inputs])
        for value, result in zip(node.outputs, results or []):
            if result is not None and result.size <= FOLLOWED:
                value.const_value = ir.tensor(result)

    def _follow(self, node: ir.Node) -> np.ndarray | None:
        """Case 1."""
        rule = CONTENTS.get(node.op_type) if node.domain in ("", "ai.onnx") else None
        if rule is None:
            return None
        try:
            result = np.asarray(rule(self, node), dtype=object)
            if result.size > FOLLOWED:
                return None
            return np.array([settled(c) for c in result.flat] + [None], dtype=object)[:-1].reshape(result.shape)
        except (UnknownError, ValueError, TypeError, IndexError, ZeroDivisionError):
            return None


def _named(size: Any, name: str) -> Size:
    """The importer's own name for a dimension of an input that has none."""
    return ir.SymbolicDim(name) if isinstance(size, ir.SymbolicDim) and size.value is None else size


def _small(value: ir.Value) -> bool:
    return value.const_value is not None and value.const_value.size <= FOLLOWED


def _dim(dim: onnx.TensorShapeProto.Dimension) -> Size | None:
    if dim.HasField("dim_value"):
        return dim.dim_value
    return ir.SymbolicDim(dim.dim_param) if dim.dim_param and not dim.dim_param.startswith("unk__") else None


def _type_proto(value: ir.Value) -> onnx.TypeProto:
    shape = None if value.shape is None else [d if isinstance(d, int) else d.value for d in value.shape]
    assert value.dtype is not None
    return onnx.helper.make_tensor_type_proto(int(value.dtype), shape)
