"""Sizes that depend on data: computed by a small kernel at run time and bound to fresh symbols."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from tvm import relax
from tvm.script.ir_builder import tirx as T

from ..importing.node import Node
from ..importing.values import Shape, Size, Value
from .asserted import sizes_of
from .kernels import loops

MOST_DIMENSIONS = 64  # NumPy's limit


def compute_sizes(
    node: Node,
    name: str,
    count: int,
    body: Callable[..., Sequence[Any]],
    tensors: Sequence[Value],
    sizes: Sequence[Size] = (),
) -> Value:
    """The int64 tensor [count] of the expressions that body(*buffers) returns; it may use the symbols of `sizes`.

    Raises NodeError for tensors of more entries than a tensor has dimensions: of each there is code.
    """
    for tensor in tensors:
        if any(isinstance(n, int) and n > MOST_DIMENSIONS for n in tensor.shape):
            raise node.error(
                f"it is given {list(tensor.shape)} sizes or axes.",
                f"Tensors have at most {MOST_DIMENSIONS} dimensions.",
            )

    def statements(*buffers: Any) -> None:
        *inputs, out = buffers
        for k, value in enumerate(body(*inputs)):
            T.buffer_store(out, value, [k])

    (result,) = loops(node, name, statements, tensors, [((count,), "int64")], sizes)
    return result


def bind(node: Node, sizes: Value, beside: tuple[Shape, str] | None = None, of: Value | None = None) -> list[Any]:
    """Fresh symbols, one per element of an integer tensor of static shape [k].

    A negative element is an error of the run. So is, where they are dimensions of one tensor, one that does not fit in
    memory: beside holds its other dimensions and its element type. of is the input that the sizes are made of.
    """
    builder = node.importer.builder
    tensor = node.tensor(sizes)
    if sizes.dtype != "int64":
        tensor = builder.emit(relax.op.astype(tensor, "int64"))
    shape = sizes_of(node, tensor, beside, node.name_of(sizes if of is None else of))
    symbols = [node.symbols.fresh(f"{node.outputs[0]}_{k}") for k in range(sizes.shape[0])]
    builder.match_cast(shape, relax.ShapeType(symbols))
    return symbols
