"""Fusion of MatMul, Softmax, MatMul into one Attention node."""

from __future__ import annotations

import math
from dataclasses import dataclass

import onnx_ir as ir

from ...graph.rewriting.attention_node import emit_attention
from ...graph.rewriting.matching import (
    Rewrite,
    Size,
    attribute,
    can_broadcast,
    dims,
    is_closed,
    is_op,
    is_static,
    operand,
    operand_orders,
    producer,
    read_number,
)
from ...graph.rewriting.opset import ATTENTION_OPSET
from ..node_pass import NodePass
from .attention_groups import drop_group_axis, flatten_queries, read_groups, split_queries
from .attention_keys import Heads, emit_keys, restore_heads
from .attention_scores import AttentionScores, find_scores
from .attention_sinks import AttentionSink, find_sink, find_subtracted_maximum, is_sink_removal

_PRECISIONS = (ir.DataType.FLOAT16, ir.DataType.BFLOAT16, ir.DataType.FLOAT, ir.DataType.DOUBLE)


class FuseAttentionPass(NodePass):
    """Fusion of softmax(Q K^T) V in primitive operators into one ai.onnx Attention.

    Q is [B, Hq, S, D], V is [B, Hkv, T, Dv] with Hkv = Hq or 1; or all have three dimensions, [N, S, D], or five.

    1. Scale: Mul or Div by a constant, of the scores, of Q, of K or of several of them.
    2. K: Transpose by any permutation, the Reshape, Transpose, Reshape that PyTorch writes, or K that already is [B, H,
       D, T], which gets a Transpose. A Concat of past and new keys stays as the input.
    3. Softmax along the last axis, also in a wider type between two Casts.
    4. Soft cap: c Tanh(x / c), with any scale before it, and no mask.
    5. Additive masks after the cap, one or several, on either side of the Add, also multiplied by a later scale.
    6. Where masks, in both orders: a fill of -inf becomes a bool mask. A finite one becomes the additive mask
       Where(condition, 0, fill) if the fill is so low that it dominates every score; -10000 is not.
    7. Max(scores + mask, lowest number): the mask is clamped instead.
    8. NaN guard: Where(IsNaN(p), 0, p). Dropout and Identity have been removed before.
    9. Three dimensions: Reshape of the scores to [B, H, S, T] and back determines B and H; without it, N is the batch
       of one head. If they are not reshaped back, V has four dimensions and Q and K have three. A float mask in a type
       wider than Q's makes the whole node that wide.
    10. Sinks, and the subtracted largest score: attention_sinks.py numbers the forms. With sinks the node is the
        compiler's own Attention.
    11. Five dimensions: Q [B, Hkv, G, S, D], and K and V with an axis of size 1 instead of G.

    The match is rejected if another node reads a score or probability, or if it is an output. It is also rejected for
    sizes that would broadcast in any other way, a mask after the softmax, and heads or head sizes that are not static.
    A row whose keys are all masked by -inf is NaN before and 0 after, which is the only change of meaning.
    """

    since = ATTENTION_OPSET
    operators = ("MatMul",)

    def rewrite(self, node: ir.Node) -> bool:
        return _try_fuse(node)


def _try_fuse(matmul: ir.Node) -> bool:
    softmax_nodes = _read_softmax_nodes(matmul)
    if softmax_nodes is None:
        return False
    softmax_input, subtracted = find_subtracted_maximum(operand(softmax_nodes[-1], 0))
    sink, scores = _read_sink_and_scores(softmax_input, softmax_nodes)
    if scores is None:
        return False
    nodes = [matmul, *softmax_nodes, *subtracted, *(sink.nodes if sink is not None else ()), *scores.nodes]
    if not is_closed(set(nodes), matmul.outputs[0]):
        return False
    q, q_factor = _remove_scale(operand(scores.matmul, 0))
    kt, k_factor = _remove_scale(operand(scores.matmul, 1))
    views = [dims(node.outputs[0]) for node in (*softmax_nodes, *scores.nodes) if is_op(node, "Reshape")]
    scale = scores.scale * q_factor * k_factor
    attention = _AttentionMatch(matmul, softmax_nodes[-1], q, kt, operand(matmul, 1), scores, sink, scale)
    if (
        not attention.has_matching_sizes(views)
        or not attention.has_matching_types()
        or not 0 <= attention.scale < math.inf
    ):
        return False
    attention.replace(nodes)
    return True


def _read_sink_and_scores(
    softmax_input: ir.Value, softmax_nodes: list[ir.Node]
) -> tuple[AttentionSink | None, AttentionScores | None]:
    """Match case 10: return the input of the softmax as a sink, if any, and scores.

    Scores are None if a later node removes other columns.
    """
    slices = [node for node in softmax_nodes if is_op(node, "Slice", "Split")]
    if not slices:
        return None, find_scores(softmax_input)
    sink = find_sink(softmax_input)
    if sink is None or len(slices) > 1 or not is_sink_removal(slices[0], sink):
        return None, None
    return sink, find_scores(sink.scores, sink.scale, sink.masks)


def _read_softmax_nodes(matmul: ir.Node) -> list[ir.Node] | None:
    """Match cases 3, 8 and 10, and the Reshape of case 9.

    The nodes lead from the second matmul back to the Softmax, which is the last.
    """
    value, nodes = operand(matmul, 0), []
    while (node := producer(value, "Cast", "Reshape", "Slice", "Split", "Where", "Softmax")) is not None:
        nodes.append(node)
        if is_op(node, "Softmax"):
            rank = len(dims(operand(node, 0)))
            return nodes if rank and attribute(node, "axis", -1) % rank == rank - 1 else None
        value = operand(node, 0)
        if is_op(node, "Where"):
            guard = producer(value, "IsNaN")
            value = operand(node, 2)
            if guard is None or read_number(node.inputs[1]) != 0 or guard.inputs[0] is not value:
                return None
            nodes.append(guard)
    return None


def _remove_scale(value: ir.Value) -> tuple[ir.Value, float]:
    """Return a value without its constant factors, and their product."""
    factor = 1.0
    while (node := producer(value, "Mul", "Div")) is not None:
        sides = list(operand_orders(node)) if is_op(node, "Mul") else [(operand(node, 0), operand(node, 1))]
        matched = next(((x, n) for x, c in sides if (n := read_number(c)) and dims(x) == dims(value)), None)
        if matched is None:
            break
        value, factor = matched[0], factor * matched[1] if is_op(node, "Mul") else factor / matched[1]
    return value, factor


@dataclass
class _AttentionMatch:
    """The operands and attributes of the new node.

    heads is B and H if the first of three dimensions is B * H; groups is Hkv and G of five dimensions.
    """

    matmul: ir.Node
    softmax: ir.Node
    q: ir.Value
    kt: ir.Value
    v: ir.Value
    scores: AttentionScores
    sink: AttentionSink | None
    scale: float
    heads: Heads = None
    groups: tuple[int, int] | None = None

    @property
    def shape(self) -> tuple[Size, ...]:
        """Return [B, Hq, S, T], the shape of the scores."""
        q, kt = dims(self.q), dims(self.kt)
        if self.groups is not None:
            return q[0], math.prod(self.groups), q[-2], kt[-1]
        return (*(q[:2] if self.heads is None else self.heads), q[-2], kt[-1])

    @property
    def dtype(self) -> ir.DataType:
        """Return the type of the new node: that of Q, or the widest in which a mask was added."""
        return max(
            self.scores.masks.list_types([self.scores.matmul.outputs[0].dtype]), key=lambda dtype: dtype.itemsize
        )

    def has_matching_sizes(self, views: list[tuple[Size, ...]]) -> bool:
        """Return whether only dimensions that Attention broadcasts are broadcast; set the heads.

        views are the shapes to which scores and probabilities are reshaped.
        """
        shapes = q, kt, v = dims(self.q), dims(self.kt), dims(self.v)
        rank = len(q)
        if rank not in (3, 4, 5) or len(kt) != rank or len(v) not in (rank, 4):
            return False
        if not all(is_static(size) for size in (q[-1], kt[-2], v[-1])):
            return False
        equal_batches = shapes if len(v) == rank else (q, kt)
        if any(not can_broadcast(a[0], b[0]) for a in equal_batches for b in equal_batches):
            return False
        if rank == 5:
            self.groups = read_groups(self.q, self.kt, self.v)
            is_match = not views and self.groups is not None
        elif rank == 4:
            is_match = not views and is_static(q[1]) and kt[1] == v[1] and kt[1] in (1, q[1])
        else:
            self.heads = _read_heads(views, q[0], dims(self.scores.matmul.outputs[0]))
            is_match = self.heads is not None and (len(v) == rank or v[:2] == self.heads)
        if self.sink is not None and not (is_match and self.sink.has_heads(self.shape[1])):
            return False
        return is_match and self.scores.masks.has_matching_shapes(self.shape, q[0])

    def has_matching_types(self) -> bool:
        computed = [node.outputs[0] for node in (self.scores.matmul, self.softmax, self.matmul)]
        values = [self.q, self.kt, self.v, *computed]
        types = [value.dtype for value in values if value.dtype in _PRECISIONS]
        if len(types) < len(values) or {ir.DataType.FLOAT16, ir.DataType.BFLOAT16} <= {*types, self.dtype}:
            return False
        _, _, v, matmul, softmax, _ = (dtype.itemsize for dtype in types if dtype is not None)
        return v <= self.dtype.itemsize and matmul <= softmax

    def emit_operands(self, new: Rewrite, v_heads: Heads) -> tuple[ir.Value, ir.Value, ir.Value]:
        """Emit Q, K and V of four dimensions."""
        if self.groups is not None:
            kt, v = (drop_group_axis(new, value) for value in (self.kt, self.v))
            return flatten_queries(new, self.q), emit_keys(new, kt, None), v
        q, k = restore_heads(new, self.q, self.heads), emit_keys(new, self.kt, self.heads)
        return q, k, restore_heads(new, self.v, v_heads)

    def replace(self, nodes: list[ir.Node]) -> None:
        new, result, dtype = Rewrite(self.matmul), self.matmul.outputs[0], self.dtype
        v_heads = self.heads if len(dims(self.v)) == 3 else None
        q, k, v = (new.emit_cast(x, dtype) for x in self.emit_operands(new, v_heads))

        def key_count() -> ir.Value:
            return new.emit_size(k, 2)

        mask = self.scores.masks.emit_combined(new, self.shape, key_count, dtype, self.heads)
        attributes: dict[str, float | int] = {"scale": self.scale}
        if self.scores.softcap:
            attributes["softcap"] = self.scores.softcap
        softmax = self.softmax.outputs[0].dtype
        if softmax != dtype:
            attributes["softmax_precision"] = int(softmax or dtype)
        shape = (*self.shape[:3], dims(self.v)[-1])
        heads = self.shape[1]
        assert isinstance(heads, int)
        sink = None if self.sink is None else self.sink.emit_vector(new, heads, dtype)
        y = emit_attention(new, [q, k, v, mask, None, None, None, sink], attributes, dtype=dtype, shape=shape)
        y = new.emit_cast(y, result.dtype or dtype)
        if self.groups is not None:
            y = split_queries(new, y, self.groups)
        elif v_heads is not None:
            sizes = new.emit("Shape", [y], {"start": 2}, ir.DataType.INT64, [2])
            flat = new.emit("Concat", [new.emit_integers(-1), sizes], {"axis": 0}, ir.DataType.INT64, [3])
            y = new.emit("Reshape", [y, flat], shape=dims(result))
        new.replace(nodes, result, y)


def _read_heads(views: list[tuple[Size, ...]], batch: Size, scores: tuple[Size, ...]) -> tuple[Size, int] | None:
    """Match case 9: return B and H of scores [B * H, S, T], from the four dimensions of their reshapes."""
    if not views:
        return batch, 1
    split_shape = next((view for view in views if len(view) == 4), None)
    if split_shape is None or any(view not in (scores, split_shape) for view in views) or split_shape[2:] != scores[1:]:
        return None
    return (split_shape[0], split_shape[1]) if isinstance(split_shape[1], int) else None
