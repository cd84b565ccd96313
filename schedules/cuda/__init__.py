"""CUDA kernels. `RULES` is the manifest: which kernel serves which function, first answer wins."""

from __future__ import annotations

from collections.abc import Callable

import tvm
from tvm import tirx

from .ordinary import ordinary

Rule = Callable[[tirx.PrimFunc, tvm.target.Target], tirx.PrimFunc | None]

RULES: tuple[Rule, ...] = (ordinary,)
