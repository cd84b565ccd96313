"""What a mask of all positions says: which keys a token sees, and what is added to its scores."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Literal

import numpy as np
import onnx_ir as ir

from ..errors import ModelError
from ..fusion.attention_node import MASK, attention_input
from ..fusion.matching import attribute
from .positions import Positions

# Contexts of which all is looked at in one piece; contexts of which all tokens are looked at, and of longer ones in so
# many places; tokens of a piece at least, and elements of its mask at most unless these are fewer.
_WHOLE, _ALL, _SOME, _FEWEST, _ELEMENTS = 1024, 16384, 32, 64, 2**22

_LARGEST_TABLE = 2**26
"""Bytes of a bias that follows no rule."""

_HIDES = -9.9e3
"""Exporters hide keys with -10000 (-9984 in bfloat16), too: scores of a model do not differ by that much."""

By = Literal["key", "distance", "pair"]


@dataclass(frozen=True)
class Pattern:
    """Token p sees keys p - left to p; None: all from 0 on. `bias` [heads or 1, ...] is added to scores: by "key"
    bias[h, j], by "distance" bias[h, p - j], by "pair" bias[h, p, j]; float32, -inf hides a key."""

    left: int | None
    bias: np.ndarray | None = None
    by: By = "distance"
    hides: float | None = None
    """From which number on what is added hides a key, where that is another than `as_bias` takes."""

    def expected(self, past: int, new: int) -> np.ndarray:
        """The bias of tokens past to past + new - 1, float32 [heads or 1, new, past + new], -inf where a key is not
        seen."""
        token, key = np.arange(past, past + new)[:, None], np.arange(past + new)[None, :]
        distance = token - key
        seen = (distance >= 0) & (distance <= (past + new if self.left is None else self.left))
        added = np.zeros((1, 1, 1), np.float32)
        if self.bias is not None:
            index = {"key": (key,), "distance": (np.maximum(distance, 0),), "pair": (token, key)}[self.by]
            added = self.bias[(slice(None), *index)]
        return np.where(seen, added, np.float32(-np.inf))


def patterns_of(positions: Positions, attentions: Sequence[ir.Node], context: int) -> dict[ir.Node, Pattern]:
    """What each Attention shows its tokens, up to the context.

    That is what its mask [1, heads or 1, S, P + S] says, if it has one, and is_causal and windows that end with a
    token's own position. All tokens are looked at, but some of contexts longer than 16384. Raises ModelError for what
    follows no pattern, or depends on more than positions.
    """
    visible = [Visible.of(node) for node in attentions]
    distinct = list(dict.fromkeys(visible))
    past, new = _end(context)
    found: dict[Visible, Pattern] = {}
    for each, array in zip(distinct, _shown(positions, distinct, past, new)):
        pattern = pattern_of(array, past)
        if pattern is None:
            raise ModelError(
                f"serve: {each} follows no rule that is known for up to {context} tokens: each sees itself and earlier "
                "ones, all or the last so many, with something added by key or by distance."
            )
        found[each] = pattern
    wrong = _first_broken(positions, found, context)
    if wrong is not None:
        raise ModelError(f"serve: what {wrong} hides from a token depends on more than its position.")
    return {node: found[each] for node, each in zip(attentions, visible)}


def windows_of(positions: Positions, attentions: Collection[ir.Node], context: int) -> dict[ir.Node, int | None]:
    """Return how many keys before its own a token of each Attention sees, up to the context.

    That is proven as `patterns_of` does it, whatever is added to scores, and for some sequences that are padded on the
    left; None where tokens see all keys, where no rule is known, or where the mask cannot be computed.
    """
    visible = {node: Visible.of(node) for node in attentions}
    windows = {each: _window_of(positions, each, context) for each in dict.fromkeys(visible.values())}
    return {node: windows[each] for node, each in visible.items()}


def _window_of(positions: Positions, visible: Visible, context: int) -> int | None:
    past, new = _end(context)
    try:
        (end,) = _shown(positions, [visible], past, new)
        for hides in (None, _HIDES):
            pattern = pattern_of(_seen(end, hides), past)
            if pattern is None or pattern.left is None:
                continue
            if _first_broken(positions, {visible: pattern}, context, partial(_seen, hides=hides)):
                return None
            return pattern.left if _holds_behind_padding(positions, visible, pattern.left, context, hides) else None
    except ModelError:  # the mask cannot be computed of positions alone
        return None
    return None


def _holds_behind_padding(positions: Positions, visible: Visible, left: int, context: int, hides: float | None) -> bool:
    """Whether tokens of sequences that are padded on the left see nothing but a window."""
    rows = min(context, left + _FEWEST)
    for padding in (1, rows // 2):
        (array,) = _shown(positions, [visible], 0, rows, padding)
        _, token, key = np.nonzero(_seen(array, hides)[:, padding:])
        distance = token + padding - key
        if not ((distance >= 0) & (distance <= left)).all():
            return False
    return True


def _first_broken(
    positions: Positions,
    patterns: Mapping[Visible, Pattern],
    context: int,
    read: Callable[[np.ndarray], np.ndarray] = np.asarray,
) -> Visible | None:
    """Return the first whose masks, as `read` takes them, do not follow their pattern in all pieces of the context."""
    for past, new in _pieces(context):
        arrays = _shown(positions, list(patterns), past, new)
        for (visible, pattern), array in zip(patterns.items(), arrays):
            if not follows(pattern, read(array), past):
                return visible
    return None


def _seen(mask: np.ndarray, hides: float | None) -> np.ndarray:
    return ~np.isneginf(as_bias(mask, hides))


def _end(context: int) -> tuple[int, int]:
    """Tokens at the end of a context, by which a rule is guessed: how many come before, and how many they are."""
    new = context if context <= _WHOLE else _FEWEST
    return context - new, new


def _pieces(context: int) -> Iterator[tuple[int, int]]:
    """Pieces of a context, or some of it, by which a rule is proven; and single tokens, since a mask may depend on how
    many a call has."""
    yield from ((2**power - 1, 1) for power in range(context.bit_length()))
    tokens = max(_FEWEST, _ELEMENTS // context)
    for past in range(0, context, tokens if context <= _ALL else context // _SOME):
        yield past, min(tokens, context - past)


@dataclass(frozen=True)
class Visible:
    """What says which keys a token of an Attention sees. Sides are windows that end with its own position."""

    mask: ir.Value | None
    causal: bool
    left: int
    right: int

    @classmethod
    def of(cls, node: ir.Node) -> Visible:
        mask = attention_input(node, MASK)
        sides = [int(attribute(node, f"{side}_window_size", -1)) for side in ("left", "right")]
        return Visible(mask, attribute(node, "is_causal", 0) == 1, *sides)

    def __str__(self) -> str:
        return "the causal mask" if self.mask is None else f"mask '{self.mask.name}'"

    def shown(self, mask: np.ndarray | None, past: int, new: int) -> np.ndarray:
        """The mask [heads or 1, new, past + new], bool or added, with what the attributes hide."""
        distance = np.arange(past, past + new)[:, None] - np.arange(past + new)[None, :]
        seen = np.ones_like(distance, bool)
        if self.causal or self.right >= 0:
            seen &= distance >= (0 if self.causal else -self.right)
        if self.left >= 0:
            seen &= distance <= self.left
        if mask is None:
            return seen[None]
        by_head, keys = _by_head(mask), past + new
        if by_head.shape[-1] < keys:
            raise ModelError(f"serve: {self} has {by_head.shape[-1]} keys, and attention has {keys}.")
        by_head = np.broadcast_to(by_head[..., :keys], (len(by_head), new, keys))
        if seen.all():
            return by_head
        hidden = False if by_head.dtype == bool else _lowest(by_head.dtype)
        return np.where(seen, by_head, np.array(hidden, by_head.dtype))


def _shown(positions: Positions, visible: Sequence[Visible], past: int, new: int, padding: int = 0) -> list[np.ndarray]:
    masks = list(dict.fromkeys(each.mask for each in visible if each.mask is not None))
    arrays = dict(zip(masks, positions.at(masks, past, new, padding))) if masks else {}
    return [each.shown(None if each.mask is None else arrays[each.mask], past, new) for each in visible]


def _by_head(mask: np.ndarray) -> np.ndarray:
    """[heads or 1, S, P + S] of a mask of batch 1."""
    return mask.reshape((1,) * max(0, 4 - mask.ndim) + mask.shape)[0]


def pattern_of(mask: np.ndarray, past: int) -> Pattern | None:
    """The pattern of a mask [heads or 1, new, past + new] of the last tokens, bool or added, past being 0 if these are
    all; None where a token sees later keys, or where the bias follows no rule and is too large to be kept."""
    return _pattern_of(mask, past, None) or _pattern_of(mask, past, _HIDES)


def _pattern_of(mask: np.ndarray, past: int, hides: float | None) -> Pattern | None:
    added = as_bias(mask, hides)
    new, keys = added.shape[-2:]
    last = added[:, -1]
    seen = last > -np.inf
    if not seen[:, -1].all():
        return None
    hidden = np.flatnonzero(~seen[0])
    left = None if len(hidden) == 0 else keys - 2 - int(hidden[-1])
    finite = np.where(seen, last, np.float32(0))
    candidates = [Pattern(left, hides=hides), Pattern(left, finite[:, ::-1], "distance", hides)]
    if left is None:
        candidates.append(Pattern(None, finite, "key", hides))
    causal = not (added > -np.inf)[:, np.arange(new)[:, None] + past < np.arange(keys)].any()
    if past == 0 and causal and added.nbytes <= _LARGEST_TABLE:
        candidates.append(Pattern(None, added, "pair", hides))
    return next((one for one in candidates if follows(one, mask, past)), None)


def follows(pattern: Pattern, mask: np.ndarray, past: int) -> bool:
    """Whether a mask [heads or 1, new, past + new] of the tokens behind `past` others is what the pattern says."""
    added = as_bias(mask, pattern.hides)
    wanted = pattern.expected(past, added.shape[-2])
    hidden = np.isneginf(added)
    if not np.array_equal(np.broadcast_to(np.isneginf(wanted), added.shape), hidden):
        return False
    return bool(np.allclose(np.where(hidden, 0, added), np.where(hidden, 0, wanted), 1e-6, 1e-6))


def as_bias(mask: np.ndarray, hides: float | None = None) -> np.ndarray:
    """What a mask adds to scores, float32: -inf for False, and for numbers from `hides` on, or so low that exp gives 0
    beside any other."""
    if mask.dtype == bool:
        return np.where(mask, np.float32(0), np.float32(-np.inf))
    with np.errstate(over="ignore"):  # of float64
        added = mask.astype(np.float32)
    return np.where(
        added <= (max(_lowest(mask.dtype) / 2, -1e30) if hides is None else hides), np.float32(-np.inf), added
    )


def _lowest(dtype: np.dtype) -> float:
    return float(np.finfo(dtype).min) if dtype.kind == "f" else -3e38  # of bfloat16
