"""The form of K and V in a tile: read in place, copied, or packed lanes of bfloat16 pairs."""

from __future__ import annotations

from tvm import DataType, tirx

from lowering.attention.codegen.bound import BoundAttention
from lowering.attention.record.problem import AttentionProblem

from ..matmul.dot_bf16 import LANES
from ..primitives.vector import LINE, CpuFeatures, cover_row

_FEW_ROWS, _MANY_ROWS = 32, 1024


def uses_bf16_pairs(p: AttentionProblem, cpu: CpuFeatures, in_place: bool = False) -> bool:
    """Return whether tiles, unpacked or read in place, are packed lanes of bfloat16 pairs (dot_bf16.py)."""
    half = {*p.stored_types} == {"bfloat16"} and p.acc_dtype == "float32"
    wide = p.v_head_dim >= LANES and (not in_place or min(p.head_dim, p.v_head_dim) >= 2 * LANES)
    return cpu.bf16_dot and half and p.head_dim % 2 == 0 and wide


def cover_values(p: AttentionProblem, cpu: CpuFeatures, in_place: bool) -> tuple[int, list[int]]:
    """Return (w, starts) of the vectors of a row of V and O: `cover_row`, in twos if packed lanes are read in place."""
    W = cpu.lanes(p.acc_dtype)
    if not (in_place and uses_bf16_pairs(p, cpu, in_place)):
        return cover_row(p.v_head_dim, W)
    return W, [start + half for start in cover_row(p.v_head_dim, 2 * W)[1] for half in (0, W)]


def copies_values(bound: BoundAttention, cpu: CpuFeatures) -> bool:
    """Return whether tiles of V are copied to scratch memory, whatever their type is.

    They are where vectors are as long as a cache line: a row that begins within a line would split each of its vectors.
    Rows far apart also share few sets of the first-level cache. Rows that follow one another are copied only for many
    query rows: their copies take 3 % of the time, and where a core is slow at vectors in two lines save 17 %.
    """
    p = bound.problem
    if cpu.lanes(p.acc_dtype) * DataType(p.acc_dtype).itemsize != LINE:
        return False
    _, _, stride = bound.addressing.strides("v")
    is_contiguous = isinstance(stride, tirx.IntImm) and int(stride.value) == p.v_head_dim
    rows = None if p.q_len is None else p.q_len * p.group
    return rows is not None and rows >= _MANY_ROWS if is_contiguous else rows is None or rows > _FEW_ROWS
