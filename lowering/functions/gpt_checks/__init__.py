"""What is illegal in a call of gpt_attention is refused before anything is written, in words that name the argument.

Checks of settings, shapes and types come first, then those of contents: lengths, and what follows from them for masks,
tables, slots and blocks. Their cost does not depend on the number of tokens, but where two masks must agree.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from .beams import check_beams
from .caches import cache_of
from .cross import check_cross_shapes, encoder_of
from .rotation import angles_of, check_positions
from .rows import requests_of, rows_of
from .scores import check_score_shapes, check_scores
from .settings import refuse_unknown, settings_of
from .slots import check_slots
from .values import ArgumentError

__all__ = ["ArgumentError", "check_call", "refuse_unknown"]


def check_call(qkv: Any, arguments: Mapping[str, Any], contents: bool = True) -> None:
    """Raises ArgumentError for an illegal call, NotImplementedError for an enumeration's value that is not supported.

    arguments has all keyword arguments of gpt_attention, defaults filled in. contents=False leaves out what depends on
    the contents of arrays, but for the window, the number of sinks and the mapping of pools, which the host reads.
    """
    settings = settings_of(arguments)
    rows = rows_of(qkv, arguments, settings)
    angles = None if settings.rotation is None else angles_of(arguments, settings.rotation)
    check_score_shapes(arguments, settings, rows)
    if settings.cross:
        check_cross_shapes(arguments, settings, rows)
    cache = cache_of(arguments, settings, rows)
    if not contents:
        return
    requests = requests_of(arguments, settings, rows)
    if not rows.requests:
        return
    encoder = encoder_of(arguments, requests) if settings.cross else None
    check_scores(arguments, settings, rows, requests, encoder)
    if settings.rotation is not None and angles is not None:
        check_positions(settings.rotation, angles, requests)
    indirection = arguments["cache_indirection"]
    if indirection is not None:
        check_beams(indirection, settings, rows, requests)
    if cache is not None:
        check_slots(cache, settings, rows, requests, encoder, indirection)
