"""Operators with branches, bodies or nothing to compute."""

from __future__ import annotations

import numpy as np
import onnx
from onnx import helper, numpy_helper

from ..attack import Answer, Arrays, Attack, Unspecified, attacks
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
    value = d.array(d.dtype(ANY), d.shape(d.int(0, 3), most=200))

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
    """Numbers of steps that are none, negative, or more than are written out."""
    steps = d.pick((0, 1, 3, 7, -1, -(2**62), 10**6, 2**62))
    kind = [helper.make_tensor_value_info(n, onnx.TensorProto.FLOAT, [2]) for n in ("s", "t")]
    number = helper.make_tensor_value_info("i", onnx.TensorProto.INT64, [])
    goes = [helper.make_tensor_value_info(n, onnx.TensorProto.BOOL, []) for n in ("c", "g")]
    nodes = [helper.make_node("Identity", ["s"], ["t"])]
    if op == "Scan":
        body = helper.make_graph(nodes, "body", kind[:1], kind[1:])
        attributes: dict = {"body": body, "num_scan_inputs": 1}
    else:
        nodes.append(helper.make_node("Identity", ["c"], ["g"]))
        attributes = {"body": helper.make_graph(nodes, "body", [number, goes[0], kind[0]], [goes[1], kind[1]])}

    def feed() -> Arrays:
        if op == "Scan":
            return [d.array("float32", (d.pick((0, 1, 3)), 2))]
        return [np.array(steps, np.int64), np.array(d.chance(0.8)), d.array("float32", (2,))]

    def rule(*arrays: np.ndarray) -> Answer:
        if op == "Scan" and not len(arrays[0]):
            raise Unspecified("no step, and so no shape of its outputs")
        if op == "Loop" and steps > 100 and arrays[1]:
            raise Unspecified("more steps than are written out")
        return [arrays[-1]]

    return Attack(op, feed, rule, attributes=attributes, fixed=[0, 1])
