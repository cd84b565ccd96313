"""Masks of com.microsoft attention operators: integers per key, and a finite bias for hidden keys.

mask_filter_value is added to the score of a hidden key: a row without visible keys is a softmax of shifted scores, not
0. The masks are ordinary tensor code before the kernel.
"""

from __future__ import annotations

from dataclasses import dataclass

from tvm import tirx

from ....importing.node import Node
from ....importing.values import Shape, Size, Value, is_one
from ...helpers.assertions import assert_shape
from ...helpers.compute import Element, pointwise, unify_sizes
from ...helpers.kernels import ElementReader, compute
from ...helpers.requirements import require_rank

# Below this, exp(filter + s - s') is 0 in float32 for all scores that differ by less than some hundreds.
_MAX_HIDING_VALUE = -1000.0


@dataclass(frozen=True)
class ScoreMatrix:
    """The shape of the score matrix, [batch, heads, rows, keys], and the bias of a hidden key."""

    batch: Size
    heads: int
    rows: Size
    keys: Size
    filter: float


@dataclass(frozen=True)
class PaddingMask:
    """A padding mask as a bias (float32, of rank 4), or as lengths (int64 [B]); both are None if no key is hidden."""

    bias: Value | None = None
    lengths: Value | None = None


def read_filter_value(node: Node) -> float:
    """Return attribute mask_filter_value; raise NodeError if it is not finite."""
    value = node.attr("mask_filter_value", -10000.0)
    if not -3.5e38 < value < 3.5e38:
        raise node.error("node.value_out_of_range", f"attribute mask_filter_value is {value}.", "Use a finite number.")
    return value


def read_padding(node: Node, name: str, mask: Value, scores: ScoreMatrix) -> PaddingMask:
    """Read the padding mask of input `name`, integers of one of several shapes.

    [B] are numbers of keys. [2 B] are ends and then starts of the keys. [3 B + 2] are numbers of keys, then offsets of
    packed rows. [B, T] and [B, S, T] have 0 for hidden keys. [B or 1, 1] hides nothing.
    """
    if not mask.dtype.startswith(("int", "bool")):
        raise node.error("node.dtype_unsupported", f"input {name} is {mask.dtype}.", "Use int32.")
    if mask.rank == 1:
        return _read_ends(node, mask, scores)
    if mask.rank == 2:
        if is_one(mask.shape[1]) and not is_one(scores.keys):
            return PaddingMask()
        shape: Shape = (scores.batch, scores.keys)
    elif mask.rank == 3:
        shape = (scores.batch, scores.rows, scores.keys)
    else:
        raise node.error(
            "node.rank_unsupported", f"input {name} has rank {mask.rank}.", "Use [batch, keys] or [batch, rows, keys]."
        )
    for size, expected in zip(mask.shape, shape):
        unify_sizes(node, f"a dimension of {name}", size, expected)
    mask = assert_shape(node, mask, shape)

    def element(index: tuple[Element, ...], mask: ElementReader) -> Element:
        b, _, i, j = index
        value = mask(b, i, j) if len(shape) == 3 else mask(b, j)
        return tirx.Select(value.astype("int32") > 0, _float32(0.0), _float32(scores.filter))

    bias_shape = (scores.batch, 1, scores.rows if mask.rank == 3 else 1, scores.keys)
    return PaddingMask(bias=compute(node, "padding", element, [mask], bias_shape, dtype="float32"))


def _read_ends(node: Node, mask: Value, scores: ScoreMatrix) -> PaddingMask:
    batch, count = scores.batch, mask.shape[0]
    has_starts = node.symbols.equal(count, 2 * batch)
    if not has_starts and not node.symbols.equal(count, 3 * batch + 2):
        unify_sizes(node, "the number of mask lengths", count, batch)
        mask = assert_shape(node, mask, (batch,))
    if has_starts or scores.filter > _MAX_HIDING_VALUE:

        def element(index: tuple[Element, ...], mask: ElementReader, *sizes: Element) -> Element:
            b, j = index[0], index[3]
            is_visible = j < mask(b).astype("int64")
            if has_starts:
                is_visible = tirx.all(is_visible, j >= mask(b + sizes[0]).astype("int64"))
            return tirx.Select(is_visible, _float32(0.0), _float32(scores.filter))

        shape = (batch, 1, 1, scores.keys)
        return PaddingMask(bias=compute(node, "padding", element, [mask], shape, [batch] * has_starts, dtype="float32"))

    def length(index: tuple[Element, ...], mask: ElementReader, keys: Element) -> Element:
        end = mask(*index).astype("int64")  # if all keys are hidden, all scores are shifted equally
        return tirx.if_then_else(end > 0, end, tirx.const(keys, "int64") if isinstance(keys, int) else keys)

    return PaddingMask(lengths=compute(node, "lengths", length, [mask], (batch,), [scores.keys], dtype="int64"))


def add_biases(node: Node, scores: ScoreMatrix, attention_bias: Value | None, bias: Value | None) -> Value | None:
    """Return the sum of attention_bias [B or 1, H or 1, S, T] and the bias of the padding; either may be None."""
    if attention_bias is None:
        return bias
    require_rank(node, "attention_bias", attention_bias, "[batch, heads, rows, keys]")
    expected = (scores.batch, scores.heads, scores.rows, scores.keys)
    shape = tuple(
        1 if is_one(size) else unify_sizes(node, "a dimension of attention_bias", size, target)
        for size, target in zip(attention_bias.shape, expected)
    )
    attention_bias = assert_shape(node, attention_bias, tuple(1 if is_one(d) else w for d, w in zip(shape, expected)))
    if bias is None:
        return attention_bias
    return pointwise(node, lambda a, b: a + b, attention_bias, bias, dtype="float32", name="attention_bias")


def _float32(value: float) -> Element:
    return tirx.const(value, "float32")
