"""ONNX Einsum: matmuls where the equation contains some, else a kernel that contracts all operands."""

from __future__ import annotations

import functools
import itertools
import operator
from collections.abc import Sequence
from dataclasses import dataclass

from tvm import te, tirx

from ...importing.node import Node
from ...importing.values import Shape, Size, Value, is_one, prod
from .. import op
from ..helpers.compute import SUM, Element, Extent, read_element, reduce_axes, require_numbers, unify_sizes
from .matmul import emit_matmul, permute_axes, round_to

Label = str | int
Labels = tuple[Label, ...]
"""One label per dimension: a letter, or for the dimensions of an ellipsis -1 for the last, -2 for the one before it."""


@op("Einsum", since=12)
def einsum(node: Node, *values: Value) -> Value:
    require_numbers(node, *values)
    operands, result = _parse(node, node.attr("equation"), [v.rank for v in values])
    values = tuple(_unify_sizes(node, values, operands))
    while (pair := _find_matmul(values, operands, result)) is not None:
        values, operands = _apply_matmul(node, values, operands, *pair)
    roles = _find_roles(operands[0], operands[1], result) if len(operands) == 2 else None
    if roles is not None:
        return _emit_pair_matmul(node, values[0], values[1], operands, result, roles)

    def kernel(*tensors: te.Tensor) -> te.Tensor:
        return _compute_contraction(tensors, operands, result, values[0].dtype)

    return node.emit_te(kernel, *(node.tensor(v) for v in values), primfunc_name_hint="einsum")


# -- the equation -----------------------------------------------------------------------------------------------------


def _parse(node: Node, text: str, ranks: Sequence[int]) -> tuple[list[Labels], Labels]:
    """Return the labels of the operands and of the result.

    Raises:
        NodeError: The text is not an equation of operands of these ranks.
    """
    left, arrow, right = text.replace(" ", "").partition("->")
    terms = left.split(",")
    if len(terms) != len(ranks):
        raise node.error(
            "einsum.term_count_mismatch", f"equation '{text}' has {len(terms)} terms for {len(ranks)} inputs."
        )
    operands = [_read_labels(node, text, term, rank) for term, rank in zip(terms, ranks)]
    flat = [label for labels in operands for label in labels]
    dots = sorted({label for label in flat if isinstance(label, int)})
    if not arrow:  # the letters that appear once, in alphabetical order
        return operands, (*dots, *sorted({c for c in flat if isinstance(c, str) and flat.count(c) == 1}))
    rank = len(right.replace("...", "")) + (len(dots) if "..." in right else 0)
    result = _read_labels(node, text, right, rank)
    if not set(result) <= set(flat) or len(set(result)) != len(result):
        raise node.error(
            "einsum.result_label_unsupported", f"equation '{text}' has a result label that is repeated, or in no input."
        )
    return operands, result


def _read_labels(node: Node, text: str, term: str, rank: int) -> Labels:
    before, dots, after = term.partition("...")
    letters = before + after
    hidden = rank - len(letters)
    if (letters and not letters.isalpha()) or hidden < 0 or (hidden and not dots):
        raise node.error(
            "einsum.term_rank_mismatch", f"term '{term}' of equation '{text}' does not fit a tensor of rank {rank}."
        )
    return (*before, *range(-hidden, 0), *after)


def _unify_sizes(node: Node, values: Sequence[Value], operands: Sequence[Labels]) -> list[Value]:
    """Return the values with equal sizes for equal labels; a dimension of 1 broadcasts."""
    sizes: dict[Label, Size] = {}
    for value, labels in zip(values, operands):
        for label, size in zip(labels, value.shape):
            sizes[label] = _merge_size(node, label, sizes.get(label, 1), size)
    result = []
    for value, labels in zip(values, operands):
        shape = tuple(1 if is_one(size) else sizes[label] for label, size in zip(labels, value.shape))
        result.append(node.cast_shape(value, shape))
    return result


def _merge_size(node: Node, label: Label, a: Size, b: Size) -> Size:
    if is_one(a) or is_one(b):
        return b if is_one(a) else a
    return unify_sizes(node, f"label '{label}' of the equation", a, b)


# -- as a matmul ----------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _MatmulRoles:
    """The role of each label of a matmul of two operands."""

    batch: Labels  # in both and in the result
    rows: Labels  # in the first and in the result
    columns: Labels  # in the second and in the result
    inner: Labels  # in both, contracted


def _find_roles(a: Labels, b: Labels, result: Labels) -> _MatmulRoles | None:
    """Return the roles, or None unless the equation is a matmul.

    It must have at least one row, column and inner label.
    """
    roles = _MatmulRoles(
        batch=tuple(x for x in result if x in a and x in b),
        rows=tuple(x for x in result if x in a and x not in b),
        columns=tuple(x for x in result if x in b and x not in a),
        inner=tuple(x for x in a if x in b and x not in result),
    )
    covers_all = {*roles.batch, *roles.rows, *roles.inner} == set(a) and {
        *roles.batch,
        *roles.columns,
        *roles.inner,
    } == set(b)
    has_unique_labels = len(set(a)) == len(a) and len(set(b)) == len(b)
    return roles if covers_all and has_unique_labels and roles.rows and roles.columns and roles.inner else None


def _find_matmul(values: Sequence[Value], operands: Sequence[Labels], result: Labels) -> tuple[int, int, Labels] | None:
    """Return the first two of three or more operands that form a matmul, and its labels.

    The labels are those that the other operands or the result have. Multiplying these two first leaves fewer terms of
    fewer factors than all operands at once. Return None also where a dimension broadcasts.
    """
    sized = {(x, is_one(size)) for value, labels in zip(values, operands) for x, size in zip(labels, value.shape)}
    if len(operands) < 3 or len(sized) > len({x for x, _ in sized}):
        return None
    for i, j in itertools.combinations(range(len(operands)), 2):
        other_labels = [labels for k, labels in enumerate(operands) if k not in (i, j)]
        needed = {*result, *itertools.chain(*other_labels)}
        out_labels = tuple(x for x in dict.fromkeys((*operands[i], *operands[j])) if x in needed)
        if _find_roles(operands[i], operands[j], out_labels) is not None:
            return i, j, out_labels
    return None


def _apply_matmul(
    node: Node, values: tuple[Value, ...], operands: list[Labels], i: int, j: int, out_labels: Labels
) -> tuple[tuple[Value, ...], list[Labels]]:
    """Replace two of the operands by their matmul."""
    pair = [operands[i], operands[j]]
    roles = _find_roles(pair[0], pair[1], out_labels)
    assert roles is not None
    pair_result = _emit_pair_matmul(node, values[i], values[j], pair, out_labels, roles)
    rest = [k for k in range(len(values)) if k not in (i, j)]
    return (pair_result, *(values[k] for k in rest)), [out_labels, *(operands[k] for k in rest)]


def _emit_pair_matmul(
    node: Node, a: Value, b: Value, operands: Sequence[Labels], result: Labels, roles: _MatmulRoles
) -> Value:
    sizes = {x: d for labels, v in zip(operands, (a, b)) for x, d in zip(labels, v.shape)}
    left = _to_matrix(node, a, operands[0], roles.batch, roles.rows, roles.inner)
    right = _to_matrix(node, b, operands[1], roles.batch, roles.inner, roles.columns)
    y = round_to(node, emit_matmul(node, left, right), a.dtype)
    y = _reshape(node, y, (*y.shape[: len(roles.batch)], *(sizes[x] for x in (*roles.rows, *roles.columns))))
    order = (*roles.batch, *roles.rows, *roles.columns)
    return permute_axes(node, y, [order.index(x) for x in result])


def _to_matrix(node: Node, value: Value, labels: Labels, batch: Labels, rows: Labels, columns: Labels) -> Value:
    """Return the value as [*batch, rows, columns]."""
    value = permute_axes(node, value, [labels.index(x) for x in (*batch, *rows, *columns)])
    head, middle = value.shape[: len(batch)], value.shape[len(batch) : len(batch) + len(rows)]
    return _reshape(node, value, (*head, prod(middle), prod(value.shape[len(batch) + len(rows) :])))


def _reshape(node: Node, value: Value, shape: Shape) -> Value:
    if len(shape) == value.rank:
        return value
    return node.reshape_to(value, shape)


# -- as a kernel ------------------------------------------------------------------------------------------------------


def _compute_contraction(
    tensors: Sequence[te.Tensor], operands: Sequence[Labels], result: Labels, dtype: str
) -> te.Tensor:
    extents: dict[Label, Extent] = {}
    for tensor, labels in zip(tensors, operands):
        for label, size in zip(labels, tensor.shape):
            extents[label] = size if is_one(extents.get(label, 1)) else extents[label]
    order = (*result, *(label for label in extents if label not in result))

    def element(*index: Element) -> Element:
        index_of = dict(zip(order, index))
        return functools.reduce(
            operator.mul, (read_element(t, [index_of[x] for x in labels]) for t, labels in zip(tensors, operands))
        )

    contracted = range(len(result), len(order))
    accumulators = reduce_axes([extents[label] for label in order], contracted, SUM, element, "sums")
    zeros = [tirx.const(0, "int64")] * len(contracted)
    terms = functools.reduce(operator.mul, [extents[label] for label in order[len(result) :]], tirx.const(1, "int64"))

    def total_of(*index: Element) -> Element:
        """Return 0 for an empty sum, where `accumulators` is undefined."""
        value = accumulators(*index, *zeros).astype(dtype)
        return tirx.Select(terms > 0, value, tirx.const(0, dtype)) if contracted else value

    return te.compute(accumulators.shape[: len(result)], total_of, name="einsum")
