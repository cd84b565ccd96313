"""From tensors to the attention kernel: the common steps of all attention operators after their own rules."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from tvm import relax, tirx

from ...attention.codegen.plain import build_plain_attention
from ...attention.expr.node import PAIR
from ...attention.record.cache_layout import Axes, Beams, CacheLayout, KvQuantization
from ...attention.record.formula import Formula
from ...attention.record.problem import AttentionProblem, Mask
from ...importing.node import Node
from ...importing.values import Shape, Size, Value, static, storage_dtype, storage_shape
from ..tensor.reshape import reshape_to


def lower_attention(
    node: Node,
    tensors: Mapping[str, Value | Size | None],
    *,
    heads: tuple[int, int],
    mask: Mask | None = None,
    beams: Beams | None = None,
    quantization: KvQuantization | None = None,
    **fields: Any,
) -> dict[str, Value]:
    """Emit one call of the attention kernel, and return its outputs by name.

    The outputs are y in the layout of q, and those that `fields` request.

    Args:
        tensors: The kernel's parameters by the names of `AttentionProblem`, None for absent ones. q is [B, Hq, S, D] or
            [B, S, Hq * D]. k and v are [B, Hkv, T, D] or [B, T, Hkv * D]. Sizes of equal meaning are already the same
            expression.
        heads: (Hq, Hkv).
        mask: The interpretation of the tensor of that name.
        beams: The beams of the cache.
        codec: The quantization of the cache.
        fields: Further fields of the record that do not follow from a tensor.
    """
    present = {name: value for name, value in tensors.items() if isinstance(value, Value)}
    q, k, v = (present[name] for name in "qkv")
    (row_axes, q_shape), (key_axes, k_shape), (_, v_shape) = (
        _read_logical_shape(x, count) for x, count in ((q, heads[0]), (k, heads[1]), (v, heads[1]))
    )
    problem = AttentionProblem(
        batch=static(q_shape[0]),
        q_len=static(q_shape[2]),
        kv_len=static(k_shape[2]),
        q_heads=heads[0],
        kv_heads=heads[1],
        head_dim=q_shape[3],
        v_head_dim=v_shape[3] * (quantization.packing if quantization is not None else 1),
        dtype=q.dtype,
        v_dtype=v.dtype if quantization is None else q.dtype,
        row_axes=row_axes,
        layout=CacheLayout(key_axes, beams=beams, quantization=quantization),
        lengths="lengths" in present,
        mask=mask,
        sink="sink" in present,
        **fields,
    )
    return call_attention_kernel(node, problem, tensors, k_shape[2])


def make_ragged_problem(
    batch: Size,
    heads: tuple[int, int],
    size: int,
    dtype: str,
    layout: CacheLayout,
    row_axes: Axes = "thd",
    v_size: int | None = None,
    **fields: Any,
) -> AttentionProblem:
    """Return the record of a ragged batch, accumulated in float32, over a cache with lengths.

    The rows are [rows, heads, size] by default. heads is (Hq, Hkv). v_size is the size of values where it differs.
    """
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


def call_attention_kernel(
    node: Node, problem: AttentionProblem, tensors: Mapping[str, Any], keys: Size
) -> dict[str, Value]:
    """Emit one call of the kernel of a problem, and return its outputs by name.

    Args:
        tensors: The kernel's parameters by name. Sizes of equal meaning are already the same expression.
        keys: The number of keys.
    """
    scalars = problem.scalars()
    arguments = [
        node.shape_expr([tensors[name]]).values[0] if name in scalars else node.tensor(tensors[name])
        for name in problem.inputs()
    ]
    q = tensors["q"]
    sizes = dict(zip(problem.row_axes, q.shape))
    wide = {"d": problem.v_head_dim, "e": problem.q_heads * problem.v_head_dim}
    rows = (sizes["t"], problem.q_heads) if problem.is_ragged else (sizes["b"], problem.q_heads, sizes["t"])
    shapes = {
        "y": (tuple((sizes | wide)[axis] for axis in problem.row_axes), q.dtype),
        "qk": ((*rows, keys), q.dtype),
        "lse": (rows, problem.acc_dtype),
        "max": (rows, problem.acc_dtype),
    }
    function = build_plain_attention(problem).without_attr("global_symbol")  # the module names each function
    results = node.call_tir(function, arguments, [shapes[name] for name in problem.outputs()], "attention")
    return dict(zip(problem.outputs(), results, strict=True))


def trace_formula(
    element: Callable[..., Any], tables: Sequence[Value], score_dtype: str | None = None, sizes: Sequence[Size] = ()
) -> tuple[Formula, dict[str, Value | Size]]:
    """Return the mask with elements element(b, h, i, j, *reads, *sizes), and its kernel parameters.

    reads[k](*index) is an element of tables[k]. With score_dtype, the formula is instead the change element(b, h, i, j,
    s, *reads, *sizes) of a score s.
    """
    indices = [tirx.Var(name, "int64") for name in PAIR]
    if score_dtype is not None:
        indices.append(tirx.Var("s", score_dtype))
    buffers = [
        tirx.decl_buffer(storage_shape(t.dtype, t.shape), storage_dtype(t.dtype), f"table_{k}")
        for k, t in enumerate(tables)
    ]

    def make_reader(buffer: tirx.Buffer) -> Callable[..., Any]:
        return lambda *index: buffer[tuple(index)]

    scalars = [
        tirx.const(s, "int64") if isinstance(s, int) else tirx.Var(f"size_{k}", "int64") for k, s in enumerate(sizes)
    ]
    variables = [scalar for scalar in scalars if isinstance(scalar, tirx.Var)]
    formula, used = Formula.from_tir(
        element(*indices, *map(make_reader, buffers), *scalars), indices, variables, buffers
    )
    values = {id(variable): value for variable, value in zip((*buffers, *scalars), (*tables, *sizes))}
    return formula, {name: values[id(variable)] for name, variable in used.items()}


def describe_mask(mask: Value | None, pad: bool = False, broadcasts: tuple[int, ...] = ()) -> Mask | None:
    """Return how a mask tensor of rank 4 is interpreted.

    Its dimensions of size 1 broadcast. Those on the axes `broadcasts` do if they are 1 at run time. pad is as in
    `Mask`.
    """
    if mask is None:
        return None
    batch, heads, rows, keys = (static(size) for size in mask.shape)
    return Mask(mask.dtype, (batch, heads, rows, keys), pad, broadcasts)


def move_heads_first(node: Node, value: Value, heads: int) -> Value:
    """Return [B, L, H * D] as [B, H, L, D]."""
    if value.rank == 4:
        return value
    batch, length, width = value.shape
    split = reshape_to(node, value, (batch, length, heads, width // heads))
    return node.emit(relax.op.permute_dims(node.tensor(split), [0, 2, 1, 3]))


def concatenate_cache(node: Node, past: Value, new: Value) -> Value:
    """Emit a cache [B, H, P, D] followed by new rows [B, H, L, D]."""
    return node.emit(relax.op.concat([node.tensor(past), node.tensor(new)], axis=2))


def _read_logical_shape(value: Value, heads: int) -> tuple[Axes, Shape]:
    """Return the axes, and the dimensions as (batch, heads, length, head size)."""
    if value.rank == 4:
        return "bhtd", value.shape
    batch, length, width = value.shape
    return "bte", (batch, heads, length, width // heads)
