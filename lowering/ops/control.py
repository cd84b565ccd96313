"""Control flow: If.

Branches may give values of different ranks, of which a program has one each. Nodes that follow are moved into both
branches then, until what comes out is of one type:

    r = If(c, a, b); y = Reshape(r, [-1])    becomes    y = If(c, Reshape(a, [-1]), Reshape(b, [-1]))

How many, is found by lowering them for both branches side by side, into nothing. Where what follows takes the result of
one branch alone, the model is compiled for it, and runs check the condition.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np
import onnx_ir as ir
from tvm import relax

from ..errors import NodeError
from ..importing import symbolic
from ..importing.node import Node
from ..importing.undecided import UndecidedTypeError, names_given, names_read
from ..importing.values import SequenceValue, Size, Value, described, flatten_values, unflatten_values
from . import op
from .asserted import required
from .reshape import reshape_to
from .run_time import bind

if TYPE_CHECKING:
    from ..importing.importer import Importer

_BRANCHES = "then_branch", "else_branch"


@op("If", since=1)
def if_(node: Node, condition: Value) -> tuple[Value, ...]:
    if condition.constant is not None:
        return tuple(_take(node, _BRANCHES[0] if condition.constant.all() else _BRANCHES[1]))
    test = node.tensor(reshape_to(node, condition, ()))
    importer = node.importer
    move = functools.partial(_move, node, condition)
    with importer.undone(UndecidedTypeError):
        try:
            branches = [importer.branch(functools.partial(_lower_body, node, importer, name)) for name in _BRANCHES]
        except UndecidedTypeError as inside:
            raise UndecidedTypeError(inside, move) from None
        for k, (a, b) in enumerate(zip(*(values for _, values in branches))):
            if not _agree(a, b) or not _are_equal_sizes(a, b):
                text = f"the branches give different types for output {k}: {described(a)} and {described(b)}."
                raise UndecidedTypeError(node.error(text), move)
    return tuple(_join(node, test, branches))


def _take(node: Node, branch: str) -> list[Value]:
    """Lower a branch in place of the node."""
    importer, body = node.importer, node.attr(branch)

    def write_out(rest: Sequence[ir.Node], outputs: Sequence[ir.Value]) -> list[ir.Node]:
        importer.read_initializers(body)
        return [*body, *_naming(node, body), *rest]

    with importer.undone(UndecidedTypeError):
        try:
            return node.subgraph(branch, is_open=True)
        except UndecidedTypeError as inside:  # decided by what follows the node
            raise UndecidedTypeError(inside, write_out) from None


def _naming(node: Node, body: ir.Graph) -> list[ir.Node]:
    """Return nodes that give the results of a body the names of the node's outputs."""
    pairs = zip(body.outputs, node.output_values)
    return [ir.Node("", "Identity", [ir.Value(name=a.name)], outputs=[ir.Value(name=b.name)]) for a, b in pairs]


def _lower_body(node: Node, importer: Importer, branch: str) -> list[Value]:
    """Lower a branch, whose results may be of types that branches inside of it leave undecided."""
    body = node.attr(branch)
    outer, importer.undecided = importer.undecided, {value.name or "" for value in body.outputs}
    try:
        return importer.graph(body)
    finally:
        importer.undecided = outer


_Branch = tuple[relax.SeqExpr, list[Value]]


def _agree(a: Value, b: Value, is_condition: bool = False) -> bool:
    """Whether values of two branches have one type; of what is a condition only the truth is read."""
    if isinstance(a, SequenceValue) or isinstance(b, SequenceValue):
        items, others = flatten_values([a]), flatten_values([b])
        return type(a) is type(b) and len(items) == len(others) and all(map(_agree, items, others))
    if a.dtype != b.dtype or a.rank != b.rank:
        return (
            is_condition and a.dtype == b.dtype and all(d == 1 for v in (a, b) for d in v.shape if isinstance(d, int))
        )
    return True


def _are_equal_sizes(a: Value, b: Value) -> bool:
    """Whether what may be shapes, arrays of known integers, have one length."""
    return not symbolic.known(a) or not symbolic.known(b) or a.shape == b.shape


def _join(node: Node, test: relax.Expr, branches: Sequence[_Branch]) -> list[Value]:
    """Emit the If, and return its results."""
    (then, then_values), (otherwise, else_values) = branches
    result = node.importer.builder.emit(relax.If(test, then, otherwise))
    outputs = []
    for k, (a, b) in enumerate(zip(flatten_values(then_values), flatten_values(else_values))):
        part = node.emit(relax.TupleGetItem(result, k), a.dtype)
        shape = tuple(_common(node, d, e, s) for d, e, s in zip(a.shape, b.shape, part.shape))
        joined = node.cast_shape(part, shape)
        outputs.append(Value(joined.dtype, joined.shape, joined.expr, _common_contents(node, a, b)))
    return unflatten_values(outputs, then_values)


def _common(node: Node, a: Size, b: Size, fresh: Size) -> Size:
    """The size in both branches, if it is one. Symbols bound inside a branch are never equal to any of the other."""
    return a if node.symbols.equal(a, b) else fresh


def _common_contents(node: Node, a: Value, b: Value) -> np.ndarray | None:
    """The contents in both branches, if they are known and equal."""
    if not symbolic.known(a) or not symbolic.known(b) or a.contents is None or b.contents is None:
        return None
    if a.dtype == "bool":
        first, second = a.constant, b.constant
        is_known = first is not None and second is not None and np.array_equal(first, second)
        return a.contents if is_known else None
    return a.contents if all(map(node.symbols.equal, a.sizes(), b.sizes())) else None


# -- branches of different types --------------------------------------------------------------------------------------


def _move(node: Node, condition: Value, rest: Sequence[ir.Node], outputs: Sequence[ir.Value]) -> list[ir.Node]:
    """Lower an If whose branches differ, with as many of the following nodes as it takes, and what they need; return
    the nodes that are left.

    Raises:
        NodeError: Types differ to the end, or neither branch's result is what the nodes that follow take.
    """
    following = _following(node, rest)
    count, failed = _rehearse(node, following, outputs)
    if len(failed) == 1:
        _assume(node, condition, 0 if 1 in failed else 1)
        return following
    if failed:
        raise failed[0]
    test = node.tensor(reshape_to(node, condition, ()))
    frontier = _frontier(node, following, count, outputs)
    importer = node.importer

    def lower(branch: str) -> list[Value]:
        body = node.attr(branch)
        values = importer.graph(body, [*_naming(node, body), *following[:count]], frontier)
        return [reshape_to(node, v, ()) if n.name in importer.conditions else v for n, v in zip(frontier, values)]

    branches = [importer.branch(functools.partial(lower, name)) for name in _BRANCHES]
    for name, a, b in zip(frontier, *(values for _, values in branches)):
        if not _agree(a, b):
            raise node.error(
                f"the branches lead to different types of '{name.name}': {described(a)} and {described(b)}."
            )
    importer.bind(frontier, _join(node, test, branches))
    return following[count:]


def _following(node: Node, rest: Sequence[ir.Node]) -> list[ir.Node]:
    """Return the nodes that depend on the results of the node, and lower all others."""
    following, names = list[ir.Node](), set(node.outputs)
    for other in rest:
        if not names_read(other) & names:
            try:
                with node.importer.lowering(other):
                    node.importer.lower_node(other)
                continue
            except UndecidedTypeError:  # it goes into the branches, too
                pass
        following.append(other)
        names |= names_given(other)
    return following


def _frontier(node: Node, following: Sequence[ir.Node], count: int, outputs: Sequence[ir.Value]) -> list[ir.Value]:
    """Return the results of the If and of as many nodes that are read of the others, or are outputs."""
    read = {value.name for value in outputs}.union(*map(names_read, following[count:]))
    given = [*node.output_values, *(value for other in following[:count] for value in other.outputs)]
    return [value for value in given if value.name and value.name in read]


def _rehearse(
    node: Node, following: Sequence[ir.Node], outputs: Sequence[ir.Value]
) -> tuple[int, dict[int, NodeError]]:
    """Return behind how many of the nodes the types of both branches are equal, and which branches cannot be lowered
    that far, or lead to outputs of another rank than is declared. Shapes of one length are better than others."""
    importers = [node.importer.rehearsal() for _ in _BRANCHES]
    possible, failed, differing = None, dict[int, NodeError](), None
    try:
        for importer, branch in zip(importers, _BRANCHES):
            importer.bind(node.output_values, _lower_body(node, importer, branch))
        for count in range(len(following) + 1):
            pairs = _pairs(importers, _frontier(node, following, count, outputs))
            differing = next((n for n, a, b in pairs if not _agree(a, b, n.name in node.importer.conditions)), None)
            if differing is None and all(_are_equal_sizes(a, b) for _, a, b in pairs):
                return count, {}
            possible = count if possible is None and differing is None else possible
            if count == len(following):
                break
            for k, importer in enumerate(importers):
                try:
                    importer.lower_node(following[count])
                except UndecidedTypeError:
                    raise
                except NodeError as error:
                    failed[k] = error
            if failed:
                break
    except UndecidedTypeError:  # branches inside of branches: all that follows goes into both
        count, differing = len(following), None
    finally:
        for importer in importers:
            importer.end_rehearsal()
    if possible is not None:
        return possible, {}
    if not failed and differing is not None:
        failed = _contradicting(node, importers, differing)
    return count, failed


def _pairs(importers: Sequence[Importer], frontier: Sequence[ir.Value]) -> list[tuple[ir.Value, Value, Value]]:
    """Return the names with their values in both branches."""
    one, other = importers
    values = [(name, one.value_of(name.name or ""), other.value_of(name.name or "")) for name in frontier]
    return [(name, a, b) for name, a, b in values if a is not None and b is not None]


def _contradicting(node: Node, importers: Sequence[Importer], output: ir.Value) -> dict[int, NodeError]:
    """Return the branches that lead to another rank of an output than is declared; all, where that is not one."""
    values = [importer.value_of(output.name or "") for importer in importers]
    kinds = " and ".join(described(value) for value in values if value is not None)
    error = node.error(
        f"the branches give different types of '{output.name}', which is an output: {kinds}.",
        "Give both one shape, or fix the condition, with dims= (--dim) where it is on symbolic sizes.",
    )
    if output.name in node.importer.undecided:
        raise UndecidedTypeError(error, _nothing_follows)
    declared = None if output.shape is None else len(output.shape)
    others = [k for k, value in enumerate(values) if value is not None and value.rank != declared]
    return dict.fromkeys(others if len(others) == 1 else range(len(values)), error)


def _nothing_follows(rest: Sequence[ir.Node], outputs: Sequence[ir.Value]) -> list[ir.Node]:
    raise AssertionError("the If around it moves what follows")


def _assume(node: Node, condition: Value, branch: int) -> None:
    """Lower one branch, and assert the condition."""
    if condition.contents is not None and condition.contents.size == 1:
        holds: Size = condition.contents.reshape(-1)[0]
    else:
        number = relax.op.astype(node.tensor(reshape_to(node, condition, (1,))), "int64")
        (symbol,) = bind(node, node.emit(number))
        holds = symbolic.equal(symbol, 1)
    text = (
        f"the model is compiled for {_BRANCHES[branch]}, whose result alone fits what follows, and the condition asks "
        f"for {_BRANCHES[1 - branch]}."
    )
    results = node.subgraph(_BRANCHES[branch])
    holds = symbolic.logical_not(holds) if branch else holds
    tensors = [required(node, value, holds, text) for value in flatten_values(results)]
    node.importer.bind(node.output_values, unflatten_values(tensors, results))
