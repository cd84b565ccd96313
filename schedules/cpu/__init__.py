"""CPU kernels. `RULES` is the manifest: which kernel serves which function, first answer wins."""

from __future__ import annotations

from collections.abc import Callable

import tvm
from tvm import tirx

from .attention import attention
from .elementwise import elementwise
from .matmul import matmul
from .reduction import reduction

Rule = Callable[[tirx.PrimFunc, tvm.target.Target], tirx.PrimFunc | None]

RULES: tuple[Rule, ...] = (attention, matmul, elementwise, reduction)
