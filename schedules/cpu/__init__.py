"""CPU kernels. `RULES` is the manifest: which kernel serves which function, first answer wins."""

from __future__ import annotations

from ..variant import Rule
from .attention import attention
from .concat import concat
from .elementwise import elementwise
from .gradient import gradient
from .linear import linear
from .matmul import accepts_siblings as accepts_siblings
from .matmul import matmul
from .recurrence import recurrence
from .reduction import reduction
from .row_blocks import row_blocks
from .sliding import windows

RULES: tuple[Rule, ...] = (
    attention,
    gradient,
    linear,
    recurrence,
    row_blocks,
    matmul,
    elementwise,
    concat,
    windows,
    reduction,
)
