"""CUDA kernels.

`RULES` lists the rules in order: the first one that accepts a function serves it.
"""

from __future__ import annotations

from ..variant import Rule
from .attention import attention
from .concat import concat
from .elementwise import elementwise
from .epilogue_matmul import epilogue_matmul
from .expert_sort import expert_sort
from .fallback import one_number, ordinary
from .gradient import gradient
from .kv_write import kv_write
from .linear import linear
from .matmul import accepts_siblings as accepts_siblings
from .matmul import matmul
from .prologue_matmul import prologue_matmul
from .reduction import reduction
from .running_sum import running_sum
from .scatter import cache_update
from .top_few import top_few
from .top_k import top_k
from .transposition import transposition

RULES: tuple[Rule, ...] = (
    attention,
    gradient,
    linear,
    kv_write,
    cache_update,
    epilogue_matmul,
    prologue_matmul,
    matmul,
    transposition,
    elementwise,
    concat,
    reduction,
    running_sum,
    top_few,
    top_k,
    expert_sort,
    one_number,
    ordinary,
)
