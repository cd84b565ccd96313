"""Masks of com.microsoft attention operators: integers per key, and a finite number where they hide one.

A hidden key gets mask_filter_value added to its score: a row that sees nothing is a softmax of shifted scores, not 0.
The masks are ordinary tensor code in front of the kernel.
"""

from __future__ import annotations

from dataclasses import dataclass

from tvm import tirx

from ...importing.compute import Element, agreed, pointwise
from ...importing.node import Node
from ...importing.values import Shape, Size, Value, is_one
from ..asserted import asserted
from ..kernels import Read, compute

# Below this, exp(filter + s - s') is 0 in float32 for all scores that differ by less than some hundreds.
_HIDES_FOR_SURE = -1000.0


@dataclass(frozen=True)
class Scores:
    """The shape of the score matrix, [batch, heads, rows, keys], and what is added to the score of a hidden key."""

    batch: Size
    heads: int
    rows: Size
    keys: Size
    filter: float


@dataclass(frozen=True)
class Padding:
    """What a padding mask becomes: numbers to add (float32, of rank 4), or lengths (int64 [B]); None where it hides
    nothing."""

    bias: Value | None = None
    lengths: Value | None = None


def filter_value(node: Node) -> float:
    """Attribute mask_filter_value; NodeError if it is not finite."""
    value = node.attr("mask_filter_value", -10000.0)
    if not -3.5e38 < value < 3.5e38:
        raise node.error(f"attribute mask_filter_value is {value}.", "Use a finite number.")
    return value


def padding(node: Node, name: str, mask: Value, scores: Scores) -> Padding:
    """The meaning of input `name`, integers of one of these shapes:

    [B] numbers of keys; [2 B] ends and then starts of the keys; [3 B + 2] numbers of keys, then offsets of packed rows;
    [B, T] and [B, S, T] with 0 for hidden keys; [B or 1, 1] hides nothing.
    """
    if not mask.dtype.startswith(("int", "bool")):
        raise node.error(f"input {name} is {mask.dtype}.", "Use int32.")
    if mask.rank == 1:
        return _from_ends(node, mask, scores)
    if mask.rank == 2:
        if is_one(mask.shape[1]) and not is_one(scores.keys):
            return Padding()
        shape: Shape = (scores.batch, scores.keys)
    elif mask.rank == 3:
        shape = (scores.batch, scores.rows, scores.keys)
    else:
        raise node.error(f"input {name} has rank {mask.rank}.", "Use [batch, keys] or [batch, rows, keys].")
    for size, wanted in zip(mask.shape, shape):
        agreed(node, f"a dimension of {name}", size, wanted)
    mask = asserted(node, mask, shape)

    def element(index: tuple[Element, ...], mask: Read) -> Element:
        b, _, i, j = index
        value = mask(b, i, j) if len(shape) == 3 else mask(b, j)
        return tirx.Select(value.astype("int32") > 0, _number(0.0), _number(scores.filter))

    four = (scores.batch, 1, scores.rows if mask.rank == 3 else 1, scores.keys)
    return Padding(bias=compute(node, "padding", element, [mask], four, dtype="float32"))


def _from_ends(node: Node, mask: Value, scores: Scores) -> Padding:
    batch, count = scores.batch, mask.shape[0]
    both = node.symbols.equal(count, 2 * batch)
    if not both and not node.symbols.equal(count, 3 * batch + 2):
        agreed(node, "the number of mask lengths", count, batch)
        mask = asserted(node, mask, (batch,))
    if both or scores.filter > _HIDES_FOR_SURE:

        def element(index: tuple[Element, ...], mask: Read, *sizes: Element) -> Element:
            b, j = index[0], index[3]
            visible = j < mask(b).astype("int64")
            if both:
                visible = tirx.all(visible, j >= mask(b + sizes[0]).astype("int64"))
            return tirx.Select(visible, _number(0.0), _number(scores.filter))

        shape = (batch, 1, 1, scores.keys)
        return Padding(bias=compute(node, "padding", element, [mask], shape, [batch] * both, dtype="float32"))

    def length(index: tuple[Element, ...], mask: Read, keys: Element) -> Element:
        end = mask(*index).astype("int64")  # where all keys are hidden, all are shifted alike
        return tirx.if_then_else(end > 0, end, tirx.const(keys, "int64") if isinstance(keys, int) else keys)

    return Padding(lengths=compute(node, "lengths", length, [mask], (batch,), [scores.keys], dtype="int64"))


def biased(node: Node, scores: Scores, attention_bias: Value | None, bias: Value | None) -> Value | None:
    """attention_bias [B or 1, H or 1, S, T] and the bias of the padding, added up where both are given."""
    if attention_bias is None:
        return bias
    if attention_bias.rank != 4:
        raise node.error(f"input attention_bias has rank {attention_bias.rank}.", "Make it [batch, heads, rows, keys].")
    wanted = (scores.batch, scores.heads, scores.rows, scores.keys)
    shape = tuple(
        1 if is_one(size) else agreed(node, "a dimension of attention_bias", size, target)
        for size, target in zip(attention_bias.shape, wanted)
    )
    attention_bias = asserted(node, attention_bias, tuple(1 if is_one(d) else w for d, w in zip(shape, wanted)))
    if bias is None:
        return attention_bias
    return pointwise(node, lambda a, b: a + b, attention_bias, bias, dtype="float32", name="attention_bias")


def _number(value: float) -> Element:
    return tirx.const(value, "float32")
