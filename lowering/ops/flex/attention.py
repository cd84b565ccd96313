"""FlexAttention: softmax(score(scale * Q K^T) where visible) V (PyTorch's torch.nn.attention.flex_attention).

A row without a visible key gives 0, and -inf as lse. Query head h reads key/value head h // (Hq / Hkv).
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

from tvm import relax

from ...attention.expr.node import Expr, canonicalize, make_number, rename_parameters
from ...attention.flex_node import DOMAIN, FULL, PARTIAL, FlexAttentionSettings
from ...attention.record.formula import SCORE_MOD_PREFIX, Formula
from ...attention.record.problem import AttentionProblem
from ...importing.node import Node
from ...importing.values import Size, Value, is_one, static
from .. import op
from ..attention.attend import call_attention_kernel
from ..helpers.assertions import assert_shape
from ..helpers.compute import number as require_static
from ..helpers.compute import unify_sizes
from ..helpers.requirements import require_rank, require_same_dtype
from .reads import CapturedReads, as_table


@op("FlexAttention", since=1, domain=DOMAIN)
def flex_attention(
    node: Node, q: Value, k: Value, v: Value, states: Value | None = None, *captured: Value
) -> tuple[Value | None, ...]:
    """Return y [B, Hq, S, Dv] and lse [B, Hq, S].

    q is [B, Hq, S, D], k [B or 1, Hkv, T, D] and v [B or 1, Hkv, T, Dv]. states is int8 [B or 1, Hq or 1, row blocks,
    key blocks], the states of a block mask. `captured` holds the captured arrays.
    """
    attention = FlexOperands(node, FlexAttentionSettings.from_json(node.attr("settings")), q, k, v, states, captured)
    problem = dataclasses.replace(attention.problem, lse=node.has_output(1))
    results = call_attention_kernel(node, problem, attention.arguments, attention.k.shape[2])
    return results["y"], results.get("lse")


class FlexOperands:
    """The attention record of a node, and the kernel's arguments by parameter name.

    q, k and v have one batch size. The captured arrays are read after their checks (`reads`).
    """

    def __init__(
        self,
        node: Node,
        settings: FlexAttentionSettings,
        q: Value,
        k: Value,
        v: Value,
        states: Value | None,
        captured: Sequence[Value],
    ) -> None:
        self.q, self.k, self.v = q, k, v = _check_operands(node, q, k, v)
        heads = (
            require_static(node, "number of heads of q", q.shape[1]),
            require_static(node, "number of heads of k", k.shape[1]),
        )
        extents = {"b": q.shape[0], "h": heads[0], "i": q.shape[2], "j": k.shape[2]}
        arrays = {name: as_table(node, value) for name, value in zip(settings.captures, captured)}
        self.reads = reads = CapturedReads(node, arrays, extents)
        mask = None if settings.mask is None else reads.guard(settings.mask)
        score = None if settings.score is None else reads.guard(settings.score)
        if states is not None and settings.block_size is not None:
            blocks = _check_block_states(node, states, extents, settings.block_size)
            mask = _apply_block_states(mask, blocks, settings.block_size)
            reads.arrays["block_states"] = blocks
        self.arguments: dict[str, Any] = {"q": q, "k": k, "v": v}
        formulas: dict[str, Formula] = {}
        for field, expr, prefix in (("mask", mask, ""), ("score", score, SCORE_MOD_PREFIX)):
            if expr is not None:
                expr, names = rename_parameters(expr, prefix)
                formulas[field] = Formula(expr)
                for new, old in names.items():
                    self.arguments[new] = reads.arrays[old] if old in reads.arrays else reads.sizes[old]
        self.problem = AttentionProblem(
            batch=static(q.shape[0]),
            q_len=static(q.shape[2]),
            kv_len=static(k.shape[2]),
            q_heads=heads[0],
            kv_heads=heads[1],
            head_dim=require_static(node, "head size of q", q.shape[3]),
            v_head_dim=require_static(node, "head size of v", v.shape[3]),
            dtype=q.dtype,
            v_dtype=q.dtype,
            acc_dtype="float64" if q.dtype == "float64" else "float32",
            scale=settings.scale,
            score=formulas.get("score"),
            mask=formulas.get("mask"),
        )


def _check_operands(node: Node, q: Value, k: Value, v: Value) -> tuple[Value, Value, Value]:
    """Return the operands with one batch size, after checking sizes that must agree."""
    for name, value in zip("qkv", (q, k, v)):
        require_rank(node, name, value, "[batch, heads, length, head size]")
        require_same_dtype(node, name, value, "q", q)
    keys = unify_sizes(node, "number of keys", k=k.shape[2], v=v.shape[2])
    kv_heads = unify_sizes(node, "number of heads", k=k.shape[1], v=v.shape[1])
    size = unify_sizes(node, "head size", q=q.shape[3], k=k.shape[3])
    batch, kv_batch = q.shape[0], unify_sizes(node, "number of batches", k=k.shape[0], v=v.shape[0])
    is_shared = is_one(kv_batch) and not is_one(batch)

    def broadcast(value: Value, width: Size) -> Value:
        value = assert_shape(node, value, (1 if is_shared else batch, kv_heads, keys, width))
        if not is_shared:
            return value
        return node.emit(relax.op.broadcast_to(node.tensor(value), node.shape_expr((batch, *value.shape[1:]))))

    return assert_shape(node, q, (*q.shape[:3], size)), broadcast(k, size), broadcast(v, v.shape[3])


def _check_block_states(node: Node, states: Value, extents: dict[str, Size], block_size: tuple[int, int]) -> Value:
    """Return the states, checked to have one element for each block of rows and keys."""
    expected = [extents["b"], extents["h"], *(_ceil_div(extents[axis], size) for axis, size in zip("ij", block_size))]
    leading = [1 if isinstance(size, int) and size == 1 else full for size, full in zip(states.shape, expected)]
    return assert_shape(node, states, (*leading[:2], *(node.simplify(size) for size in expected[2:])))


def _ceil_div(size: Size, divisor: int) -> Size:
    return (size + divisor - 1) // divisor


def _apply_block_states(mask: Expr | None, states: Value, block_size: tuple[int, int]) -> Expr:
    """Return the mask in partial blocks, and true in all of a full block."""
    index = [
        make_number(0, "int64") if states.shape[k] == 1 else Expr("index", "int64", value="bh"[k]) for k in range(2)
    ]
    for axis, size in zip("ij", block_size):
        index.append(Expr("floordiv", "int64", (Expr("index", "int64", value=axis), make_number(size, "int64"))))
    state = Expr("load", "int8", tuple(index), "block_states")
    full, partial = (Expr("eq", "bool", (state, make_number(code, "int8"))) for code in (FULL, PARTIAL))
    inside = partial if mask is None else Expr("and", "bool", (partial, mask))
    return canonicalize(Expr("or", "bool", (full, inside)))
