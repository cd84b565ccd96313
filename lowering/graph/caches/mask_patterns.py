"""Patterns of masks over all positions: the keys that a token sees, and the bias added to its scores."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Literal

import numpy as np
import onnx_ir as ir

from ...errors import ModelError
from ..rewriting.attention_node import MASK, attention_input
from ..rewriting.matching import attribute
from .positions import Positions

# The longest context checked in one chunk; the longest context of which all tokens are checked, and the number of
# chunks of longer ones; the minimum tokens of a chunk, and the maximum elements of its mask above that minimum.
_WHOLE_CONTEXT, _CHECKED_CONTEXT, _CHUNKS, _MIN_TOKENS, _MAX_ELEMENTS = 1024, 16384, 32, 64, 2**22

_MAX_TABLE_BYTES = 2**26
"""Maximum bytes of a bias without a pattern."""

_HIDING_BIAS = -9.9e3
"""Exporters also hide keys with -10000 (-9984 in bfloat16): scores of a model do not differ by that much."""

By = Literal["key", "distance", "pair"]


@dataclass(frozen=True)
class MaskPattern:
    """The keys p - left to p that a token p sees, or all from 0 on if left is None, and a bias on its scores.

    `bias` [heads or 1, ...] is added to scores: by "key" bias[h, j], by "distance" bias[h, p - j], by "pair" bias[h, p,
    j]; float32, -inf hides a key.
    """

    left: int | None
    bias: np.ndarray | None = None
    by: By = "distance"
    hiding_bound: float | None = None
    """The bias at or below which a key is hidden, if it is another than that of `convert_to_bias`."""

    def compute_bias(self, past: int, new: int) -> np.ndarray:
        """Return the bias of tokens past to past + new - 1, float32 [heads or 1, new, past + new].

        -inf hides a key.
        """
        token, key = np.arange(past, past + new)[:, None], np.arange(past + new)[None, :]
        distance = token - key
        seen = (distance >= 0) & (distance <= (past + new if self.left is None else self.left))
        added = np.zeros((1, 1, 1), np.float32)
        if self.bias is not None:
            index = {"key": (key,), "distance": (np.maximum(distance, 0),), "pair": (token, key)}[self.by]
            added = self.bias[(slice(None), *index)]
        return np.where(seen, added, np.float32(-np.inf))


def find_patterns(positions: Positions, attentions: Sequence[ir.Node], context: int) -> dict[ir.Node, MaskPattern]:
    """Return the pattern of each Attention, up to the context.

    It is that of its mask [1, heads or 1, S, P + S], if it has one, and of is_causal and windows that end with a
    token's own position. All tokens are checked, but only some of contexts longer than 16384.

    Raises:
        ModelError: A mask follows no pattern, or depends on more than positions.
    """
    visible = [KeyVisibility.of_node(node) for node in attentions]
    distinct = list(dict.fromkeys(visible))
    past, new = _end_of_context(context)
    patterns: dict[KeyVisibility, MaskPattern] = {}
    for visibility, array in zip(distinct, _evaluate_masks(positions, distinct, past, new)):
        pattern = match_pattern(array, past)
        if pattern is None:
            raise ModelError(
                "serve.mask_unsupported",
                f"serve: {visibility} follows no supported rule for up to {context} tokens: each token must see "
                "itself and earlier tokens, all of them or a fixed number of the last ones, with a bias by key or "
                "by distance.",
            )
        patterns[visibility] = pattern
    violation = _find_violation(positions, patterns, context)
    if violation is not None:
        raise ModelError(
            "serve.mask_depends_on_data",
            f"serve: the keys that {violation} hides from a token depend on more than the token's position.",
        )
    return {node: patterns[visibility] for node, visibility in zip(attentions, visible)}


def find_left_windows(positions: Positions, attentions: Collection[ir.Node], context: int) -> dict[ir.Node, int | None]:
    """Return how many keys before its own a token of each Attention sees, up to the context.

    That is proven as in `find_patterns`, for any bias on scores, and for some sequences that are padded on the left.
    None if tokens see all keys, if no pattern matches, or if the mask cannot be computed.
    """
    visible = {node: KeyVisibility.of_node(node) for node in attentions}
    windows = {
        visibility: _find_window(positions, visibility, context) for visibility in dict.fromkeys(visible.values())
    }
    return {node: windows[visibility] for node, visibility in visible.items()}


def _find_window(positions: Positions, visible: KeyVisibility, context: int) -> int | None:
    past, new = _end_of_context(context)
    try:
        (end,) = _evaluate_masks(positions, [visible], past, new)
        for hiding_bound in (None, _HIDING_BIAS):
            pattern = match_pattern(_is_seen(end, hiding_bound), past)
            if pattern is None or pattern.left is None:
                continue
            if _find_violation(positions, {visible: pattern}, context, partial(_is_seen, hiding_bound=hiding_bound)):
                return None
            return (
                pattern.left
                if _is_valid_after_padding(positions, visible, pattern.left, context, hiding_bound)
                else None
            )
    except ModelError:  # the mask cannot be computed of positions alone
        return None
    return None


def _is_valid_after_padding(
    positions: Positions, visible: KeyVisibility, left: int, context: int, hiding_bound: float | None
) -> bool:
    """Return whether tokens of sequences that are padded on the left see only a window."""
    rows = min(context, left + _MIN_TOKENS)
    for padding in (1, rows // 2):
        (array,) = _evaluate_masks(positions, [visible], 0, rows, padding)
        _, token, key = np.nonzero(_is_seen(array, hiding_bound)[:, padding:])
        distance = token + padding - key
        if not ((distance >= 0) & (distance <= left)).all():
            return False
    return True


def _find_violation(
    positions: Positions,
    patterns: Mapping[KeyVisibility, MaskPattern],
    context: int,
    read: Callable[[np.ndarray], np.ndarray] = np.asarray,
) -> KeyVisibility | None:
    """Return the first visibility whose masks, converted by `read`, violate their pattern in a chunk of the context."""
    for past, new in _iterate_chunks(context):
        arrays = _evaluate_masks(positions, list(patterns), past, new)
        for (visible, pattern), array in zip(patterns.items(), arrays):
            if not is_pattern_of(pattern, read(array), past):
                return visible
    return None


def _is_seen(mask: np.ndarray, hiding_bound: float | None) -> np.ndarray:
    return ~np.isneginf(convert_to_bias(mask, hiding_bound))


def _end_of_context(context: int) -> tuple[int, int]:
    """Return how many tokens precede the end of a context by which a pattern is guessed, and its length."""
    new = context if context <= _WHOLE_CONTEXT else _MIN_TOKENS
    return context - new, new


def _iterate_chunks(context: int) -> Iterator[tuple[int, int]]:
    """Yield chunks of a context, or some of them, by which a pattern is proven; and single tokens.

    A mask may depend on the number of tokens of a call.
    """
    yield from ((2**power - 1, 1) for power in range(context.bit_length()))
    tokens = max(_MIN_TOKENS, _MAX_ELEMENTS // context)
    for past in range(0, context, tokens if context <= _CHECKED_CONTEXT else context // _CHUNKS):
        yield past, min(tokens, context - past)


@dataclass(frozen=True)
class KeyVisibility:
    """The inputs and attributes that determine the keys a token of an Attention sees.

    Sides are windows that end with its own position.
    """

    mask: ir.Value | None
    causal: bool
    left: int
    right: int

    @classmethod
    def of_node(cls, node: ir.Node) -> KeyVisibility:
        mask = attention_input(node, MASK)
        sides = [int(attribute(node, f"{side}_window_size", -1)) for side in ("left", "right")]
        return KeyVisibility(mask, attribute(node, "is_causal", 0) == 1, *sides)

    def __str__(self) -> str:
        return "the causal mask" if self.mask is None else f"mask '{self.mask.name}'"

    def apply_attributes(self, mask: np.ndarray | None, past: int, new: int) -> np.ndarray:
        """Return the mask [heads or 1, new, past + new], bool or additive, with the keys that the attributes hide."""
        distance = np.arange(past, past + new)[:, None] - np.arange(past + new)[None, :]
        seen = np.ones_like(distance, bool)
        if self.causal or self.right >= 0:
            seen &= distance >= (0 if self.causal else -self.right)
        if self.left >= 0:
            seen &= distance <= self.left
        if mask is None:
            return seen[None]
        by_head, keys = _split_heads_of_mask(mask), past + new
        if by_head.shape[-1] < keys:
            raise ModelError(
                "serve.mask_size_mismatch", f"serve: {self} has {by_head.shape[-1]} keys, and attention has {keys}."
            )
        by_head = np.broadcast_to(by_head[..., :keys], (len(by_head), new, keys))
        if seen.all():
            return by_head
        hidden = False if by_head.dtype == bool else _lowest_value(by_head.dtype)
        return np.where(seen, by_head, np.array(hidden, by_head.dtype))


def _evaluate_masks(
    positions: Positions, visible: Sequence[KeyVisibility], past: int, new: int, padding: int = 0
) -> list[np.ndarray]:
    masks = list(dict.fromkeys(visibility.mask for visibility in visible if visibility.mask is not None))
    arrays = dict(zip(masks, positions.at(masks, past, new, padding))) if masks else {}
    return [
        visibility.apply_attributes(None if visibility.mask is None else arrays[visibility.mask], past, new)
        for visibility in visible
    ]


def _split_heads_of_mask(mask: np.ndarray) -> np.ndarray:
    """Return [heads or 1, S, P + S] of a mask of batch 1."""
    return mask.reshape((1,) * max(0, 4 - mask.ndim) + mask.shape)[0]


def match_pattern(mask: np.ndarray, past: int) -> MaskPattern | None:
    """Return the pattern of a mask [heads or 1, new, past + new] of the last tokens, bool or additive.

    past is 0 if these are all tokens. None if a token sees later keys, or if the bias has no pattern and is too large
    to be stored.
    """
    return _match_pattern(mask, past, None) or _match_pattern(mask, past, _HIDING_BIAS)


def _match_pattern(mask: np.ndarray, past: int, hiding_bound: float | None) -> MaskPattern | None:
    added = convert_to_bias(mask, hiding_bound)
    new, keys = added.shape[-2:]
    last = added[:, -1]
    seen = last > -np.inf
    if not seen[:, -1].all():
        return None
    hidden = np.flatnonzero(~seen[0])
    left = None if len(hidden) == 0 else keys - 2 - int(hidden[-1])
    finite = np.where(seen, last, np.float32(0))
    candidates = [
        MaskPattern(left, hiding_bound=hiding_bound),
        MaskPattern(left, finite[:, ::-1], "distance", hiding_bound),
    ]
    if left is None:
        candidates.append(MaskPattern(None, finite, "key", hiding_bound))
    is_causal = not (added > -np.inf)[:, np.arange(new)[:, None] + past < np.arange(keys)].any()
    if past == 0 and is_causal and added.nbytes <= _MAX_TABLE_BYTES:
        candidates.append(MaskPattern(None, added, "pair", hiding_bound))
    return next((candidate for candidate in candidates if is_pattern_of(candidate, mask, past)), None)


def is_pattern_of(pattern: MaskPattern, mask: np.ndarray, past: int) -> bool:
    """Return whether a mask [heads or 1, new, past + new] of the tokens after `past` others follows the pattern."""
    added = convert_to_bias(mask, pattern.hiding_bound)
    expected = pattern.compute_bias(past, added.shape[-2])
    hidden = np.isneginf(added)
    if not np.array_equal(np.broadcast_to(np.isneginf(expected), added.shape), hidden):
        return False
    return bool(np.allclose(np.where(hidden, 0, added), np.where(hidden, 0, expected), 1e-6, 1e-6))


def convert_to_bias(mask: np.ndarray, hiding_bound: float | None = None) -> np.ndarray:
    """Return the bias that a mask adds to scores, float32.

    It is -inf for False, for numbers at or below `hiding_bound`, and for numbers so low that exp is 0 compared with
    any other.
    """
    if mask.dtype == bool:
        return np.where(mask, np.float32(0), np.float32(-np.inf))
    with np.errstate(over="ignore"):  # from float64
        added = mask.astype(np.float32)
    return np.where(
        added <= (max(_lowest_value(mask.dtype) / 2, -1e30) if hiding_bound is None else hiding_bound),
        np.float32(-np.inf),
        added,
    )


def _lowest_value(dtype: np.dtype) -> float:
    return float(np.finfo(dtype).min) if dtype.kind == "f" else -3e38  # close to the lowest bfloat16
