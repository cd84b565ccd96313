"""CUDA kernels. `RULES` is the manifest: which kernel serves which function, first answer wins."""

from __future__ import annotations

from collections.abc import Callable

import tvm
from tvm import tirx

from .attention import attention
from .ordinary import ordinary
from .scatter import cache_update

Rule = Callable[[tirx.PrimFunc, tvm.target.Target], tirx.PrimFunc | None]

RULES: tuple[Rule, ...] = (attention, cache_update, ordinary)
