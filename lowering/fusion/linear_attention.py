"""Linear attention, written out as a Scan over tokens: one LinearAttention of com.microsoft."""

from __future__ import annotations

import onnx_ir as ir

from .matching import Rewrite, Size, attribute, dims, integers, numbers, only_reader, operand, pairs, producer
from .node_pass import DOMAIN, NodePass
from .sizes import InferSizesPass

_TURN = (1, 0, 2, 3)  # [T, B, H, D] to [B, T, H, D], and back
_TYPES = {ir.DataType.FLOAT, ir.DataType.FLOAT16, ir.DataType.BFLOAT16}
_RULES = {(False, False): "linear", (True, False): "gated", (False, True): "delta", (True, True): "gated_delta"}
"""By whether there are decays and betas."""


class FuseLinearAttentionPass(NodePass):
    """Makes one LinearAttention of a Scan along the first axis, whose body takes a state S [B, H, D, Dv] one token on.

        kept = S                            1. as it is,  or 2. Mul(S, Exp(column of decay))
        u = v                               3. as it is,  or 4. (v - row of k kept) * beta
        S = kept + column of k row of u
        y = row of q S

    A row is an Unsqueeze at -2 or, of what is computed, a Squeeze there, a column an Unsqueeze at -1. Heads that are
    shared have been repeated before. Another direction, and results that are used otherwise, refuse the match.
    """

    since = 13
    operators = ("Scan",)
    domain = DOMAIN

    def call(self, model: ir.Model) -> ir.passes.PassResult:
        """What a Scan gives has no known size; what LinearAttention gives has."""
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
    rows = {name: given for name, value in step.items() if (given := inputs[value]) is not None}
    state, (present, y) = operand(scan, 0), scan.outputs
    sizes = numbers(dims(state)[1:])
    if sizes is None or len(sizes) != 3 or not _fit(rows, state, sizes):
        return False
    heads, _, v_size = sizes
    new = Rewrite(scan)
    flat = {name: _by_token(new, value) for name, value in rows.items()}
    inputs_of_node = [flat["q"], flat["k"], flat["v"], state, flat.get("decay"), flat.get("beta")]
    rule = _RULES["decay" in rows, "beta" in rows]
    attributes: dict[str, int | float | str] = {
        "q_num_heads": heads,
        "kv_num_heads": heads,
        "update_rule": rule,
        "scale": 1.0,
    }
    fused = ir.node(
        "LinearAttention", inputs_of_node, attributes, domain=DOMAIN, num_outputs=2,
        name=f"{new.origin}/LinearAttention",
    )  # fmt: skip
    new.nodes.append(fused)
    front = dims(flat["q"])[:2]
    for output, alike, shape in zip(fused.outputs, (flat["q"], state), ([*front, heads * v_size], dims(state))):
        output.type, output.shape = alike.type, ir.Shape(shape)
    by_head = new.emit("Reshape", [fused.outputs[0], new.integers(0, 0, heads, v_size)], shape=[*front, heads, v_size])
    present.replace_all_uses_with(fused.outputs[1], replace_graph_outputs=True)
    fused.outputs[1].name, present.name = present.name, None
    turned = only_reader(y, "Transpose")
    if turned is not None and tuple(attribute(turned, "perm", ())) == _TURN:
        new.replace([turned, scan], turned.outputs[0], by_head)
    else:
        new.replace([scan], y, new.transpose(by_head, _TURN))
    return True


def _is_forward(scan: ir.Node) -> bool:
    """Whether there is one state, and all scans go along first axes, from the first token on."""
    kinds = ("scan_input_directions", "scan_input_axes", "scan_output_directions", "scan_output_axes")
    return attribute(scan, "num_scan_inputs", 0) == len(scan.inputs) - 1 and not any(
        any(attribute(scan, name, ())) for name in kinds
    )


def _read_step(body: ir.Graph) -> dict[str, ir.Value] | None:
    """The values of the body that are q, k, v, and where they are there decay and beta."""
    before, (after, y) = body.inputs[0], body.outputs
    seen, add = producer(_squeezed(y), "MatMul"), producer(after, "Add")
    if seen is None or add is None or operand(seen, 1) is not after:
        return None
    q = _unsqueezed(operand(seen, 0), -2)
    for kept, update in pairs(add):
        outer = producer(update, "MatMul")
        if outer is None or q is None:
            continue
        k, u = _unsqueezed(operand(outer, 0), -1), _unsqueezed(operand(outer, 1), -2)
        decay, values = _read_decay(kept, before), None if k is None or u is None else _read_update(u, k, kept)
        if k is not None and decay is not None and values is not None:
            return {"q": q, "k": k, **decay, **values}
    return None


def _read_decay(kept: ir.Value, before: ir.Value) -> dict[str, ir.Value] | None:
    """What the state is multiplied by, if anything; None where `kept` is not made of it so."""
    if kept is before:
        return {}
    multiply = producer(kept, "Mul")
    for state, factor in pairs(multiply) if multiply is not None else ():
        exp = producer(factor, "Exp")
        decay = _unsqueezed(operand(exp, 0), -1) if exp is not None else None
        if state is before and decay is not None:
            return {"decay": decay}
    return None


def _read_update(u: ir.Value, k: ir.Value, kept: ir.Value) -> dict[str, ir.Value] | None:
    """v, and beta by the delta rule; None where u is not made of them so."""
    if u.producer() is None:
        return {"v": u}
    multiply = producer(u, "Mul")
    for difference, factor in pairs(multiply) if multiply is not None else ():
        subtract, beta = producer(difference, "Sub"), _unsqueezed(factor, -1)
        recalled = producer(_squeezed(operand(subtract, 1)), "MatMul") if subtract is not None else None
        if subtract is None or beta is None or recalled is None or operand(recalled, 1) is not kept:
            continue
        if _unsqueezed(operand(recalled, 0), -2) is k:
            return {"v": operand(subtract, 0), "beta": beta}
    return None


def _unsqueezed(value: ir.Value, axis: int) -> ir.Value | None:
    """What gets an axis of 1 there, from the back of 4."""
    node = producer(value, "Unsqueeze")
    return None if node is None or integers(node, 1, "axes") not in ([axis], [axis + 4]) else operand(node, 0)


def _squeezed(value: ir.Value) -> ir.Value | None:
    """What loses its axis before the last one, of 4."""
    node = producer(value, "Squeeze")
    return None if node is None or integers(node, 1, "axes") not in ([-2], [2]) else operand(node, 0)


def _fit(rows: dict[str, ir.Value], state: ir.Value, sizes: list[int]) -> bool:
    """Whether rows [T, B, ...] have the heads and sizes of the state, so that nothing is broadcast but decays and
    betas, and a type that LinearAttention takes."""
    heads, size, v_size = sizes
    legal: dict[str, list[tuple[Size, ...]]] = {
        "q": [(heads, size)], "k": [(heads, size)], "v": [(heads, v_size)],
        "decay": [(heads, 1), (heads, size)], "beta": [(heads,), (1,)],
    }  # fmt: skip
    fronts, types = {dims(value)[:2] for value in rows.values()}, {value.dtype for value in rows.values()}
    are_alike = len(fronts) == len(types) == 1 and {*types, state.dtype} <= _TYPES
    return are_alike and all(dims(value)[2:] in legal[name] for name, value in rows.items())


def _by_token(new: Rewrite, value: ir.Value) -> ir.Value:
    """Rows [T, B, ...] as [B, T, width]: what they were before they were turned, if they were."""
    rank = len(dims(value))
    base, perm = value, _TURN[:rank]
    while (turn := producer(base, "Transpose")) is not None:
        inner = attribute(turn, "perm", tuple(reversed(range(rank))))
        base, perm = operand(turn, 0), tuple(inner[axis] for axis in perm)
    rows = new.transpose(base, perm)
    if rank == 3:
        return rows
    sizes = dims(rows)
    assert isinstance(sizes[2], int) and isinstance(sizes[3], int)
    width = sizes[2] * sizes[3]
    flat = [*sizes[:2], width]
    split = producer(rows, "Reshape")
    if split is not None and list(dims(operand(split, 0))) == flat:
        return operand(split, 0)
    return new.emit("Reshape", [rows, new.integers(0, 0, width)], shape=flat)
