"""Checks of a call of gpt_attention: an illegal call is rejected before anything is written, naming the argument.

Checks of settings, shapes and types come first, then those of contents (contents.py). Their cost does not depend on the
number of tokens, unless two masks must agree.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from ..gpt_inputs import collect_inputs
from .caches import check_cache
from .contents import check_contents
from .cross import check_cross_shapes
from .rotation import check_angle_tables
from .rows import check_qkv
from .scores import check_score_shapes
from .settings import check_settings, refuse_unknown
from .values import ArgumentError

__all__ = ["ArgumentError", "check_call", "refuse_unknown"]


def check_call(qkv: Any, arguments: Mapping[str, Any], contents: bool = True) -> dict[str, np.ndarray]:
    """Check all arguments of a call.

    Args:
        qkv: the argument qkv.
        arguments: all keyword arguments of gpt_attention, with defaults filled in.
        contents: check what depends on the contents of arrays, too. The mapping of pools is checked in any case, since
            the host reads it.

    Returns:
        The inputs of the operator, by name.

    Raises:
        ArgumentError: the call is illegal.
        NotImplementedError: a value of an enumeration is not supported.
    """
    settings = check_settings(arguments)
    rows = check_qkv(qkv, arguments, settings)
    if settings.rotary is not None:
        check_angle_tables(arguments, settings.rotary)
    check_score_shapes(arguments, settings, rows)
    if settings.is_cross:
        check_cross_shapes(arguments, settings, rows)
    check_cache(arguments, settings, rows)
    inputs = collect_inputs(qkv, arguments)
    if contents:
        check_contents(inputs, arguments, settings, rows)
    return inputs
