"""CUDA kernels. `RULES` is the manifest: which kernel serves which function, first answer wins."""

from __future__ import annotations

from ..variant import Rule
from .append import append
from .attention import attention
from .concat import concat
from .elementwise import elementwise
from .expert_sort import expert_sort
from .gradient import gradient
from .linear import linear
from .matmul import joins as joins
from .matmul import matmul
from .normed_matmul import normed_matmul
from .ordinary import one_number, ordinary
from .reduction import reduction
from .running_sum import running_sum
from .scatter import cache_update
from .tailed_matmul import tailed_matmul
from .top_few import top_few
from .top_k import top_k
from .transposition import transposition

RULES: tuple[Rule, ...] = (
    attention,
    gradient,
    linear,
    append,
    cache_update,
    tailed_matmul,
    normed_matmul,
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
