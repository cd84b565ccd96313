"""ONNX RotaryEmbedding-23: rotary position embeddings (https://arxiv.org/abs/2104.09864) as one kernel.

Symbols: B batch, S sequence, H heads, D head size, R rotary_embedding_dim (R <= D), P positions in the caches.
Dimensions d < R of a head are rotated in pairs: d and d + R / 2, or 2k and 2k + 1 where interleaved is set.
"""

from __future__ import annotations

from dataclasses import dataclass

from tvm import relax, te, tirx

from ...importing.node import Node
from ...importing.values import Size, Value, is_one
from .. import op
from ..helpers.assertions import assert_in_bounds
from ..helpers.channels import find_transpose_source
from ..helpers.compute import Element, read_element, require_numbers, unify_sizes
from ..helpers.requirements import require_rank
from ..tensor.gather import wrap_index


@dataclass(frozen=True)
class RotatedHead:
    """The rotated elements of a head: `rotated` of `size` elements, from `first` on."""

    size: int
    rotated: int
    interleaved: bool
    first: int = 0

    def pair(self, d: Element) -> tuple[Element, Element, Element]:
        """Return the angle of element d < rotated, the distance to its partner, and whether it is first.

        The angle exists for any d: it is also read for the elements that are not rotated.
        """
        half, two = tirx.const(self.rotated // 2, "int64"), tirx.const(2, "int64")
        if self.interleaved:
            first, angle, distance = tirx.floormod(d, two) == 0, tirx.floordiv(d, two), tirx.const(1, "int64")
        else:
            first, angle, distance = d < half, d, half
        return tirx.floormod(angle, half), tirx.Select(first, distance, -distance), first


HEADS_FIRST = [0, 2, 1, 3]


@op("RotaryEmbedding", since=23)
def rotary_embedding(node: Node, x: Value, cos: Value, sin: Value, positions: Value | None = None) -> Value:
    """Emit the rotation of X [B, H, S, D] or [B, S, H * D].

    Caches are [P, R / 2] with position_ids [B, S], else [B or 1, S, R / 2].
    """
    require_numbers(node, x, cos, sin)
    form = "[batch, sequence, hidden] or [batch, heads, sequence, head size]"
    require_rank(node, "X", x, form, code="rotary_embedding.rank_unsupported")
    form = "[batch, sequence, angles]" if positions is None else "[positions, angles]"
    for name, angles in (("cos_cache", cos), ("sin_cache", sin)):
        require_rank(node, name, angles, form, code="rotary_embedding.cache_rank_unsupported")
    return rotate_heads(node, _read_head(node, x), x, cos, sin, positions, from_the_back=True)


def rotate_heads(
    node: Node,
    head: RotatedHead,
    x: Value,
    cos: Value,
    sin: Value,
    positions: Value | None,
    from_the_back: bool = False,
) -> Value:
    """Return x with its heads rotated.

    Shapes and ranks are those of `rotary_embedding`. from_the_back: negative positions count from the end of the
    caches.
    """
    if positions is not None:
        positions = assert_in_bounds(
            node, positions, cos.shape[0], bound_name="the number of positions", from_the_back=from_the_back
        )
    x, cos, sin, positions = _unify_sizes(node, head, x, cos, sin, positions)
    # Heads are rotated before a transposition: the consumer may not need the transposition.
    rows = find_transpose_source(node, node.tensor(x), HEADS_FIRST) if x.rank == 4 else None
    sequence_axis = 2 if x.rank == 4 and rows is None else 1
    dtype = x.dtype

    def kernel(x: te.Tensor, cos: te.Tensor, sin: te.Tensor, *positions: te.Tensor) -> te.Tensor:
        def read_angle(cache: te.Tensor, b: Element, s: Element, k: Element) -> Element:
            if not positions:
                return read_element(cache, (b, s, k))
            position = read_element(positions[0], (b, s)).astype("int64")
            return read_element(cache, (wrap_index(position, cache.shape[0]), k))

        def rotated(*index: Element) -> Element:
            *outer, e = index
            d = tirx.floormod(e, tirx.const(head.size, "int64"))
            d = d - tirx.const(head.first, "int64") if head.first else d
            k, distance, first = head.pair(d)
            c, s = (read_angle(cache, index[0], index[sequence_axis], k) for cache in (cos, sin))
            is_rotated = tirx.all(d >= 0, d < head.rotated) if head.first else d < head.rotated
            partner = read_element(x, (*outer, e + tirx.Select(is_rotated, distance, tirx.const(0, "int64"))))
            own = read_element(x, index)
            y = own * c + partner * tirx.Select(first, -s, s)
            return tirx.Select(is_rotated, y, own).astype(dtype)

        return te.compute(x.shape, rotated, name="rotary_embedding")

    tensors = [
        node.tensor(x) if rows is None else rows,
        *(node.tensor(v) for v in (cos, sin, positions) if v is not None),
    ]
    y = node.emit_te(kernel, *tensors, primfunc_name_hint="rotary_embedding")
    return y if rows is None else node.emit(relax.op.permute_dims(node.tensor(y), HEADS_FIRST), dtype)


def _read_head(node: Node, x: Value) -> RotatedHead:
    """Return the rotation of a head.

    Raises:
        NodeError: The head size is dynamic, odd, or smaller than rotary_embedding_dim.
    """
    size = x.shape[-1]
    heads = node.attr("num_heads", 0)
    if not isinstance(size, int):
        raise node.error(
            "rotary_embedding.static_size_required",
            "the last dimension of X is symbolic.",
            "Give it a static size, which determines the numbers of heads and angles.",
        )
    if x.rank == 3:
        if heads < 1 or size % heads:
            raise node.error(
                "rotary_embedding.width_not_divisible",
                f"attribute num_heads is {heads} for X [batch, sequence, {size}].",
                "Choose num_heads as a divisor of the last dimension.",
            )
        size //= heads
    rotated = node.attr("rotary_embedding_dim", 0) or size
    if rotated % 2 or not 0 < rotated <= size:
        raise node.error(
            "rotary_embedding.rotated_size_unsupported",
            f"{rotated} of {size} dimensions of a head cannot be rotated.",
            "Choose rotary_embedding_dim as an even number from 2 to the head size.",
        )
    return RotatedHead(size, rotated, bool(node.attr("interleaved", 0)))


def _unify_sizes(
    node: Node, head: RotatedHead, x: Value, cos: Value, sin: Value, positions: Value | None
) -> tuple[Value, Value, Value, Value | None]:
    """Return the inputs with equal sizes for equal meanings.

    A batch of 1 in caches and position_ids stays and broadcasts.
    """
    sequence_axis = 1 if x.rank == 3 else 2
    sources = [cos, sin] if positions is None else [positions]
    batches = [v.shape[0] for v in sources if not is_one(v.shape[0])]
    batch = unify_sizes(node, "the batch size", x.shape[0], *batches)
    sequence = unify_sizes(node, "the sequence length", x.shape[sequence_axis], *(v.shape[1] for v in sources))
    half = head.rotated // 2
    unify_sizes(node, "the number of angles", half, cos.shape[-1], sin.shape[-1])

    def own_batch(value: Value) -> Size:
        return 1 if is_one(value.shape[0]) else batch

    shape = list(x.shape)
    shape[0], shape[sequence_axis] = batch, sequence
    x = node.cast_shape(x, tuple(shape))
    if positions is None:
        cos, sin = (node.cast_shape(v, (own_batch(v), sequence, half)) for v in (cos, sin))
        return x, cos, sin, None
    length = unify_sizes(node, "the number of positions", cos.shape[0], sin.shape[0])
    cos, sin = (node.cast_shape(v, (length, half)) for v in (cos, sin))
    return x, cos, sin, node.cast_shape(positions, (own_batch(positions), sequence))
