"""A library of score_mods. Functions of a score and a pair are score_mods themselves; those of a number make one."""

from __future__ import annotations

import math
from typing import Any

from ..attention.alibi import alibi_slopes as alibi_slopes
from .mod import Combined, Mod
from .vocabulary import abs, cast, clip, log, maximum, minimum, tanh, where


def noop(score: Any, b: Any, h: Any, i: Any, j: Any) -> Any:
    """The score as it is."""
    return score


def chain(*score_mods: Mod) -> Mod:
    """One after the other: each gets the score that the one before gives."""
    return _Chain(score_mods)


class _Chain(Combined):
    def __init__(self, mods: tuple[Mod, ...]) -> None:
        super().__init__(_last, None, mods, "score_mod", "chain")

    def __call__(self, score: Any, *args: Any, **captures: Any) -> Any:
        for mod, names in zip(self._mods, self._names):
            score = mod(score, *args, **{name: captures[name] for name in names if name in captures})
        return score


def _last(a: Any, b: Any) -> Any:
    return b


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

    Half of the buckets are exact, the others grow by the logarithm up to max_distance.
    """
    count = buckets // 2 if bidirectional else buckets
    exact = count // 2
    factor = (count - exact) / math.log(max_distance / exact)

    def mod(score: Any, b: Any, h: Any, i: Any, j: Any, *, bias: Any) -> Any:
        distance = abs(j - i) if bidirectional else maximum(i - j, 0)
        far = exact + cast(log(cast(maximum(distance, 1), "float32") / exact) * factor, "int32")
        bucket = where(distance < exact, distance, minimum(far, count - 1))
        return score + bias[h, bucket + where(j > i, count, 0) if bidirectional else bucket]

    return mod


def head_scale(score: Any, b: Any, h: Any, i: Any, j: Any, *, factors: Any) -> Any:
    """A factor for each head: captures={"factors": float [heads]}."""
    return score * factors[h]


def latent(position: int, scale: float | None = None) -> Mod:
    """Multi-head latent attention, whose queries and keys have a part with positions of its own (DeepSeek-V2,
    arXiv:2405.04434): its products are added. captures={"q_rope": float [B, heads, rows, position], "k_rope": float
    [B, keys, position]}, `position` being their size; scale is 1 by default.
    """
    factor = 1.0 if scale is None else scale

    def mod(score: Any, b: Any, h: Any, i: Any, j: Any, *, q_rope: Any, k_rope: Any) -> Any:
        total = q_rope[b, h, i, 0] * k_rope[b, j, 0]
        for d in range(1, position):
            total = total + q_rope[b, h, i, d] * k_rope[b, j, d]
        return score + total * factor

    return mod
