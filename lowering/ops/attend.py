"""From tensors to the attention kernel: what every attention operator does once its own rules are applied."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from tvm import relax, tirx

from ..attention.cache_layout import Axes, Beams, CacheLayout, Codec
from ..attention.expr.node import PAIR
from ..attention.formula import Formula
from ..attention.plain import plain
from ..attention.problem import AttentionProblem, Mask
from ..importing.node import Node
from ..importing.values import Shape, Size, Value, static, storage_dtype, storage_shape
from .reshape import reshape_to


def attend(
    node: Node,
    given: Mapping[str, Value | Size | None],
    *,
    heads: tuple[int, int],
    mask: Mask | None = None,
    beams: Beams | None = None,
    codec: Codec | None = None,
    **fields: Any,
) -> dict[str, Value]:
    """The outputs of one call of the kernel, by name: y in the layout of q, and those that `fields` ask for.

    given holds the kernel's parameters by the names that `AttentionProblem` has for them, None for those that are not
    there: q is [B, Hq, S, D] or [B, S, Hq * D], k and v are [B, Hkv, T, D] or [B, T, Hkv * D]; sizes that mean the same
    are the same already. heads is (Hq, Hkv), mask says how the tensor of that name is meant, beams and codec are those
    of the cache; further fields are those of the record that no tensor tells.
    """
    tensors = {name: value for name, value in given.items() if isinstance(value, Value)}
    q, k, v = (tensors[name] for name in "qkv")
    (row_axes, q_shape), (key_axes, k_shape), (_, v_shape) = (
        _logical(x, count) for x, count in ((q, heads[0]), (k, heads[1]), (v, heads[1]))
    )
    problem = AttentionProblem(
        batch=static(q_shape[0]),
        q_len=static(q_shape[2]),
        kv_len=static(k_shape[2]),
        q_heads=heads[0],
        kv_heads=heads[1],
        head_dim=q_shape[3],
        v_head_dim=v_shape[3] * (codec.packing if codec is not None else 1),
        dtype=q.dtype,
        v_dtype=v.dtype if codec is None else q.dtype,
        row_axes=row_axes,
        layout=CacheLayout(key_axes, beams=beams, codec=codec),
        lengths="lengths" in tensors,
        mask=mask,
        sink="sink" in tensors,
        **fields,
    )
    return solved(node, problem, given, k_shape[2])


def packed(
    batch: Size,
    heads: tuple[int, int],
    size: int,
    dtype: str,
    layout: CacheLayout,
    row_axes: Axes = "thd",
    v_size: int | None = None,
    **fields: Any,
) -> AttentionProblem:
    """The record of packed rows, [rows, heads, size] by default, that sum in float32, over a cache whose batches have
    lengths; heads is (Hq, Hkv), v_size that of values where it is another one."""
    return AttentionProblem(
        batch=static(batch),
        q_len=None,
        kv_len=None,
        q_heads=heads[0],
        kv_heads=heads[1],
        head_dim=size,
        v_head_dim=size if v_size is None else v_size,
        dtype=dtype,
        v_dtype=dtype,
        acc_dtype="float32",
        row_axes=row_axes,
        layout=layout,
        lengths=True,
        **fields,
    )


def solved(node: Node, problem: AttentionProblem, given: Mapping[str, Any], keys: Size) -> dict[str, Value]:
    """The outputs of one call of the kernel of a problem, by name. given holds its parameters by name, for so many
    keys; sizes that mean the same are the same already."""
    scalars = problem.scalars()
    arguments = [
        node.shape_expr([given[name]]).values[0] if name in scalars else node.tensor(given[name])
        for name in problem.inputs()
    ]
    q = given["q"]
    sizes = dict(zip(problem.row_axes, q.shape))
    wide = {"d": problem.v_head_dim, "e": problem.q_heads * problem.v_head_dim}
    rows = (sizes["t"], problem.q_heads) if problem.packed else (sizes["b"], problem.q_heads, sizes["t"])
    shapes = {
        "y": (tuple((sizes | wide)[axis] for axis in problem.row_axes), q.dtype),
        "qk": ((*rows, keys), q.dtype),
        "lse": (rows, problem.acc_dtype),
        "max": (rows, problem.acc_dtype),
    }
    function = plain(problem).without_attr("global_symbol")  # the module gives each function a name of its own
    results = node.call_tir(function, arguments, [shapes[name] for name in problem.outputs()], "attention")
    return dict(zip(problem.outputs(), results, strict=True))


def formula_of(
    element: Callable[..., Any], tables: Sequence[Value], score_dtype: str | None = None, sizes: Sequence[Size] = ()
) -> tuple[Formula, dict[str, Value | Size]]:
    """The mask whose elements are element(b, h, i, j, *reads, *sizes), reads[k](*index) being an element of tables[k];
    and the kernel's parameters for it. With score_dtype it is the change that makes element(b, h, i, j, s, *reads,
    *sizes) of a score s."""
    indices = [tirx.Var(name, "int64") for name in PAIR]
    if score_dtype is not None:
        indices.append(tirx.Var("s", score_dtype))
    buffers = [
        tirx.decl_buffer(storage_shape(t.dtype, t.shape), storage_dtype(t.dtype), f"table_{k}")
        for k, t in enumerate(tables)
    ]

    def reader(buffer: tirx.Buffer) -> Callable[..., Any]:
        return lambda *index: buffer[tuple(index)]

    scalars = [
        tirx.const(s, "int64") if isinstance(s, int) else tirx.Var(f"size_{k}", "int64") for k, s in enumerate(sizes)
    ]
    variables = [scalar for scalar in scalars if isinstance(scalar, tirx.Var)]
    formula, read = Formula.of(element(*indices, *map(reader, buffers), *scalars), indices, variables, buffers)
    given = {id(made): known for made, known in zip((*buffers, *scalars), (*tables, *sizes))}
    return formula, {name: given[id(made)] for name, made in read.items()}


def mask_of(mask: Value | None, pad: bool = False, broadcasts: tuple[int, ...] = ()) -> Mask | None:
    """How a tensor of rank 4 is meant whose dimensions of 1 broadcast, as those on the axes `broadcasts` do if the run
    shows that they are 1; pad as in `Mask`."""
    if mask is None:
        return None
    batch, heads, rows, keys = (static(size) for size in mask.shape)
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
