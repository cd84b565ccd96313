"""A library of score_mods. Functions of a score and a pair are score_mods themselves; those of a number make one."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from ..attention.alibi import alibi_slopes as alibi_slopes
from ..errors import InputError
from .mod import Composed, Mod
from .vocabulary import abs, cast, clip, maximum, minimum, tanh, where


def noop(score: Any, b: Any, h: Any, i: Any, j: Any) -> Any:
    """The score as it is."""
    return score


def chain(*score_mods: Mod) -> Mod:
    """One after the other: each gets the score that the one before gives."""
    return Composed("chain", "score_mod", _in_turn, score_mods)


def _in_turn(mods: Sequence[Mod], score: Any, *pair: Any) -> Any:
    for mod in mods:
        score = mod(score, *pair)
    return score


def shifted(score_mod: Mod, offset: int) -> Mod:
    """score_mod for rows that begin at position `offset`."""

    def mod(mods: Sequence[Mod], score: Any, b: Any, h: Any, i: Any, j: Any) -> Any:
        return mods[0](score, b, h, i + offset, j)

    return Composed("shifted", "score_mod", mod, (score_mod,))


def shifted_by_batch(score_mod: Mod) -> Mod:
    """score_mod for rows that begin at a position of each batch, as those of a decoder do behind the keys of its cache:
    captures={"offset": int [B]}."""
    return Composed("shifted_by_batch", "score_mod", _from_offset, (score_mod,))


def _from_offset(mods: Sequence[Mod], score: Any, b: Any, h: Any, i: Any, j: Any, *, offset: Any) -> Any:
    return mods[0](score, b, h, i + offset[b], j)


def paged(score_mod: Mod, page_size: int) -> Mod:
    """score_mod over positions in a sequence, of keys that lie in pages shared by all batches: captures={"logical": int
    [B, pages]}, as for `masks.paged`, which hides the keys of other sequences."""

    def mod(mods: Sequence[Mod], score: Any, b: Any, h: Any, i: Any, j: Any, *, logical: Any) -> Any:
        return mods[0](score, b, h, i, logical[b, j // page_size] * page_size + j % page_size)

    return Composed("paged", "score_mod", mod, (score_mod,))


def alibi(score: Any, b: Any, h: Any, i: Any, j: Any, *, slopes: Any) -> Any:
    """ALiBi (arXiv:2108.12409): slope * (j - i) is added. captures={"slopes": float [heads]}, as of `alibi_slopes`."""
    return score + slopes[h] * (j - i)


def soft_cap(cap: float) -> Mod:
    """cap * tanh(score / cap): no score is larger than the cap."""

    def mod(score: Any, b: Any, h: Any, i: Any, j: Any) -> Any:
        return cap * tanh(score / cap)

    return mod


def relative_position(score: Any, b: Any, h: Any, i: Any, j: Any) -> Any:
    """The distance itself is added."""
    return score + (i - j)


def relative_bias(score: Any, b: Any, h: Any, i: Any, j: Any, *, bias: Any) -> Any:
    """A learned bias by head and distance: captures={"bias": float [heads, 2 n + 1]} for distances j - i of -n to n;
    keys farther away take the last of it."""
    most = (bias.shape[1] - 1) // 2
    return score + bias[h, clip(j - i, -most, most) + most]


def t5_buckets(buckets: int = 32, max_distance: int = 128, bidirectional: bool = True) -> Mod:
    """T5's relative bias (arXiv:1910.10683): captures={"bias": float [heads, buckets]}.

    The first half of the buckets are a distance each, the others grow by the logarithm up to max_distance. Keys behind
    the row have a second set of them, unless the model is not bidirectional: then such keys count as distance 0.

    Raises InputError for fewer buckets than that takes, and for a max_distance that they reach without the logarithm.
    """
    count = buckets // 2 if bidirectional else buckets
    exact = count // 2
    if exact < 1 or max_distance <= exact:
        raise InputError(
            f"{buckets} buckets up to a distance of {max_distance}: give {4 if bidirectional else 2} buckets or more, "
            f"and a distance beyond the {exact} that have a bucket each."
        )
    steps = count - exact
    starts = tuple(_log_bucket(exact, max_distance, k, steps) for k in range(1, steps))

    def mod(score: Any, b: Any, h: Any, i: Any, j: Any, *, bias: Any) -> Any:
        distance = abs(j - i) if bidirectional else maximum(i - j, 0)
        bucket = minimum(distance, exact)
        for start in starts:
            bucket = bucket + cast(distance >= start, "int32")
        return score + bias[h, bucket + where(j > i, count, 0) if bidirectional else bucket]

    return mod


def _log_bucket(first: int, last: int, k: int, steps: int) -> int:
    """The smallest distance with log(distance / first) / log(last / first) * steps >= k, in exact arithmetic."""
    distance = math.floor(first * (last / first) ** (k / steps)) - 1
    while distance**steps * first**k < first**steps * last**k:
        distance += 1
    return distance


def head_scale(score: Any, b: Any, h: Any, i: Any, j: Any, *, factors: Any) -> Any:
    """A factor for each head: captures={"factors": float [heads]}."""
    return score * factors[h]


def latent(position: int, scale: float = 1.0) -> Mod:
    """Multi-head latent attention, whose queries and keys have a part of their own for positions, which all heads share
    (DeepSeek-V2, arXiv:2405.04434): scale times its product is added.

    captures={"q_rope": float [B, heads, rows, position], "k_rope": float [B, keys, position]}, `position` being their
    size. The model divides the sum of both products by the root of both sizes together: give that as the scale here,
    and as that of flex_attention.
    """

    def mod(score: Any, b: Any, h: Any, i: Any, j: Any, *, q_rope: Any, k_rope: Any) -> Any:
        return score + scale * sum(q_rope[b, h, i, d] * k_rope[b, j, d] for d in range(position))

    return mod
