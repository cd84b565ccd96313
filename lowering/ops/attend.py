"""From tensors to the attention kernel: what every attention operator does once its own rules are applied."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from tvm import relax

from ..attention.plain import plain
from ..attention.problem import AttentionProblem, Mask
from ..attention.store import Axes, Store
from ..importing.node import Node
from ..importing.values import Shape, Size, Value
from .reshape import reshape_to


def attend(
    node: Node,
    given: Mapping[str, Value | Size | None],
    *,
    heads: tuple[int, int],
    mask: Mask | None = None,
    **fields: Any,
) -> dict[str, Value]:
    """The outputs of one call of the kernel, by name: y in the layout of q, and those that `fields` ask for.

    given holds the kernel's parameters by the names that `AttentionProblem` has for them, None for those that are not
    there: q is [B, Hq, S, D] or [B, S, Hq * D], k and v are [B, Hkv, T, D] or [B, T, Hkv * D]; sizes that mean the same
    are the same already. heads is (Hq, Hkv), mask says how the tensor of that name is meant; further fields are those
    of the record that no tensor tells.
    """
    tensors = {name: value for name, value in given.items() if isinstance(value, Value)}
    q, k, v = (tensors[name] for name in "qkv")
    (row_axes, q_shape), (key_axes, k_shape), (_, v_shape) = (
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
        row_axes=row_axes,
        store=Store(key_axes),
        lengths="lengths" in tensors,
        mask=mask,
        sink="sink" in tensors,
        **fields,
    )
    sizes = {name: size for name, size in given.items() if name in problem.scalars()}
    arguments = [
        node.shape_expr([sizes[name]]).values[0] if name in sizes else node.tensor(tensors[name])
        for name in problem.inputs()
    ]
    rows = q_shape[:3]
    shapes = {
        "y": ((*rows, v_shape[3]) if "h" in row_axes else (*q.shape[:2], heads[0] * v_shape[3]), q.dtype),
        "qk": ((*rows, k_shape[2]), q.dtype),
        "lse": (rows, problem.acc_dtype),
    }
    function = plain(problem).without_attr("global_symbol")  # the module gives each function a name of its own
    results = node.call_tir(function, arguments, [shapes[name] for name in problem.outputs()], "attention")
    return dict(zip(problem.outputs(), results, strict=True))


def mask_of(mask: Value | None, pad: bool = False, broadcasts: tuple[int, ...] = ()) -> Mask | None:
    """How a tensor of rank 4 is meant whose dimensions of 1 broadcast, as those on the axes `broadcasts` do if the run
    shows that they are 1; pad as in `Mask`."""
    if mask is None:
        return None
    batch, heads, rows, keys = (_known(size) for size in mask.shape)
    return Mask(mask.dtype, (batch, heads, rows, keys), pad, broadcasts)


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


def _logical(value: Value, heads: int) -> tuple[Axes, Shape]:
    """The axes, and the dimensions as (batch, heads, length, head size)."""
    if value.rank == 4:
        return "bhtd", value.shape
    batch, length, width = value.shape
    return "bte", (batch, heads, length, width // heads)


def _known(size: Size) -> int | None:
    return size if isinstance(size, int) else None
