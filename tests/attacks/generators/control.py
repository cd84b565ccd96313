"""Operators with branches, bodies or nothing to compute."""

from __future__ import annotations

from typing import Any

import numpy as np
import onnx
from onnx import helper, numpy_helper

from ..attack import Answer, Arrays, Attack, Unspecified, attacks, require
from ..draw import ANY, Draw


@attacks("Dropout")
def dropout(d: Draw, op: str) -> Attack:
    rank, dtype, training = d.int(0, 4), d.dtype(("float32", "float16", "float64")), d.chance(0.1)

    def feed() -> Arrays:
        return [d.array(dtype, d.shape(rank)), np.array(0.5, np.float32), np.array(training)]

    def rule(data: np.ndarray, ratio: np.ndarray, mode: np.ndarray) -> Answer:
        if mode:
            raise Unspecified("random numbers")
        return [data, np.ones(data.shape, bool)]

    return Attack(op, feed, rule, outputs=2, fixed={1, 2})


@attacks("Constant")
def constant(d: Draw, op: str) -> Attack:
    value = d.array(d.dtype(ANY), d.shape(d.int(0, 3), limit=200))

    def rule() -> Answer:
        return [value]

    return Attack(op, list, rule, attributes={"value": numpy_helper.from_array(value, "value")})


@attacks("If")
def branches(d: Draw, op: str) -> Attack:
    values = [d.array("float32", d.shape(1)) for _ in range(2)]

    def branch(k: int) -> onnx.GraphProto:
        kind = helper.make_tensor_value_info("z", onnx.TensorProto.FLOAT, [len(values[k])])
        node = helper.make_node("Constant", [], ["z"], value=numpy_helper.from_array(values[k], "value"))
        return helper.make_graph([node], f"branch{k}", [], [kind])

    def feed() -> Arrays:
        return [np.array(d.chance(0.5))]

    def rule(condition: np.ndarray) -> Answer:
        return [values[0 if condition else 1]]

    return Attack(op, feed, rule, attributes={"then_branch": branch(0), "else_branch": branch(1)})


@attacks("Loop", "Scan")
def loops(d: Draw, op: str) -> Attack:
    """Draw numbers of steps that are 0, negative, or more than the 41 after which the condition fails."""
    steps = d.pick((0, 1, 3, 7, -1, -(2**62), 10**6, 2**62))
    batches = op == "Scan" and d.chance(0.3)  # Scan-8
    names = ("s", "t", "o")
    kind = [helper.make_tensor_value_info(n, onnx.TensorProto.FLOAT, [2]) for n in names]
    number = helper.make_tensor_value_info("i", onnx.TensorProto.INT64, [])
    goes = [helper.make_tensor_value_info(n, onnx.TensorProto.BOOL, []) for n in ("c", "g")]
    ones = numpy_helper.from_array(np.ones(2, np.float32), "one")
    last = numpy_helper.from_array(np.asarray(40), "last")
    nodes = [helper.make_node("Add", ["s", "one"], ["t"])]
    if op == "Scan":
        body = helper.make_graph(nodes, "body", kind[:1], kind[1:2], [ones])
        attributes: dict = {"body": body, "num_scan_inputs": 1}
    else:
        nodes += [helper.make_node("Less", ["i", "last"], ["g"]), helper.make_node("Neg", ["s"], ["o"])]
        inputs, outputs = [number, goes[0], kind[0]], [goes[1], *kind[1:]]
        attributes = {"body": helper.make_graph(nodes, "body", inputs, outputs, [ones, last])}

    def feed() -> Arrays:
        if op == "Scan":
            shape = d.pick((0, 1, 3, 40)), 2 if d.chance(0.95) else 3
            return [None, d.array("float32", (d.pick((1, 2)), *shape))] if batches else [d.array("float32", shape)]
        return [np.array(steps, np.int64), np.array(d.chance(0.8)), d.array("float32", (2,))]

    def rule(*arrays: Any) -> Answer:
        x = arrays[-1]
        require(x.shape[-1] == 2, "the body is of two")
        if op == "Scan":
            return [x + 1]
        count = min(max(int(arrays[0]), 0), 41) if arrays[1] else 0
        values = [x]
        for _ in range(count):
            values.append(values[-1] + np.float32(1))
        return [values[-1], -np.stack(values[:-1]) if count else np.empty((0, 2), np.float32)]

    results = [("float32", 2 + batches)] if op == "Scan" else [("float32", 1), ("float32", 2)]
    return Attack(op, feed, rule, outputs=len(results), attributes=attributes, parameters=[0, 1],
                  numbers=[(0, 0), (1, 0)], results=results, opset=8 if batches else 24)  # fmt: skip
