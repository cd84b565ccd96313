"""Control flow: If."""

from __future__ import annotations

from tvm import relax

from ..importing.node import Node
from ..importing.values import Size, Value
from . import op
from .asserted import required
from .reshape import reshape_to

_BRANCHES = "then_branch", "else_branch"


@op("If", since=1)
def if_(node: Node, condition: Value) -> tuple[Value, ...]:
    if condition.constant is not None:
        return tuple(node.subgraph(_BRANCHES[0] if condition.constant.all() else _BRANCHES[1]))
    squeezed = _squeezed(node, condition)
    if squeezed is not None:
        return squeezed
    test = node.tensor(reshape_to(node, condition, ()))
    (then, then_values), (otherwise, else_values) = (node.importer.branch(node.attr(b)) for b in _BRANCHES)
    for k, (a, b) in enumerate(zip(then_values, else_values)):
        if a.dtype != b.dtype or a.rank != b.rank:
            types = " and ".join(f"{v.dtype} of rank {v.rank}" for v in (a, b))
            raise node.error(f"the branches give different types for output {k}: {types}.")
    builder = node.importer.builder
    result = builder.emit(relax.If(test, then, otherwise))
    outputs = []
    for k, (a, b) in enumerate(zip(then_values, else_values)):
        part = node.emit(relax.TupleGetItem(result, k), a.dtype)
        outputs.append(
            node.cast_shape(part, tuple(_common(node, d, e, s) for d, e, s in zip(a.shape, b.shape, part.shape)))
        )
    return tuple(outputs)


def _common(node: Node, a: Size, b: Size, fresh: Size) -> Size:
    """The size in both branches, if it is one. Symbols bound inside a branch are never equal to any of the other."""
    return a if node.symbols.equal(a, b) else fresh


def _squeezed(node: Node, condition: Value) -> tuple[Value, ...] | None:
    """The branch that squeezes an axis, where the other leaves it, of a condition on sizes: what PyTorch makes of
    squeeze(axis) where it does not know whether there is one element along it. That there is, is asserted, as results
    of different ranks would need a program each."""
    then, otherwise = ([n.op_type for n in node.attr(b) if n.op_type != "Constant"] for b in _BRANCHES)
    if condition.contents is None or condition.contents.size != 1 or (then, otherwise) != (["Squeeze"], ["Identity"]):
        return None
    (result,) = node.subgraph(_BRANCHES[0])
    text = "the model is compiled for a dimension of 1, which it would squeeze, and the dimension is another."
    return (required(node, result, condition.contents.reshape(-1)[0], text),)
