"""CUDA kernels.

`RULES` lists the rules in order: the first one that accepts a function serves it.
"""

from __future__ import annotations

from ..variant import Rule
from .attention.attention import attention
from .attention.attention_tiles import count_packed_heads as count_packed_heads
from .attention.gradient import gradient
from .attention.linear import linear
from .cache.kv_write import kv_write
from .cache.scatter import cache_update
from .dependent_launch import early_launch as early_launch
from .elementwise.concat import concat
from .elementwise.elementwise import elementwise
from .elementwise.expert_sort import expert_sort
from .elementwise.fallback import one_number, ordinary
from .elementwise.reduction import reduction
from .elementwise.running_sum import running_sum
from .elementwise.top_few import top_few
from .elementwise.top_k import top_k
from .elementwise.transposition import transposition
from .fusion.fused_launches import KernelLaunch as KernelLaunch
from .fusion.fused_launches import merge_launches as merge_launches
from .fusion.fused_launches import read_launch as read_launch
from .fusion.fused_matmul import epilogue_matmul, prologue_matmul
from .matmul.matmul import accepts_siblings as accepts_siblings
from .matmul.matmul import matmul
from .primitives.cost_model import min_seconds as min_seconds
from .primitives.device import DEVICES as DEVICES
from .primitives.device import device as device
from .primitives.ptx import CHUNK_BYTES as CHUNK_BYTES

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
