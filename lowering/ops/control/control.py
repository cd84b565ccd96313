"""Control flow: If.

Branches may return values of different ranks, but a program has one rank for each value. In that case, the following
nodes are moved into both branches until the results have one type:

    r = If(c, a, b); y = Reshape(r, [-1])    becomes    y = If(c, Reshape(a, [-1]), Reshape(b, [-1]))

Their number is found by lowering them for both branches side by side, without output. Where the following nodes accept
the result of only one branch, the model is compiled for that branch, and the condition is checked at run time.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np
import onnx_ir as ir
from tvm import relax

from ...errors import NodeError
from ...importing.node import Node
from ...importing.undecided_types import UndecidedTypeError, get_output_names, get_read_names
from ...importing.values import SequenceValue, Size, Value, describe_type, flatten_values, unflatten_values
from .. import op
from ..helpers import symbolic
from ..helpers.assertions import require
from ..helpers.run_time import bind_sizes
from ..tensor.reshape import reshape_to

if TYPE_CHECKING:
    from ...importing.importer import Importer

_BRANCHES = "then_branch", "else_branch"


@op("If", since=1)
def if_(node: Node, condition: Value) -> tuple[Value, ...]:
    if condition.constant is not None:
        return tuple(_lower_static_branch(node, _BRANCHES[0] if condition.constant.all() else _BRANCHES[1]))
    test = node.tensor(reshape_to(node, condition, ()))
    importer = node.importer
    move = functools.partial(_move, node, condition)
    with importer.roll_back_on(UndecidedTypeError):
        try:
            branches = [
                importer.lower_branch(functools.partial(_lower_body, node, importer, name)) for name in _BRANCHES
            ]
        except UndecidedTypeError as error:
            raise UndecidedTypeError(error, move) from None
        for k, (a, b) in enumerate(zip(*(values for _, values in branches))):
            if not _are_same_type(a, b) or not _are_equal_sizes(a, b):
                text = f"the branches give different types for output {k}: {describe_type(a)} and {describe_type(b)}."
                raise UndecidedTypeError(node.error("if.output_type_mismatch", text), move)
    return tuple(_emit_if(node, test, branches))


def _lower_static_branch(node: Node, branch: str) -> list[Value]:
    """Lower a branch in place of the node."""
    importer, body = node.importer, node.attr(branch)

    def write_out(rest: Sequence[ir.Node], outputs: Sequence[ir.Value]) -> list[ir.Node]:
        importer.read_initializers(body)
        return [*body, *_rename_outputs(node, body), *rest]

    with importer.roll_back_on(UndecidedTypeError):
        try:
            return node.subgraph(branch, is_open=True)
        except UndecidedTypeError as error:  # the following nodes decide
            raise UndecidedTypeError(error, write_out) from None


def _rename_outputs(node: Node, body: ir.Graph) -> list[ir.Node]:
    """Return nodes that give the results of a body the names of the node's outputs."""
    pairs = zip(body.outputs, node.output_values)
    return [ir.Node("", "Identity", [ir.Value(name=a.name)], outputs=[ir.Value(name=b.name)]) for a, b in pairs]


def _lower_body(node: Node, importer: Importer, branch: str) -> list[Value]:
    """Lower a branch; its results may have types that nested branches leave undecided."""
    body = node.attr(branch)
    outer, importer.undecided = importer.undecided, {value.name or "" for value in body.outputs}
    try:
        return importer.lower_graph(body)
    finally:
        importer.undecided = outer


_Branch = tuple[relax.SeqExpr, list[Value]]


def _are_same_type(a: Value, b: Value, is_condition: bool = False) -> bool:
    """Return whether values of two branches have one type.

    Of a condition, only the truth value is read.
    """
    if isinstance(a, SequenceValue) or isinstance(b, SequenceValue):
        items, other_items = flatten_values([a]), flatten_values([b])
        return type(a) is type(b) and len(items) == len(other_items) and all(map(_are_same_type, items, other_items))
    if a.dtype != b.dtype or a.rank != b.rank:
        return (
            is_condition and a.dtype == b.dtype and all(d == 1 for v in (a, b) for d in v.shape if isinstance(d, int))
        )
    return True


def _are_equal_sizes(a: Value, b: Value) -> bool:
    """Return whether values that may be shapes (arrays of static integers) have one length."""
    return not symbolic.has_contents(a) or not symbolic.has_contents(b) or a.shape == b.shape


def _emit_if(node: Node, test: relax.Expr, branches: Sequence[_Branch]) -> list[Value]:
    """Emit the If, and return its results."""
    (then, then_values), (otherwise, else_values) = branches
    result = node.importer.builder.emit(relax.If(test, then, otherwise))
    outputs = []
    for k, (a, b) in enumerate(zip(flatten_values(then_values), flatten_values(else_values))):
        output = node.emit(relax.TupleGetItem(result, k), a.dtype)
        shape = tuple(_merge_size(node, d, e, s) for d, e, s in zip(a.shape, b.shape, output.shape))
        joined = node.cast_shape(output, shape)
        outputs.append(Value(joined.dtype, joined.shape, joined.expr, _merge_contents(node, a, b)))
    return unflatten_values(outputs, then_values)


def _merge_size(node: Node, a: Size, b: Size, fresh: Size) -> Size:
    """Return the size in both branches if it is equal, else `fresh`.

    Symbols bound inside a branch are never equal to those of the other branch.
    """
    return a if node.symbols.equal(a, b) else fresh


def _merge_contents(node: Node, a: Value, b: Value) -> np.ndarray | None:
    """Return the contents in both branches if they are static and equal, else None."""
    if not symbolic.has_contents(a) or not symbolic.has_contents(b) or a.contents is None or b.contents is None:
        return None
    if a.dtype == "bool":
        first, second = a.constant, b.constant
        are_equal = first is not None and second is not None and np.array_equal(first, second)
        return a.contents if are_equal else None
    return a.contents if all(map(node.symbols.equal, a.sizes(), b.sizes())) else None


# -- branches of different types --------------------------------------------------------------------------------------


def _move(node: Node, condition: Value, rest: Sequence[ir.Node], outputs: Sequence[ir.Value]) -> list[ir.Node]:
    """Lower an If whose branches differ, with as many of the following nodes as it needs and their inputs.

    Return the remaining nodes.

    Raises:
        NodeError: Types differ to the end, or the following nodes accept the result of neither branch.
    """
    following = _find_dependents(node, rest)
    count, errors = _rehearse(node, following, outputs)
    if len(errors) == 1:
        _assume(node, condition, 0 if 1 in errors else 1)
        return following
    if errors:
        raise errors[0]
    test = node.tensor(reshape_to(node, condition, ()))
    frontier = _find_frontier(node, following, count, outputs)
    importer = node.importer

    def lower(branch: str) -> list[Value]:
        body = node.attr(branch)
        values = importer.lower_graph(body, [*_rename_outputs(node, body), *following[:count]], frontier)
        return [reshape_to(node, v, ()) if n.name in importer.conditions else v for n, v in zip(frontier, values)]

    branches = [importer.lower_branch(functools.partial(lower, name)) for name in _BRANCHES]
    for name, a, b in zip(frontier, *(values for _, values in branches)):
        if not _are_same_type(a, b):
            raise node.error(
                "if.value_type_mismatch",
                f"the branches lead to different types of '{name.name}': {describe_type(a)} and {describe_type(b)}.",
            )
    importer.bind(frontier, _emit_if(node, test, branches))
    return following[count:]


def _find_dependents(node: Node, rest: Sequence[ir.Node]) -> list[ir.Node]:
    """Return the nodes that depend on the results of the node, and lower all others."""
    following, names = list[ir.Node](), set(node.outputs)
    for other in rest:
        if not get_read_names(other) & names:
            try:
                with node.importer.lowering(other):
                    node.importer.lower_node(other)
                continue
            except UndecidedTypeError:  # it also goes into the branches
                pass
        following.append(other)
        names |= get_output_names(other)
    return following


def _find_frontier(node: Node, following: Sequence[ir.Node], count: int, outputs: Sequence[ir.Value]) -> list[ir.Value]:
    """Return the results of the If and of the first `count` nodes that are read later or are outputs."""
    read = {value.name for value in outputs}.union(*map(get_read_names, following[count:]))
    candidates = [*node.output_values, *(value for other in following[:count] for value in other.outputs)]
    return [value for value in candidates if value.name and value.name in read]


def _rehearse(
    node: Node, following: Sequence[ir.Node], outputs: Sequence[ir.Value]
) -> tuple[int, dict[int, NodeError]]:
    """Return after how many nodes the types of both branches are equal, and the errors by branch.

    An error is a branch that cannot be lowered that far, or that leads to outputs of another rank than declared. Shapes
    of equal length are preferred.
    """
    importers = [node.importer.start_rehearsal() for _ in _BRANCHES]
    possible, errors, differing = None, dict[int, NodeError](), None
    try:
        for importer, branch in zip(importers, _BRANCHES):
            importer.bind(node.output_values, _lower_body(node, importer, branch))
        for count in range(len(following) + 1):
            pairs = _pair_values(importers, _find_frontier(node, following, count, outputs))
            differing = next(
                (n for n, a, b in pairs if not _are_same_type(a, b, n.name in node.importer.conditions)), None
            )
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
                    errors[k] = error
            if errors:
                break
    except UndecidedTypeError:  # nested branches: all following nodes go into both
        count, differing = len(following), None
    finally:
        for importer in importers:
            importer.end_rehearsal()
    if possible is not None:
        return possible, {}
    if not errors and differing is not None:
        errors = _find_contradicting(node, importers, differing)
    return count, errors


def _pair_values(importers: Sequence[Importer], frontier: Sequence[ir.Value]) -> list[tuple[ir.Value, Value, Value]]:
    """Return the frontier values with their values in both branches."""
    first, second = importers
    values = [(name, first.get_value(name.name or ""), second.get_value(name.name or "")) for name in frontier]
    return [(name, a, b) for name, a, b in values if a is not None and b is not None]


def _find_contradicting(node: Node, importers: Sequence[Importer], output: ir.Value) -> dict[int, NodeError]:
    """Return the branches that lead to another rank of an output than declared.

    If that is not exactly one branch, return all.
    """
    values = [importer.get_value(output.name or "") for importer in importers]
    kinds = " and ".join(describe_type(value) for value in values if value is not None)
    error = node.error(
        "if.graph_output_type_mismatch",
        f"the branches give different types of '{output.name}', which is an output: {kinds}.",
        "Give both the same shape, or make the condition constant, with dims= (--dim) if it depends on symbolic sizes.",
    )
    if output.name in node.importer.undecided:
        raise UndecidedTypeError(error, _nothing_follows)
    declared = None if output.shape is None else len(output.shape)
    contradicting = [k for k, value in enumerate(values) if value is not None and value.rank != declared]
    return dict.fromkeys(contradicting if len(contradicting) == 1 else range(len(values)), error)


def _nothing_follows(rest: Sequence[ir.Node], outputs: Sequence[ir.Value]) -> list[ir.Node]:
    raise AssertionError("the If around it moves what follows")


def _assume(node: Node, condition: Value, branch: int) -> None:
    """Lower one branch, and assert the condition."""
    if condition.contents is not None and condition.contents.size == 1:
        is_taken: Size = condition.contents.reshape(-1)[0]
    else:
        number = relax.op.astype(node.tensor(reshape_to(node, condition, (1,))), "int64")
        (symbol,) = bind_sizes(node, node.emit(number))
        is_taken = symbolic.equal(symbol, 1)
    text = (
        f"the model is compiled for {_BRANCHES[branch]}, since only its result fits the following nodes, and the "
        f"condition selects {_BRANCHES[1 - branch]}."
    )
    results = node.subgraph(_BRANCHES[branch])
    is_taken = symbolic.logical_not(is_taken) if branch else is_taken
    tensors = [require(node, value, is_taken, "if.branch_not_compiled", text) for value in flatten_values(results)]
    node.importer.bind(node.output_values, unflatten_values(tensors, results))
