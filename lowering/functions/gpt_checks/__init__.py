"""Checks of a call of gpt_attention: an illegal call is rejected before anything is written, naming the argument.

Checks of settings, shapes and types come first, then those of contents: lengths, and what follows from them for masks,
tables, slots and blocks. Their cost does not depend on the number of tokens, unless two masks must agree.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from .beams import check_beams
from .caches import check_cache
from .cross import check_cross_shapes, check_encoder_lengths
from .rotation import check_angle_tables, check_positions
from .rows import check_lengths, check_qkv
from .scores import check_score_shapes, check_scores
from .settings import check_settings, refuse_unknown
from .slots import check_slots
from .values import ArgumentError

__all__ = ["ArgumentError", "check_call", "refuse_unknown"]


def check_call(qkv: Any, arguments: Mapping[str, Any], contents: bool = True) -> None:
    """Check all arguments of a call.

    Args:
        qkv: the argument qkv.
        arguments: all keyword arguments of gpt_attention, with defaults filled in.
        contents: check what depends on the contents of arrays, too. The window, the number of sinks and the mapping of
            pools are checked in any case, since the host reads them.

    Raises:
        ArgumentError: the call is illegal.
        NotImplementedError: a value of an enumeration is not supported.
    """
    settings = check_settings(arguments)
    rows = check_qkv(qkv, arguments, settings)
    angles = None if settings.rotation is None else check_angle_tables(arguments, settings.rotation)
    check_score_shapes(arguments, settings, rows)
    if settings.is_cross:
        check_cross_shapes(arguments, settings, rows)
    cache = check_cache(arguments, settings, rows)
    if not contents:
        return
    requests = check_lengths(arguments, settings, rows)
    if not rows.requests:
        return
    encoder = check_encoder_lengths(arguments, requests) if settings.is_cross else None
    check_scores(arguments, settings, rows, requests, encoder)
    if settings.rotation is not None and angles is not None:
        check_positions(settings.rotation, angles, requests)
    indirection = arguments["cache_indirection"]
    if indirection is not None:
        check_beams(indirection, settings, rows, requests)
    if cache is not None:
        check_slots(cache, settings, rows, requests, encoder, indirection)
