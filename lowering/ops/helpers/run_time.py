"""Data-dependent sizes: a small kernel computes them at run time, and fresh symbols are bound to them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from tvm import relax
from tvm.script.ir_builder import tirx as T

from ...importing.node import Node
from ...importing.values import Shape, Size, Value
from .assertions import emit_checked_shape
from .kernels import emit_loops

MAX_DIMENSIONS = 64  # NumPy's limit


def compute_sizes(
    node: Node,
    name: str,
    count: int,
    body: Callable[..., Sequence[Any]],
    tensors: Sequence[Value],
    sizes: Sequence[Size] = (),
) -> Value:
    """Emit the int64 tensor [count] of the expressions that body(*buffers) returns.

    body may use the symbols of `sizes`.

    Raises:
        NodeError: A tensor has more entries than a tensor has dimensions: code is generated for each entry.
    """
    for tensor in tensors:
        if any(isinstance(n, int) and n > MAX_DIMENSIONS for n in tensor.shape):
            raise node.error(
                "node.too_many_dimensions",
                f"a vector of sizes or axes has the shape {list(tensor.shape)}.",
                f"Use at most {MAX_DIMENSIONS} dimensions.",
            )

    def statements(*buffers: Any) -> None:
        *inputs, out = buffers
        for k, value in enumerate(body(*inputs)):
            T.buffer_store(out, value, [k])

    (result,) = emit_loops(node, name, statements, tensors, [((count,), "int64")], sizes)
    return result


def bind_sizes(
    node: Node, sizes: Value, other_dims: tuple[Shape, str] | None = None, source: Value | None = None
) -> list[Any]:
    """Return fresh symbols, one per element of an integer tensor of static shape [k].

    A negative element is an error at run time.

    Args:
        other_dims: The other dimensions and the element type, where the sizes are dimensions of one tensor. A tensor
            that does not fit in memory is an error at run time.
        source: The input from which the sizes are computed, in errors.
    """
    builder = node.importer.builder
    tensor = node.tensor(sizes)
    if sizes.dtype != "int64":
        tensor = builder.emit(relax.op.astype(tensor, "int64"))
    shape = emit_checked_shape(node, tensor, other_dims, node.describe(sizes if source is None else source))
    symbols = [node.symbols.fresh(f"{node.outputs[0]}_{k}") for k in range(sizes.shape[0])]
    builder.match_cast(shape, relax.ShapeType(symbols))
    return symbols
