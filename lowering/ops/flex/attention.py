"""FlexAttention: softmax(score(scale * Q K^T) where visible) V (PyTorch's torch.nn.attention.flex_attention).

A row that sees no key gives 0, and -inf as lse. Query head h reads key/value head h // (Hq / Hkv).
"""

from __future__ import annotations

from typing import Any

from tvm import relax

from ...attention.expr.node import Expr, canonical, number, renamed
from ...attention.flex_node import DOMAIN, FULL, PARTIAL, Settings
from ...attention.formula import CHANGE, Formula
from ...importing.compute import agreed
from ...importing.compute import number as known
from ...importing.node import Node
from ...importing.values import Size, Value
from .. import op
from ..asserted import asserted
from ..attend import attend
from .reads import Reads, table


@op("FlexAttention", since=1, domain=DOMAIN)
def flex_attention(
    node: Node, q: Value, k: Value, v: Value, states: Value | None = None, *captured: Value
) -> tuple[Value | None, ...]:
    """y [B, Hq, S, Dv] and lse [B, Hq, S] of q [B, Hq, S, D], k [B or 1, Hkv, T, D], v [B or 1, Hkv, T, Dv], the states
    int8 [B or 1, Hq or 1, row blocks, key blocks] of a block mask, and the captured arrays."""
    settings = Settings.from_json(node.attr("settings"))
    q, k, v = _checked(node, q, k, v)
    heads = known(node, "number of heads of q", q.shape[1]), known(node, "number of heads of k", k.shape[1])
    ends = {"b": q.shape[0], "h": heads[0], "i": q.shape[2], "j": k.shape[2]}
    reads = Reads(node, {name: table(node, value) for name, value in zip(settings.captures, captured)}, ends)
    mask = None if settings.mask is None else reads.safe(settings.mask)
    score = None if settings.score is None else reads.safe(settings.score)
    if states is not None and settings.block_size is not None:
        blocks = _blocks(node, states, ends, settings.block_size)
        mask = _in_blocks(mask, blocks, settings.block_size)
        reads.arrays["block_states"] = blocks
    given: dict[str, Any] = {}
    fields: dict[str, Any] = {}
    for field, expr, prefix in (("mask", mask, ""), ("score", score, CHANGE)):
        if expr is not None:
            expr, names = renamed(expr, prefix)
            fields[field] = Formula(expr)
            given |= {new: reads.arrays[old] if old in reads.arrays else reads.sizes[old] for new, old in names.items()}
    results = attend(
        node,
        {"q": q, "k": k, "v": v, **given},
        heads=heads,
        acc_dtype="float64" if q.dtype == "float64" else "float32",
        scale=settings.scale,
        lse=node.wants(1),
        **fields,
    )
    return results["y"], results.get("lse")


def _checked(node: Node, q: Value, k: Value, v: Value) -> tuple[Value, Value, Value]:
    """The operands, of one batch size and what else must be the same."""
    for name, value in zip("qkv", (q, k, v)):
        if value.rank != 4:
            raise node.error(f"{name} has rank {value.rank}.", "Make it [batch, heads, length, head size].")
        if value.dtype != q.dtype:
            raise node.error(f"{name} is {value.dtype}, and q is {q.dtype}.", "Give them one type.")
    keys = agreed(node, "number of keys", k=k.shape[2], v=v.shape[2])
    kv_heads = agreed(node, "number of heads", k=k.shape[1], v=v.shape[1])
    size = agreed(node, "head size", q=q.shape[3], k=k.shape[3])
    batch = q.shape[0]

    def shaped(value: Value, width: Size) -> Value:
        alone = isinstance(value.shape[0], int) and value.shape[0] == 1 and not (isinstance(batch, int) and batch == 1)
        value = asserted(node, value, (1 if alone else batch, kv_heads, keys, width))
        if not alone:
            return value
        return node.emit(relax.op.broadcast_to(node.tensor(value), node.shape_expr((batch, *value.shape[1:]))))

    return asserted(node, q, (*q.shape[:3], size)), shaped(k, size), shaped(v, v.shape[3])


def _blocks(node: Node, states: Value, ends: dict[str, Size], block_size: tuple[int, int]) -> Value:
    """The states, one for each block of rows and keys."""
    wanted = [ends["b"], ends["h"], *(_ceil_div(ends[axis], size) for axis, size in zip("ij", block_size))]
    leading = [1 if isinstance(size, int) and size == 1 else full for size, full in zip(states.shape, wanted)]
    return asserted(node, states, (*leading[:2], *(node.simplify(size) for size in wanted[2:])))


def _ceil_div(size: Size, by: int) -> Size:
    return (size + by - 1) // by


def _in_blocks(mask: Expr | None, states: Value, block_size: tuple[int, int]) -> Expr:
    """The mask where the block is partial, all of it where that is full."""
    at = [number(0, "int64") if states.shape[k] == 1 else Expr("index", "int64", value="bh"[k]) for k in range(2)]
    for axis, size in zip("ij", block_size):
        at.append(Expr("floordiv", "int64", (Expr("index", "int64", value=axis), number(size, "int64"))))
    state = Expr("load", "int8", tuple(at), "block_states")
    full, partial = (Expr("eq", "bool", (state, number(s, "int8"))) for s in (FULL, PARTIAL))
    inside = partial if mask is None else Expr("and", "bool", (partial, mask))
    return canonical(Expr("or", "bool", (full, inside)))
