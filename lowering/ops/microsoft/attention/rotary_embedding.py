"""com.microsoft RotaryEmbedding: the arithmetic of ai.onnx; positions are the second input, and may be one offset."""

from __future__ import annotations

from ....importing.node import Node
from ....importing.values import Size, Value
from ... import op
from ...attention.rotary_embedding import RotatedHead, rotate_heads
from ...helpers.compute import require_numbers
from ...helpers.kernels import compute
from ...helpers.requirements import reject_attribute, require_rank
from .. import DOMAIN


@op("RotaryEmbedding", since=1, domain=DOMAIN)
def rotary_embedding(node: Node, x: Value, positions: Value, cos: Value, sin: Value) -> Value:
    """Rotate X [B, S, H * D] or [B, H, S, D], for caches [P, R / 2].

    position_ids is [B, S], or the offset [1] of 0 1 2 ....
    """
    require_numbers(node, x, cos, sin)
    require_rank(node, "input", x, "[batch, sequence, hidden] or [batch, heads, sequence, head size]")
    for name, table in (("cos_cache", cos), ("sin_cache", sin)):
        require_rank(node, name, table, "[positions, angles]")
    reject_attribute(node, "scale", 1.0, "Remove it: onnxruntime does not apply it.")
    if positions.rank == 1:
        positions = expand_offset(node, positions, x.shape[1 if x.rank == 3 else 2])
    elif positions.rank != 2:
        raise node.error(
            "node.rank_unsupported",
            f"position_ids has rank {positions.rank}.",
            "Make it [batch, sequence], or an offset [1].",
        )
    return rotate_heads(node, _read_head(node, x, cos), x, cos, sin, positions)


def expand_offset(node: Node, offset: Value, length: Size) -> Value:
    """Return the positions offset[0] + 0, 1, 2, ... as [1, length]."""
    return compute(node, "positions", lambda i, at: at(0).astype("int64") + i[1], [offset], (1, length), dtype="int64")


def _read_head(node: Node, x: Value, cos: Value) -> RotatedHead:
    heads, rotated, width, angles = (
        node.attr("num_heads", 0),
        node.attr("rotary_embedding_dim", 0),
        *(v.shape[-1] for v in (x, cos)),
    )
    if rotated and not heads:
        raise node.error(
            "rotary_embedding.num_heads_missing",
            "attribute rotary_embedding_dim is given without num_heads.",
            "Give both.",
        )
    if not isinstance(width, int) or not isinstance(angles, int):
        raise node.error(
            "node.static_size_required",
            "the last dimension of the input or of cos_cache is symbolic.",
            "Give it a number.",
        )
    if x.rank == 4:
        size = width
    else:
        size = width // heads if heads else 2 * angles
        if size < 1 or width % size:
            raise node.error(
                "rotary_embedding.heads_not_divisible",
                f"{width} elements do not divide into heads of {size}.",
                "Correct attribute num_heads.",
            )
    rotated = rotated or size
    if rotated % 2 or not 0 < rotated <= size:
        raise node.error(
            "rotary_embedding.dim_unsupported",
            f"{rotated} of {size} dimensions of a head cannot be rotated.",
            "Rotate an even number, at most all of them.",
        )
    return RotatedHead(size, rotated, bool(node.attr("interleaved", 0)))
