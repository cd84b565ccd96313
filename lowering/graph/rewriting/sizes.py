"""Inference of the size of every value, before anything is matched.

ONNX's own shape inference stops where a shape is computed from symbolic sizes. Exports often do that: a Reshape to a
shape that Shape, Gather, Slice, Mul and Concat compute from another value's dimensions. Here integer arrays are tracked
as expressions of the symbols, and the operators whose result depends on them are inferred from that. All other
operators are left to ONNX.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from typing import Any

import numpy as np
import onnx
import onnx_ir as ir

from ..loading.fold import fold_node
from ..loading.legality import has_bodies, iterate_bodies
from .matching import Size, dims, is_op, read_array
from .size_rules import (
    BROADCAST_OPERATORS,
    CONTENT_RULES,
    MAX_TRACKED_ELEMENTS,
    SHAPE_RULES,
    Shape,
    UnknownSizeError,
    broadcast_sizes,
    canonicalize_size,
    read_sizes,
)

# No schema of this version, an attribute that the schema lacks, types that do not match.
_NOT_INFERRED = (
    onnx.defs.SchemaError,
    onnx.checker.ValidationError,
    onnx.shape_inference.InferenceError,
    ValueError,  # for attributes that onnx cannot read
)


class InferSizesPass(ir.passes.InPlacePass):
    """Pass that gives every value a type and a shape, and small constant arrays a `const_value`.

    1. Arrays of sizes: Shape, Gather, Slice, Concat, Squeeze, Unsqueeze, Reshape, Cast, arithmetic, Equal, Where and
       ConstantOfShape on arrays of up to 64 sizes.
    2. Small constants: nodes whose inputs are all constant, such as a scale computed as 1 / Sqrt(Cast(head size)).
    3. Shapes computed from them: Reshape, Expand, Slice, Concat, Split, Tile, Range, ConstantOfShape.
    4. Broadcasts: of two symbols the first is taken; that they are equal is checked when the model runs.
    5. Everything else by ONNX's inference, then by the model's own declaration; a size that remains unknown is a new
       symbol.
    """

    def call(self, model: ir.Model) -> ir.passes.PassResult:
        sizes = _SizeInference(model)
        for node in model.graph.all_nodes():
            sizes.visit(node)
        return ir.passes.PassResult(model, modified=True)


def _forget_undecided_shapes(node: ir.Node) -> None:
    """Remove the shapes of results whose branches declare different ranks.

    The result has the rank of one of them.
    """
    for value, *results in zip(node.outputs, *(body.outputs for body in iterate_bodies(node))):
        if len({len(result.shape) for result in results if result.shape is not None}) > 1:
            value.shape = None


class _SizeInference:
    def __init__(self, model: ir.Model) -> None:
        self._opsets = {"" if d == "ai.onnx" else d: v for d, v in model.opset_imports.items()}
        self._contents: dict[ir.Value, np.ndarray] = {}  # arrays of ints, bools and SymbolicDims
        self._unknown = 0
        for value in model.graph.inputs:
            if value.shape is not None:
                value.shape = ir.Shape(_name_dimension(d, f"{value.name}_{k}") for k, d in enumerate(value.shape))
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
        self._fold_constants(node, version)
        inferred = self._infer_by_onnx(node, version)
        shape = self._infer_shapes(node)
        for k, value in enumerate(node.outputs):
            if k in inferred:
                value.type = inferred[k][0]
            declared = None if value.shape is None else dims(value)
            candidates = [
                shape[k] if shape is not None and k < len(shape) else None,
                inferred.get(k, (None, None))[1],
                declared,
            ]
            best = self._merge_sizes([c for c in candidates if c is not None])
            if best is not None:
                value.shape = ir.Shape(best)
        if any(value.const_value is not None for value in node.outputs):
            return
        contents = self._track_contents(node)
        if contents is not None:
            self._contents[node.outputs[0]] = contents
            if not any(isinstance(c, ir.SymbolicDim) for c in contents.flat):
                dtype = node.outputs[0].dtype or ir.DataType.INT64
                with suppress(OverflowError):  # operands of several types: the importer reports them
                    node.outputs[0].const_value = ir.tensor(contents.astype(dtype.numpy()), dtype=dtype)

    # -- shapes -------------------------------------------------------------------------------------------------------

    def _merge_sizes(self, candidates: Sequence[Shape]) -> list[Size] | None:
        """Return each size from the first candidate that has it, preferring integers."""
        if not candidates:
            return None
        result: list[Size] = []
        for sizes in zip(*(c for c in candidates if len(c) == len(candidates[0]))):
            available = [s for s in sizes if s is not None and not (isinstance(s, ir.SymbolicDim) and s.value is None)]
            numbers = [s for s in available if isinstance(s, int)]
            result.append((numbers or available or [self._create_symbol()])[0])
        return result

    def _create_symbol(self) -> ir.SymbolicDim:
        self._unknown += 1
        return ir.SymbolicDim(f"unknown_{self._unknown}")

    def _infer_by_onnx(self, node: ir.Node, version: int) -> dict[int, tuple[ir.TypeProtocol, Shape | None]]:
        """Return types and shapes by ONNX's inference, by output index; nothing where it fails."""
        if has_bodies(node):
            return {}
        present = [v for v in node.inputs if v is not None]
        if any(v.type is None for v in present):
            return {}
        try:
            schema: Any = onnx.defs.get_schema(node.op_type, version, node.domain)
            proto = ir.serde.serialize_node(node)
            names = {id(v): f"x{k}" for k, v in enumerate(present)}
            del proto.input[:], proto.output[:]
            proto.input.extend("" if v is None else names[id(v)] for v in node.inputs)
            proto.output.extend(f"y{k}" for k in range(len(node.outputs)))
            types = {names[id(v)]: _make_type_proto(v) for v in present}
            data = {
                names[id(v)]: ir.serde.serialize_tensor(v.const_value)
                for v in present
                if v.const_value is not None and _is_small(v)
            }
            inferred = onnx.shape_inference.infer_node_outputs(schema, proto, types, data)
        except _NOT_INFERRED:
            return {}  # the outputs keep their declarations
        result: dict[int, tuple[ir.TypeProtocol, Shape | None]] = {}
        for k in range(len(node.outputs)):
            kind = inferred.get(f"y{k}")
            if kind is not None and kind.HasField("tensor_type") and kind.tensor_type.elem_type:
                tensor = kind.tensor_type
                shape = [_read_dim(d) for d in tensor.shape.dim] if tensor.HasField("shape") else None
                result[k] = ir.TensorType(ir.DataType(tensor.elem_type)), shape
        return result

    def _infer_shapes(self, node: ir.Node) -> list[Shape | None] | None:
        """Return the output shapes of operators that depend on contents or broadcast."""
        try:
            if node.domain not in ("", "ai.onnx"):
                return None
            if node.op_type in BROADCAST_OPERATORS:
                return [broadcast_sizes([read_sizes(v) for v in node.inputs if v is not None])]
            rule = SHAPE_RULES.get(node.op_type)
            return None if rule is None else rule(self, node)
        except (UnknownSizeError, ValueError, TypeError, IndexError, ZeroDivisionError):
            return None

    def read_contents(self, value: ir.Value | None) -> np.ndarray:
        """Return an array of sizes; raise UnknownSizeError if it is not tracked."""
        if value is None:
            raise UnknownSizeError
        if value in self._contents:
            return self._contents[value]
        if not _is_small(value):
            raise UnknownSizeError
        elements = read_array(value)
        if elements is None or elements.dtype.kind not in "iub":
            raise UnknownSizeError
        return elements.astype(object)

    # -- contents -----------------------------------------------------------------------------------------------------

    def _fold_constants(self, node: ir.Node, version: int) -> None:
        """Fold case 2, and Constant nodes of any size."""
        if is_op(node, "Constant"):
            node.outputs[0].const_value = ir.convenience.get_const_tensor(node.outputs[0])
            return
        if not node.inputs or not all(v is None or _is_small(v) for v in node.inputs):
            return
        if any(v is not None and v.dtype == ir.DataType.STRING for v in node.inputs):
            return
        results = fold_node(node, version, [read_array(v) for v in node.inputs])
        for value, result in zip(node.outputs, results or []):
            if result is not None and result.size <= MAX_TRACKED_ELEMENTS:
                value.const_value = ir.tensor(result)

    def _track_contents(self, node: ir.Node) -> np.ndarray | None:
        """Return the tracked contents of case 1."""
        rule = CONTENT_RULES.get(node.op_type) if node.domain in ("", "ai.onnx") else None
        if rule is None:
            return None
        try:
            result = np.asarray(rule(self, node), dtype=object)
            if result.size > MAX_TRACKED_ELEMENTS:
                return None
            return np.array([canonicalize_size(c) for c in result.flat] + [None], dtype=object)[:-1].reshape(
                result.shape
            )
        except (UnknownSizeError, ValueError, TypeError, IndexError, ZeroDivisionError):
            return None


def _name_dimension(size: Any, name: str) -> Size:
    """Return a dimension, or a symbol with the importer's own name if the input does not name it."""
    return ir.SymbolicDim(name) if isinstance(size, ir.SymbolicDim) and size.value is None else size


def _is_small(value: ir.Value) -> bool:
    return value.const_value is not None and value.const_value.size <= MAX_TRACKED_ELEMENTS


def _read_dim(dim: onnx.TensorShapeProto.Dimension) -> Size | None:
    if dim.HasField("dim_value"):
        return dim.dim_value
    return ir.SymbolicDim(dim.dim_param) if dim.dim_param and not dim.dim_param.startswith("unk__") else None


def _make_type_proto(value: ir.Value) -> onnx.TypeProto:
    shape = None if value.shape is None else [d if isinstance(d, int) else d.value for d in value.shape]
    assert value.dtype is not None
    return onnx.helper.make_tensor_type_proto(int(value.dtype), shape)
