"""The inputs of ai.onnx Attention: which are legal together, and the sizes on which they agree.

Equal sizes are proved or recorded here. The operator asserts the shapes that follow from them.
"""

from __future__ import annotations

from dataclasses import dataclass

from ...importing.node import Node
from ...importing.values import Shape, Size, Value
from ..helpers.compute import number, unify_sizes
from ..helpers.requirements import require_dtype, require_head_groups, require_rank, require_same_dtype, require_tensor

_FLOATS = ("float32", "float16", "bfloat16", "float64")


def check_attention_inputs(
    node: Node,
    q: Value,
    k: Value,
    v: Value,
    past_key: Value | None,
    past_value: Value | None,
    nonpad: Value | None,
) -> None:
    """Check ranks, types, and which inputs go together."""
    if not q.rank == k.rank == v.rank or q.rank not in (3, 4):
        raise node.error(
            "attention.rank_unsupported",
            f"inputs Q, K and V have ranks {q.rank}, {k.rank} and {v.rank}.",
            "Make all 3-D or all 4-D.",
        )
    for name, value, like, other in (
        ("K", k, q, "Q"),
        ("past_key", past_key, q, "Q"),
        ("past_value", past_value, v, "V"),
    ):
        require_same_dtype(node, name, value, other, like, code="attention.dtype_mismatch")
    for name, value in (("Q", q), ("V", v)):
        require_dtype(node, name, value, _FLOATS, code="attention.dtype_unsupported")
    for name, value in (("past_key", past_key), ("past_value", past_value)):
        require_rank(node, name, value, "[batch, heads, length, head size]", code="attention.past_rank_unsupported")
    if node.version >= 25 and node.has_output(1) != node.has_output(2):
        present, missing = ("present_key", "present_value") if node.has_output(1) else ("present_value", "present_key")
        raise node.error(
            "attention.present_incomplete",
            f"output {present} is given without {missing}.",
            "From opset 25 on, name both or none.",
        )
    if (past_key is None) != (past_value is None):
        present, missing = ("past_value", "past_key") if past_key is None else ("past_key", "past_value")
        raise node.error(
            "attention.past_incomplete", f"input {present} is given without {missing}.", "Give both or none."
        )
    if nonpad is not None:
        _check_nonpad(node, nonpad, past_key)


def _check_nonpad(node: Node, nonpad: Value, past_key: Value | None) -> None:
    """Check the type and rank of nonpad_kv_seqlen, and that no cache goes with it."""
    if node.version < 24:
        raise node.error(
            "attention.nonpad_needs_newer_opset",
            "input nonpad_kv_seqlen does not exist before opset 24.",
            "Import opset 24 or later.",
        )
    if past_key is not None:
        raise node.error(
            "attention.nonpad_with_past",
            "inputs nonpad_kv_seqlen and past_key exclude each other.",
            "Remove one of them.",
        )
    if node.has_output(1) or node.has_output(2):
        text = "input nonpad_kv_seqlen excludes the outputs present_key and present_value."
        raise node.error("attention.nonpad_with_present", text, "Remove them.")
    require_tensor(node, "nonpad_kv_seqlen", nonpad, "int64", "[batch]", code="attention.nonpad_unsupported")


@dataclass(frozen=True)
class AttentionSizes:
    """The sizes on which the inputs agree. past is 0 without past_key; new_len is the length of K and V."""

    batch: Size
    q_heads: int
    kv_heads: int
    q_len: Size
    new_len: Size
    past: Size
    head_dim: int
    v_head_dim: int


def read_attention_sizes(
    node: Node, q: Value, k: Value, v: Value, past_key: Value | None, past_value: Value | None
) -> AttentionSizes:
    """Return the sizes, after checking that the inputs agree."""
    q_heads, kv_heads = _read_heads(node, q, k, v)
    dims = {
        "Q": _read_logical_shape(node, "Q", q, q_heads),
        "K": _read_logical_shape(node, "K", k, kv_heads),
        "V": _read_logical_shape(node, "V", v, kv_heads),
    }
    if past_key is not None and past_value is not None:
        dims |= {"past_key": past_key.shape, "past_value": past_value.shape}

    def require_same(quantity: str, axis: int, *names: str) -> Size:
        return unify_sizes(node, quantity, **{name: dims[name][axis] for name in names if name in dims})

    require_same("number of heads", 1, "K", "V", "past_key", "past_value")
    return AttentionSizes(
        batch=require_same("batch size", 0, *dims),
        q_heads=q_heads,
        kv_heads=kv_heads,
        q_len=dims["Q"][2],
        new_len=require_same("sequence length", 2, "K", "V"),
        past=require_same("sequence length", 2, "past_key", "past_value") if past_key is not None else 0,
        head_dim=number(node, "head size of Q and K", require_same("head size", 3, "Q", "K", "past_key")),
        v_head_dim=number(node, "head size of V", require_same("head size", 3, "V", "past_value")),
    )


def _read_heads(node: Node, q: Value, k: Value, v: Value) -> tuple[int, int]:
    """Return query and key/value heads: attributes for 3-D inputs, dimensions for 4-D ones."""
    names = ("q_num_heads", "kv_num_heads")
    stated = [node.attr(name, None) for name in names]
    if q.rank == 3:
        for name, heads in zip(names, stated):
            if heads is None or heads < 1:
                problem = "is missing" if heads is None else f"is {heads}"
                raise node.error(
                    "attention.head_count_required",
                    f"attribute {name} {problem}.",
                    "Set it to the number of heads, which inputs of rank 3 need.",
                )
        heads = (stated[0], stated[1])
    else:
        shared = unify_sizes(node, "number of heads", K=k.shape[1], V=v.shape[1])
        heads = number(node, "number of heads of Q", q.shape[1]), number(node, "number of heads of K", shared)
        for name, attribute, actual in zip(names, stated, heads):
            if attribute is not None and (node.version >= 25 or attribute != actual):
                raise node.error(
                    "attention.head_count_mismatch",
                    f"attribute {name} is {attribute}; 4-D inputs have {actual} heads.",
                    "Remove it.",
                )
            if attribute is not None:
                node.warn(f"attribute {name} has no meaning for 4-D inputs and is ignored.")
    require_head_groups(node, heads[0], heads[1], code="attention.heads_not_divisible")
    return heads


def _read_logical_shape(node: Node, name: str, value: Value, heads: int) -> Shape:
    """Return the dimensions of the input as (batch, heads, length, head size)."""
    if value.rank == 4:
        return value.shape
    batch, length, width = value.shape
    width = number(node, f"last dimension of {name}", width)
    if width % heads:
        attribute = "q_num_heads" if name == "Q" else "kv_num_heads"
        raise node.error(
            "attention.width_not_divisible",
            f"attribute {attribute} is {heads}, and the last dimension of {name} is {width}.",
            f"Choose {attribute} as a divisor of {width}.",
        )
    return batch, heads, length, width // heads
