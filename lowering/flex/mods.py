"""A library of score_mods: functions of a score and a pair are score_mods, and functions of a number return one."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from ..attention.record.alibi import alibi_slopes as alibi_slopes
from ..errors import InputError
from .mod import ComposedMod, Mod
from .vocabulary import abs, cast, clip, maximum, minimum, tanh, where


def noop(score: Any, b: Any, h: Any, i: Any, j: Any) -> Any:
    """Return the score unchanged."""
    return score


def chain(*score_mods: Mod) -> Mod:
    """Apply score_mods in order: each gets the score that the previous one returns."""
    return ComposedMod("chain", "score_mod", _apply_chain, score_mods)


def _apply_chain(mods: Sequence[Mod], score: Any, *pair: Any) -> Any:
    for mod in mods:
        score = mod(score, *pair)
    return score


def shifted(score_mod: Mod, offset: int) -> Mod:
    """Apply score_mod to rows that begin at position `offset`."""

    def mod(mods: Sequence[Mod], score: Any, b: Any, h: Any, i: Any, j: Any) -> Any:
        return mods[0](score, b, h, i + offset, j)

    return ComposedMod("shifted", "score_mod", mod, (score_mod,))


def shifted_by_batch(score_mod: Mod) -> Mod:
    """Apply score_mod to rows that begin at a position of each batch: captures={"offset": int [B]}.

    The rows of a decoder begin after the keys of its cache.
    """
    return ComposedMod("shifted_by_batch", "score_mod", _apply_offset, (score_mod,))


def _apply_offset(mods: Sequence[Mod], score: Any, b: Any, h: Any, i: Any, j: Any, *, offset: Any) -> Any:
    return mods[0](score, b, h, i + offset[b], j)


def paged(score_mod: Mod, page_size: int) -> Mod:
    """Apply score_mod to positions in a sequence, for keys in pages shared by all batches.

    Captures are {"logical": int [B, pages]}, as for `masks.paged`, which hides the keys of other sequences.
    """

    def mod(mods: Sequence[Mod], score: Any, b: Any, h: Any, i: Any, j: Any, *, logical: Any) -> Any:
        return mods[0](score, b, h, i, logical[b, j // page_size] * page_size + j % page_size)

    return ComposedMod("paged", "score_mod", mod, (score_mod,))


def alibi(score: Any, b: Any, h: Any, i: Any, j: Any, *, slopes: Any) -> Any:
    """Add slope * (j - i): ALiBi (arXiv:2108.12409). captures={"slopes": float [heads]}, as of `alibi_slopes`."""
    return score + slopes[h] * (j - i)


def soft_cap(cap: float) -> Mod:
    """Compute cap * tanh(score / cap): no score is larger than the cap."""

    def mod(score: Any, b: Any, h: Any, i: Any, j: Any) -> Any:
        return cap * tanh(score / cap)

    return mod


def relative_position(score: Any, b: Any, h: Any, i: Any, j: Any) -> Any:
    """Add the distance itself."""
    return score + (i - j)


def relative_bias(score: Any, b: Any, h: Any, i: Any, j: Any, *, bias: Any) -> Any:
    """Add a learned bias by head and distance: captures={"bias": float [heads, 2 n + 1]}.

    Distances j - i are -n to n; keys farther away use the last bias on their side.
    """
    limit = (bias.shape[1] - 1) // 2
    return score + bias[h, clip(j - i, -limit, limit) + limit]


def t5_buckets(buckets: int = 32, max_distance: int = 128, bidirectional: bool = True) -> Mod:
    """Add T5's relative bias (arXiv:1910.10683): captures={"bias": float [heads, buckets]}.

    The first half of the buckets are for one distance each, the others grow logarithmically up to max_distance. Keys
    after the row have a second set of buckets, unless the model is not bidirectional: then such keys count as distance
    0.

    Raises InputError for too few buckets, and for a max_distance that they reach without the logarithm.
    """
    count = buckets // 2 if bidirectional else buckets
    exact = count // 2
    if exact < 1 or max_distance <= exact:
        raise InputError(
            "flex.bucket_count_invalid",
            f"{buckets} buckets up to a distance of {max_distance} are too few, or the distance is too small. Choose "
            f"{4 if bidirectional else 2} buckets or more, and a distance above the {exact} that have a bucket each.",
        )
    steps = count - exact
    starts = tuple(_find_log_bucket_start(exact, max_distance, k, steps) for k in range(1, steps))

    def mod(score: Any, b: Any, h: Any, i: Any, j: Any, *, bias: Any) -> Any:
        distance = abs(j - i) if bidirectional else maximum(i - j, 0)
        bucket = minimum(distance, exact)
        for start in starts:
            bucket = bucket + cast(distance >= start, "int32")
        return score + bias[h, bucket + where(j > i, count, 0) if bidirectional else bucket]

    return mod


def _find_log_bucket_start(first: int, last: int, k: int, steps: int) -> int:
    """Return the smallest distance with log(distance / first) / log(last / first) * steps >= k, in exact arithmetic."""
    distance = math.floor(first * (last / first) ** (k / steps)) - 1
    while distance**steps * first**k < first**steps * last**k:
        distance += 1
    return distance


def head_scale(score: Any, b: Any, h: Any, i: Any, j: Any, *, factors: Any) -> Any:
    """Multiply by a factor for each head: captures={"factors": float [heads]}."""
    return score * factors[h]


def latent(position: int, scale: float = 1.0) -> Mod:
    """Add scale times the dot product of position parts: multi-head latent attention (DeepSeek-V2, arXiv:2405.04434).

    Queries and keys have separate parts for positions, and all heads share those of the keys. Captures are {"q_rope":
    float [B, heads, rows, position], "k_rope": float [B, keys, position]}, with `position` their size. The model
    divides the sum of both dot products by the square root of the sum of both sizes: pass the inverse of that root as
    the scale here and as that of flex_attention.
    """

    def mod(score: Any, b: Any, h: Any, i: Any, j: Any, *, q_rope: Any, k_rope: Any) -> Any:
        return score + scale * sum(q_rope[b, h, i, d] * k_rope[b, j, d] for d in range(position))

    return mod
