"""MatMul, Softmax, MatMul: one Attention node."""

from __future__ import annotations

import math
from dataclasses import dataclass

import onnx_ir as ir

from .attention_groups import flatten_queries, read_groups, split_queries, without_group
from .attention_keys import Heads, keys, split_heads
from .attention_node import emit_attention
from .attention_scores import Scores, find_scores
from .attention_sinks import Sink, find_sink, find_subtracted_maximum, leaves_out_sink
from .matching import (
    Rewrite,
    Size,
    attribute,
    closed,
    dims,
    is_op,
    known,
    may_broadcast,
    number,
    operand,
    pairs,
    producer,
)
from .node_pass import NodePass
from .opset import FIRST

_PRECISIONS = (ir.DataType.FLOAT16, ir.DataType.BFLOAT16, ir.DataType.FLOAT, ir.DataType.DOUBLE)


class FuseAttentionPass(NodePass):
    """Makes one ai.onnx Attention of softmax(Q K^T) V, written out.

    Q is [B, Hq, S, D], V is [B, Hkv, T, Dv] with Hkv = Hq or 1; or all have three dimensions, [N, S, D], or five.

    1. Scale: Mul or Div by a known number, of the scores, of Q, of K or of several of them.
    2. K: Transpose by any permutation, the Reshape, Transpose, Reshape that PyTorch writes, or K that already is
       [B, H, D, T], which gets a Transpose. Concat of past and new keys stays the input that it is.
    3. Softmax along the last axis, also in a wider type between two Casts.
    4. Soft cap: c Tanh(x / c), with any scale before it, and no mask.
    5. Additive masks after the cap, one or several, on either side of the Add, also multiplied by a later scale.
    6. Where masks, both ways round: a fill of -inf becomes a bool mask. A finite one becomes the additive mask
       Where(condition, 0, fill) if the fill is so low that it dominates every score; -10000 is not.
    7. Max(scores + mask, lowest number): the mask is clamped instead.
    8. NaN guard: Where(IsNaN(p), 0, p). Dropout and Identity are gone by now.
    9. Three dimensions: Reshape of the scores to [B, H, S, T] and back gives B and H; without it, N is the batch of one
       head. Where they are not reshaped back, V has four dimensions and Q and K have three. A float mask in a type
       wider than Q's makes the whole node that wide.
    10. Sinks, and the largest score subtracted: attention_sinks.py numbers the ways. With sinks the node is the
        compiler's own Attention.
    11. Five dimensions: Q [B, Hkv, G, S, D] beside K and V with an axis of one in place of G.

    A score or probability that anybody else reads, or that is an output, refuses the match; so do sizes that would
    broadcast any other way, a mask after the softmax, and a head number or size that is no number. A row whose keys are
    all masked by -inf is NaN before and 0 after, which is the only change of meaning.
    """

    since = FIRST
    operators = ("MatMul",)

    def rewrite(self, node: ir.Node) -> bool:
        return _try_fuse(node)


def _try_fuse(matmul: ir.Node) -> bool:
    behind = _behind_the_softmax(matmul)
    if behind is None:
        return False
    given, subtracted = find_subtracted_maximum(operand(behind[-1], 0))
    sink, scores = _sink_and_scores(given, behind)
    if scores is None:
        return False
    nodes = [matmul, *behind, *subtracted, *(sink.nodes if sink is not None else ()), *scores.nodes]
    if not closed(set(nodes), matmul.outputs[0]):
        return False
    q, by_q = _scaled(operand(scores.matmul, 0))
    kt, by_k = _scaled(operand(scores.matmul, 1))
    views = [dims(node.outputs[0]) for node in (*behind, *scores.nodes) if is_op(node, "Reshape")]
    scale = scores.scale * by_q * by_k
    attention = _Attention(matmul, behind[-1], q, kt, operand(matmul, 1), scores, sink, scale)
    if not attention.sizes_fit(views) or not attention.types_fit() or not 0 <= attention.scale < math.inf:
        return False
    attention.replace(nodes)
    return True


def _sink_and_scores(given: ir.Value, behind: list[ir.Node]) -> tuple[Sink | None, Scores | None]:
    """Case 10: what the softmax is of; scores are None where something else is left out behind it."""
    left_out = [node for node in behind if is_op(node, "Slice", "Split")]
    if not left_out:
        return None, find_scores(given)
    sink = find_sink(given)
    if sink is None or len(left_out) > 1 or not leaves_out_sink(left_out[0], sink):
        return None, None
    return sink, find_scores(sink.scores, sink.scale, sink.masks)


def _behind_the_softmax(matmul: ir.Node) -> list[ir.Node] | None:
    """Cases 3, 8 and 10, and the Reshape of case 9: from the second matmul back to the Softmax, which is the last."""
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
            if guard is None or number(node.inputs[1]) != 0 or guard.inputs[0] is not value:
                return None
            nodes.append(guard)
    return None


def _scaled(value: ir.Value) -> tuple[ir.Value, float]:
    """A value without the numbers it is multiplied by, and their product."""
    factor = 1.0
    while (node := producer(value, "Mul", "Div")) is not None:
        sides = list(pairs(node)) if is_op(node, "Mul") else [(operand(node, 0), operand(node, 1))]
        found = next(((x, n) for x, c in sides if (n := number(c)) and dims(x) == dims(value)), None)
        if found is None:
            break
        value, factor = found[0], factor * found[1] if is_op(node, "Mul") else factor / found[1]
    return value, factor


@dataclass
class _Attention:
    """What the new node is made of. heads is B and H where the first of three dimensions is B * H, groups is Hkv and G
    of five."""

    matmul: ir.Node
    softmax: ir.Node
    q: ir.Value
    kt: ir.Value
    v: ir.Value
    scores: Scores
    sink: Sink | None
    scale: float
    heads: Heads = None
    groups: tuple[int, int] | None = None

    @property
    def shape(self) -> tuple[Size, ...]:
        """[B, Hq, S, T] of the scores."""
        q, kt = dims(self.q), dims(self.kt)
        if self.groups is not None:
            return q[0], math.prod(self.groups), q[-2], kt[-1]
        return (*(q[:2] if self.heads is None else self.heads), q[-2], kt[-1])

    @property
    def dtype(self) -> ir.DataType:
        """The type of the new node: that of Q, or the widest in which a mask was added."""
        return max(self.scores.masks.types([self.scores.matmul.outputs[0].dtype]), key=lambda dtype: dtype.itemsize)

    def sizes_fit(self, views: list[tuple[Size, ...]]) -> bool:
        """Whether nothing broadcasts but what Attention broadcasts, too; finds the heads. views are the shapes to which
        scores and probabilities are reshaped."""
        shapes = q, kt, v = dims(self.q), dims(self.kt), dims(self.v)
        rank = len(q)
        if rank not in (3, 4, 5) or len(kt) != rank or len(v) not in (rank, 4):
            return False
        if not all(known(size) for size in (q[-1], kt[-2], v[-1])):
            return False
        together = shapes if len(v) == rank else (q, kt)
        if any(not may_broadcast(a[0], b[0]) for a in together for b in together):
            return False
        if rank == 5:
            self.groups = read_groups(self.q, self.kt, self.v)
            fit = not views and self.groups is not None
        elif rank == 4:
            fit = not views and known(q[1]) and kt[1] == v[1] and kt[1] in (1, q[1])
        else:
            self.heads = _heads(views, q[0], dims(self.scores.matmul.outputs[0]))
            fit = self.heads is not None and (len(v) == rank or v[:2] == self.heads)
        if self.sink is not None and not (fit and self.sink.has_heads(self.shape[1])):
            return False
        return fit and self.scores.masks.fit(self.shape, q[0])

    def types_fit(self) -> bool:
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
            kt, v = (without_group(new, x) for x in (self.kt, self.v))
            return flatten_queries(new, self.q), keys(new, kt, None), v
        q, k = split_heads(new, self.q, self.heads), keys(new, self.kt, self.heads)
        return q, k, split_heads(new, self.v, v_heads)

    def replace(self, nodes: list[ir.Node]) -> None:
        new, result, dtype = Rewrite(self.matmul), self.matmul.outputs[0], self.dtype
        v_heads = self.heads if len(dims(self.v)) == 3 else None
        q, k, v = (new.cast(x, dtype) for x in self.emit_operands(new, v_heads))

        def key_count() -> ir.Value:
            return new.emit("Shape", [k], {"start": 2, "end": 3}, ir.DataType.INT64, [1])

        mask = self.scores.masks.combined(new, self.shape, key_count, dtype, self.heads)
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
        y = new.cast(y, result.dtype or dtype)
        if self.groups is not None:
            y = split_queries(new, y, self.groups)
        elif v_heads is not None:
            sizes = new.emit("Shape", [y], {"start": 2}, ir.DataType.INT64, [2])
            flat = new.emit("Concat", [new.integers(-1), sizes], {"axis": 0}, ir.DataType.INT64, [3])
            y = new.emit("Reshape", [y, flat], shape=dims(result))
        new.replace(nodes, result, y)


def _heads(views: list[tuple[Size, ...]], batch: Size, scores: tuple[Size, ...]) -> tuple[Size, int] | None:
    """Case 9: B and H of scores [B * H, S, T], from the four dimensions that they have on their way."""
    if not views:
        return batch, 1
    full = next((view for view in views if len(view) == 4), None)
    if full is None or any(view not in (scores, full) for view in views) or full[2:] != scores[1:]:
        return None
    return (full[0], full[1]) if isinstance(full[1], int) else None
