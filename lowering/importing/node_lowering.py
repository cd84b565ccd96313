"""The lowering of one node: by folding, by its operator's lowering, or by its ONNX function body.

Each node is lowered by the newest registered lowering of its (domain, operator). Without one, its ONNX function body is
lowered. Without either, an error names the node. Nodes whose inputs are all constants are folded with onnx's own
evaluator.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import onnx_ir as ir

from ..errors import LoweringError
from ..graph.loading.fold import fold_node
from .node import Node
from .type_rules import check_types
from .values import MAX_DIMENSION, Value, format_size

if TYPE_CHECKING:
    from .importer import Importer

Lookup = Callable[[str, str, int], Callable[..., Any] | None]
"""Finds the lowering of an operator, by domain, name and opset; lowering/ops has the registry."""

# The bytes by which folding may enlarge constants while recipes are preserved (Importer.lower_body).
_SMALL_BYTES = 256


def lower_operator(importer: Importer, node: ir.Node, version: int, inputs: list[Value | None]) -> list[Value | None]:
    """Return the values of a node's outputs.

    Args:
        importer: The import to which operations are emitted.
        node: The node.
        version: The version of its operator set.
        inputs: The values of its inputs; None for omitted ones.

    Raises:
        LoweringError: The node cannot be lowered.
    """
    folded = _fold_operator(importer, node, version, inputs)
    if folded is not None:
        return folded
    lowering = importer.lookup(node.domain, node.op_type, version)
    context = Node(importer, node, version, inputs)
    try:
        if lowering is None:
            return importer.lower_function_body(context, node, version, inputs)
        check_types(context, inputs, node.domain, node.op_type)
        result = lowering(context, *inputs)
    except LoweringError:
        raise
    except Exception as error:
        shapes = ", ".join("-" if v is None else f"{v.dtype}[{', '.join(map(format_size, v.shape))}]" for v in inputs)
        raise context.error(
            "node.lowering_failed",
            f"cannot be lowered for inputs {shapes or 'none'}.",
            "Check that its attributes fit these shapes; if they do, the compiler does not support this form. The "
            "cause of this error has the details (-v on the command line).",
        ) from error
    results = list(result) if isinstance(result, (tuple, list)) else [result]
    _check_dimensions(context, results)
    return results


def _fold_operator(
    importer: Importer, node: ir.Node, version: int, inputs: Sequence[Value | None]
) -> list[Value | None] | None:
    """Return the constants that a node of constant inputs computes; None if it is not folded."""
    arrays = [None if v is None else v.constant for v in inputs]
    if any(a is None and v is not None for a, v in zip(arrays, inputs)):
        return None
    folded = fold_node(node, version, arrays, _SMALL_BYTES) if importer.recipes else fold_node(node, version, arrays)
    return None if folded is None else [None if a is None else importer.constant(a) for a in folded]


def _check_dimensions(context: Node, results: Sequence[Value | None]) -> None:
    """Raise NodeError for a result with a dimension that no tensor can have."""
    for value in filter(None, results):
        huge = [d for d in value.shape if isinstance(d, int) and d > MAX_DIMENSION]
        if huge:
            raise context.error(
                "node.dimension_too_large",
                f"a dimension of its result is {huge[0]}; the maximum is {MAX_DIMENSION}.",
            )
