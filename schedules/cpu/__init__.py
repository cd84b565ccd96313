"""CPU kernels. `RULES` is the manifest: which kernel serves which function, first answer wins."""

from __future__ import annotations

from ..variant import Rule
from .attention.attention import attention
from .attention.gradient import gradient
from .attention.linear import linear
from .elementwise.concat import concat
from .elementwise.elementwise import elementwise
from .elementwise.recurrence import recurrence
from .elementwise.reduction import reduction
from .elementwise.sliding import windows
from .matmul.int8_rows import choose_row_block as choose_row_block
from .matmul.matmul import accepts_siblings as accepts_siblings
from .matmul.matmul import matmul
from .matmul.panels import panel_width as panel_width
from .matmul.row_blocks import row_blocks
from .matmul.winograd import winograd
from .primitives.vector import CpuFeatures as CpuFeatures
from .primitives.vector import read_cpu_features as read_cpu_features
from .unused_features import remove_unused_features as remove_unused_features

RULES: tuple[Rule, ...] = (
    attention,
    gradient,
    linear,
    recurrence,
    row_blocks,
    winograd,
    matmul,
    elementwise,
    concat,
    windows,
    reduction,
)
