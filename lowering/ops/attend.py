"""From tensors to the attention kernel: what every attention operator does once its own rules are applied."""

from __future__ import annotations

from tvm import relax, tirx

from ..attention.plain import plain
from ..attention.problem import AttentionProblem, Layout, Mask, Window
from ..node import Node
from ..values import Shape, Size, Value
from .reshape import reshape_to


def attend(
    node: Node,
    q: Value,
    k: Value,
    v: Value,
    *,
    heads: tuple[int, int],
    acc_dtype: str,
    scale: float,
    softcap: float = 0.0,
    window: Window | None = None,
    mask: Value | None = None,
    pad: bool = False,
    broadcasts: tuple[int, ...] = (),
    sink: Value | None = None,
    lengths: Value | None = None,
    past: Size = 0,
    qk_mode: int | None = None,
) -> tuple[Value, Value | None]:
    """Y in the layout of q, and the qk matrix [B, Hq, S, T] if qk_mode asks for it: one call of the kernel.

    q is [B, Hq, S, D] or [B, S, Hq * D], k and v are [B, Hkv, T, D] or [B, T, Hkv * D], heads is (Hq, Hkv); sizes that
    mean the same are the same already. The other arguments are fields of `AttentionProblem` and the tensors that belong
    to them: mask of rank 4 with dimensions of 1 that broadcast (those on the axes `broadcasts` if they turn out to be
    1), sink [Hq], lengths int64 [B].
    """
    (q_layout, q_shape), (kv_layout, k_shape), (_, v_shape) = (
        _logical(x, count) for x, count in ((q, heads[0]), (k, heads[1]), (v, heads[1]))
    )
    problem = AttentionProblem(
        batch=_known(q_shape[0]),
        q_len=_known(q_shape[2]),
        kv_len=_known(k_shape[2]),
        q_heads=heads[0],
        kv_heads=heads[1],
        head_dim=q_shape[3],
        v_head_dim=v_shape[3],
        dtype=q.dtype,
        v_dtype=v.dtype,
        acc_dtype=acc_dtype,
        scale=scale,
        q_layout=q_layout,
        kv_layout=kv_layout,
        softcap=softcap,
        window=window,
        lengths=lengths is not None,
        mask=None if mask is None else Mask(mask.dtype, _four(mask), pad, broadcasts),
        sink=sink is not None,
        qk_mode=qk_mode,
    )
    arguments = [node.tensor(value) for value in (q, k, v, mask, sink, lengths) if value is not None]
    if "past" in problem.parameters():
        arguments.append(tirx.IntImm("int64", past) if isinstance(past, int) else past)
    scores = (*q_shape[:3], k_shape[2])
    y = (*q_shape[:3], v_shape[3]) if q_layout == "bhsd" else (*q.shape[:2], heads[0] * v_shape[3])
    outputs = [(y, q.dtype)] + [(scores, q.dtype)] * (qk_mode is not None)
    function = plain(problem).without_attr("global_symbol")  # the module gives each function a name of its own
    results = node.call_tir(function, arguments, outputs, "attention")
    return results[0], results[1] if len(results) == 2 else None


def heads_first(node: Node, value: Value, heads: int) -> Value:
    """[B, L, H * D] as [B, H, L, D]."""
    if value.rank == 4:
        return value
    batch, length, width = value.shape
    split = reshape_to(node, value, (batch, length, heads, width // heads))
    return node.emit(relax.op.permute_dims(node.tensor(split), [0, 2, 1, 3]))


def concatenated(node: Node, past: Value, new: Value) -> Value:
    """A cache [B, H, P, D] with new rows [B, H, L, D] behind it."""
    return node.emit(relax.op.concat([node.tensor(past), node.tensor(new)], axis=2))


def _logical(value: Value, heads: int) -> tuple[Layout, Shape]:
    """The layout, and the dimensions as (batch, heads, length, head size)."""
    if value.rank == 4:
        return "bhsd", value.shape
    batch, length, width = value.shape
    return "bshd", (batch, heads, length, width // heads)


def _four(mask: Value) -> tuple[int | None, int | None, int | None, int | None]:
    batch, heads, rows, keys = (_known(size) for size in mask.shape)
    return batch, heads, rows, keys


def _known(size: Size) -> int | None:
    return size if isinstance(size, int) else None
