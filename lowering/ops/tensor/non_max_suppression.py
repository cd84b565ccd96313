"""ONNX NonMaxSuppression (https://onnx.ai/onnx/operators/onnx__NonMaxSuppression.html)."""

from __future__ import annotations

from typing import Any

import numpy as np
from tvm import tirx
from tvm.script.ir_builder import tirx as T

from ...importing.node import Node
from ...importing.values import Value, prod
from .. import op
from ..helpers.assertions import assert_shape
from ..helpers.kernels import emit_loops, serial
from ..helpers.requirements import require_dtype, require_tensor
from ..helpers.run_time import bind_sizes
from .reshape import reshape_to
from .slice import emit_slice


@op("NonMaxSuppression", since=10)
def non_max_suppression(
    node: Node,
    boxes: Value,
    scores: Value,
    max_boxes: Value | None = None,
    iou_threshold: Value | None = None,
    score_threshold: Value | None = None,
) -> Value:
    """Emit [selected, 3]: batch, class and box.

    boxes is [N, boxes, 4], and scores [N, classes, boxes]. Of each class the best box comes first, and of equal ones
    the first.
    """
    _check_types(node, boxes, scores)
    batch, classes, count = scores.shape
    boxes = assert_shape(node, boxes, (batch, count, 4))
    limits = [
        _read_limit(node, max_boxes, np.asarray([0], np.int64)),
        _read_limit(node, iou_threshold, np.asarray([0], np.float32)),
        _read_limit(node, score_threshold, np.asarray([-np.inf], np.float32)),
    ]
    centered = bool(node.attr("center_point_box", 0))
    rows = node.simplify(prod((batch, classes, count)))

    def statements(
        boxes: Any, scores: Any, max_boxes: Any, iou: Any, min_score: Any, selections: Any, total: Any, alive: Any
    ) -> None:
        T.buffer_store(total, tirx.const(0, "int64"), [0])
        with serial(batch) as b, serial(classes) as c:
            # The number selected so far, the best remaining box, and whether there is one.
            state = T.alloc_buffer((3,), "int64")
            T.buffer_store(state, tirx.const(0, "int64"), [0])
            T.buffer_store(state, tirx.const(1, "int64"), [2])
            with serial(count) as i:
                T.buffer_store(alive, _accept_score(scores[b, c, i], min_score[0]).astype("int64"), [i])
            with T.While(tirx.all(state[2] > 0, state[0] < max_boxes[0])):
                T.buffer_store(state, tirx.const(-1, "int64"), [1])
                with serial(count) as i, T.If(alive[i] > 0), T.Then():
                    best = tirx.max(state[1], tirx.const(0, "int64"))
                    better = tirx.any(state[1] < 0, scores[b, c, i] > scores[b, c, best])
                    T.buffer_store(state, tirx.Select(better, i, state[1]), [1])
                T.buffer_store(state, (state[1] >= 0).astype("int64"), [2])
                with T.If(state[2] > 0), T.Then():
                    best = T.bind(state[1])
                    for k, value in enumerate((b, c, best)):
                        T.buffer_store(selections, value, [total[0], k])
                    T.buffer_store(total, total[0] + 1, [0])
                    T.buffer_store(state, state[0] + 1, [0])
                    T.buffer_store(alive, tirx.const(0, "int64"), [best])
                    with serial(count) as i, T.If(alive[i] > 0), T.Then():
                        over = _compute_overlap(boxes, b, best, i, centered) > iou[0]
                        T.buffer_store(alive, tirx.Select(over, tirx.const(0, "int64"), alive[i]), [i])

    output_types = [((rows, 3), "int64"), ((1,), "int64")]
    selections, total = emit_loops(node, "non_max_suppression", statements, [boxes, scores, *limits], output_types,
                         scratch=[((count,), "int64")])  # fmt: skip
    (selected,) = bind_sizes(node, total)
    return emit_slice(node, selections, [0, 0], [1, 1], (selected, 3))


def _check_types(node: Node, boxes: Value, scores: Value) -> None:
    """Raise NodeError if boxes or scores are not float32 of rank 3."""
    for name, value in (("boxes", boxes), ("scores", scores)):
        require_tensor(
            node,
            name,
            value,
            "float32",
            "[batches, boxes, 4] or [batches, classes, boxes]",
            code="non_max_suppression.input_unsupported",
        )


def _accept_score(score: Any, min_score: Any) -> Any:
    """Return whether a box of this score is a candidate: -inf accepts all numbers."""
    accepts_all = tirx.isinf(min_score) & (min_score < tirx.const(0.0, "float32"))
    return tirx.all(tirx.any(score > min_score, accepts_all), tirx.Not(tirx.isnan(score)))


def _read_limit(node: Node, value: Value | None, default: np.ndarray) -> Value:
    if value is None:
        return node.constant(default)
    require_dtype(
        node,
        "max_output_boxes_per_class, iou_threshold or score_threshold",
        value,
        default.dtype.name,
        code="non_max_suppression.dtype_unsupported",
    )
    return reshape_to(node, value, (1,))


def _compute_overlap(boxes: Any, b: Any, i: Any, j: Any, centered: bool) -> Any:
    """Return the intersection area of two boxes over that of their union; 0 where one is empty."""
    zero, half = tirx.const(0.0, "float32"), tirx.const(0.5, "float32")

    def ends(box: Any, axis: int) -> tuple[Any, Any]:
        x, y = (boxes[b, box, tirx.const(k, "int64")] for k in (axis, axis + 2))
        if centered:
            return x - y * half, x + y * half
        return tirx.min(x, y), tirx.max(x, y)

    shared, areas = tirx.const(1.0, "float32"), []
    spans = [[ends(box, axis) for axis in (0, 1)] for box in (i, j)]
    for axis in (0, 1):
        (a, b_end), (c, d) = spans[0][axis], spans[1][axis]
        shared = shared * tirx.max(tirx.min(b_end, d) - tirx.max(a, c), zero)
    for span in spans:
        areas.append((span[0][1] - span[0][0]) * (span[1][1] - span[1][0]))
    union = areas[0] + areas[1] - shared
    is_valid = tirx.all(areas[0] > zero, areas[1] > zero, union > zero)
    return tirx.Select(is_valid, shared / tirx.Select(union > zero, union, tirx.const(1.0, "float32")), zero)
