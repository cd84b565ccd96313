"""Fusion of linear attention, written as a Scan over tokens, into LinearAttention of com.microsoft."""

from __future__ import annotations

import onnx_ir as ir

from ...graph.rewriting.matching import (
    Rewrite,
    Size,
    attribute,
    dims,
    only_reader,
    operand,
    operand_orders,
    producer,
    read_integers,
    read_static_sizes,
    replace_value,
)
from ...graph.rewriting.sizes import InferSizesPass
from ..node_pass import MICROSOFT_DOMAIN, NodePass

_TOKENS_PERM = (1, 0, 2, 3)  # permutation of [T, B, H, D] to [B, T, H, D], and back
_TYPES = {ir.DataType.FLOAT, ir.DataType.FLOAT16, ir.DataType.BFLOAT16}
_RULES = {(False, False): "linear", (True, False): "gated", (False, True): "delta", (True, True): "gated_delta"}
"""Update rules, by whether there are decays and whether there are betas."""


class FuseLinearAttentionPass(NodePass):
    """Fusion of a Scan along the first axis into one LinearAttention.

    The body advances a state S [B, H, D, Dv] by one token:

        decayed = S                            1. as it is,  or 2. Mul(S, Exp(column of decay))
        u = v                                  3. as it is,  or 4. (v - row of k decayed) * beta
        S = decayed + column of k row of u
        y = row of q S

    A row is an Unsqueeze at -2 or, for a computed row, a Squeeze at -2; a column is an Unsqueeze at -1. Shared heads
    have been repeated before. Another direction, and other uses of the results, reject the match.
    """

    since = 13
    operators = ("Scan",)
    domain = MICROSOFT_DOMAIN

    def call(self, model: ir.Model) -> ir.passes.PassResult:
        """Run the pass, and infer sizes again after a match.

        The outputs of a Scan have no static sizes; those of LinearAttention have.
        """
        result = super().call(model)
        if result.modified:
            InferSizesPass()(model)
        return result

    def rewrite(self, node: ir.Node) -> bool:
        return _try_fuse(node)


def _try_fuse(scan: ir.Node) -> bool:
    body = scan.attributes["body"].value
    assert isinstance(body, ir.Graph)
    step = _read_step(body) if len(scan.outputs) == 2 and len(body.outputs) == 2 and _is_forward(scan) else None
    inputs = dict(zip(body.inputs, scan.inputs))
    if step is None or any(value not in inputs or value is body.inputs[0] for value in step.values()):
        return False
    rows = {name: argument for name, value in step.items() if (argument := inputs[value]) is not None}
    state, (present, y) = operand(scan, 0), scan.outputs
    sizes = read_static_sizes(dims(state)[1:])
    if sizes is None or len(sizes) != 3 or not _has_legal_shapes(rows, state, sizes):
        return False
    heads, _, v_size = sizes
    new = Rewrite(scan)
    flat = {name: _emit_flat_rows(new, value) for name, value in rows.items()}
    inputs_of_node = [flat["q"], flat["k"], flat["v"], state, flat.get("decay"), flat.get("beta")]
    rule = _RULES["decay" in rows, "beta" in rows]
    attributes: dict[str, int | float | str] = {
        "q_num_heads": heads,
        "kv_num_heads": heads,
        "update_rule": rule,
        "scale": 1.0,
    }
    likes = [flat["q"], state]
    by_row, updated = new.emit_node("LinearAttention", inputs_of_node, attributes, likes, domain=MICROSOFT_DOMAIN)
    leading = dims(flat["q"])[:2]
    by_row.shape = ir.Shape([*leading, heads * v_size])
    by_head = new.emit("Reshape", [by_row, new.emit_integers(0, 0, heads, v_size)], shape=[*leading, heads, v_size])
    replace_value(present, updated)
    transpose = only_reader(y, "Transpose")
    if transpose is not None and tuple(attribute(transpose, "perm", ())) == _TOKENS_PERM:
        new.replace([transpose, scan], transpose.outputs[0], by_head)
    else:
        new.replace([scan], y, new.emit_transpose(by_head, _TOKENS_PERM))
    return True


def _is_forward(scan: ir.Node) -> bool:
    """Return whether the Scan has one state and scans only first axes, from the first token on."""
    kinds = ("scan_input_directions", "scan_input_axes", "scan_output_directions", "scan_output_axes")
    return attribute(scan, "num_scan_inputs", 0) == len(scan.inputs) - 1 and not any(
        any(attribute(scan, name, ())) for name in kinds
    )


def _read_step(body: ir.Graph) -> dict[str, ir.Value] | None:
    """Return the values of the body that are q, k, v and, if present, decay and beta."""
    before, (after, y) = body.inputs[0], body.outputs
    read, add = producer(_before_squeeze(y), "MatMul"), producer(after, "Add")
    if read is None or add is None or operand(read, 1) is not after:
        return None
    q = _before_unsqueeze(operand(read, 0), -2)
    for decayed, update in operand_orders(add):
        outer = producer(update, "MatMul")
        if outer is None or q is None:
            continue
        k, u = _before_unsqueeze(operand(outer, 0), -1), _before_unsqueeze(operand(outer, 1), -2)
        decay, values = _read_decay(decayed, before), None if k is None or u is None else _read_update(u, k, decayed)
        if k is not None and decay is not None and values is not None:
            return {"q": q, "k": k, **decay, **values}
    return None


def _read_decay(decayed: ir.Value, before: ir.Value) -> dict[str, ir.Value] | None:
    """Return the factor of the state, {} if there is none; None if `decayed` is not such a product."""
    if decayed is before:
        return {}
    multiply = producer(decayed, "Mul")
    for state, factor in operand_orders(multiply) if multiply is not None else ():
        exp = producer(factor, "Exp")
        decay = _before_unsqueeze(operand(exp, 0), -1) if exp is not None else None
        if state is before and decay is not None:
            return {"decay": decay}
    return None


def _read_update(u: ir.Value, k: ir.Value, decayed: ir.Value) -> dict[str, ir.Value] | None:
    """Return v and, by the delta rule, beta; None if u is not computed from them in this way."""
    if u.producer() is None:
        return {"v": u}
    multiply = producer(u, "Mul")
    for difference, factor in operand_orders(multiply) if multiply is not None else ():
        subtract, beta = producer(difference, "Sub"), _before_unsqueeze(factor, -1)
        recalled = producer(_before_squeeze(operand(subtract, 1)), "MatMul") if subtract is not None else None
        if subtract is None or beta is None or recalled is None or operand(recalled, 1) is not decayed:
            continue
        if _before_unsqueeze(operand(recalled, 0), -2) is k:
            return {"v": operand(subtract, 0), "beta": beta}
    return None


def _before_unsqueeze(value: ir.Value, axis: int) -> ir.Value | None:
    """Return the input of an Unsqueeze at that axis, counted from the back of 4."""
    node = producer(value, "Unsqueeze")
    return None if node is None or read_integers(node, 1, "axes") not in ([axis], [axis + 4]) else operand(node, 0)


def _before_squeeze(value: ir.Value) -> ir.Value | None:
    """Return the input of a Squeeze of the axis before the last one, of 4."""
    node = producer(value, "Squeeze")
    return None if node is None or read_integers(node, 1, "axes") not in ([-2], [2]) else operand(node, 0)


def _has_legal_shapes(rows: dict[str, ir.Value], state: ir.Value, sizes: list[int]) -> bool:
    """Return whether rows [T, B, ...] have the heads and sizes of the state, and a supported type.

    Nothing but decays and betas is then broadcast.
    """
    heads, size, v_size = sizes
    legal: dict[str, list[tuple[Size, ...]]] = {
        "q": [(heads, size)], "k": [(heads, size)], "v": [(heads, v_size)],
        "decay": [(heads, 1), (heads, size)], "beta": [(heads,), (1,)],
    }  # fmt: skip
    leading, types = {dims(value)[:2] for value in rows.values()}, {value.dtype for value in rows.values()}
    are_alike = len(leading) == len(types) == 1 and {*types, state.dtype} <= _TYPES
    return are_alike and all(dims(value)[2:] in legal[name] for name, value in rows.items())


def _emit_flat_rows(new: Rewrite, value: ir.Value) -> ir.Value:
    """Return rows [T, B, ...] as [B, T, width], reusing the source of earlier Transposes and Reshapes."""
    rank = len(dims(value))
    base, perm = value, _TOKENS_PERM[:rank]
    while (transpose := producer(base, "Transpose")) is not None:
        inner = attribute(transpose, "perm", tuple(reversed(range(rank))))
        base, perm = operand(transpose, 0), tuple(inner[axis] for axis in perm)
    rows = new.emit_transpose(base, perm)
    if rank == 3:
        return rows
    sizes = dims(rows)
    assert isinstance(sizes[2], int) and isinstance(sizes[3], int)
    width = sizes[2] * sizes[3]
    flat = [*sizes[:2], width]
    split = producer(rows, "Reshape")
    if split is not None and list(dims(operand(split, 0))) == flat:
        return operand(split, 0)
    return new.emit("Reshape", [rows, new.emit_integers(0, 0, width)], shape=flat)
