"""States of served decoders: ragged batches, each request from its slot of a pool, against float64 token by token."""

from __future__ import annotations

import random
from dataclasses import replace
from typing import Any

import numpy as np
import onnx
import pytest
from onnx import helper, numpy_helper

import lowering
from tests.cases.linear_cases import RULES, TOLERANCE, LinearCase
from tests.support.error_codes import raises

VOCABULARY, CONTEXT, SLOTS = 20, 60, 5
LENGTHS = (41, 1, 23, 9)


def make_decoder(node: onnx.NodeProto, tables: dict[str, np.ndarray], state: tuple[str, list[int]], y: Any) -> Any:
    """Return a model that looks up a node's rows in tables by tokens; state is the type and sizes of its state."""
    dtypes = {name: helper.np_dtype_to_tensor_dtype(np.dtype(table.dtype)) for name, table in tables.items()}
    nodes = [helper.make_node("Gather", [f"{name}_table", "ids"], [name]) for name in tables]
    info, kind = helper.make_tensor_value_info, helper.np_dtype_to_tensor_dtype(np.dtype(state[0]))
    inputs = [info("ids", onnx.TensorProto.INT64, ["B", "S"]), info("past", kind, ["B", *state[1]])]
    outputs = [info("y", dtypes[next(iter(tables))], y), info("present", kind, ["B", *state[1]])]
    constants = [numpy_helper.from_array(table, f"{name}_table") for name, table in tables.items()]
    graph = helper.make_graph([*nodes, node], "g", inputs, outputs, constants)
    opsets = [helper.make_opsetid("", 24), helper.make_opsetid("com.microsoft", 1)]
    return helper.make_model(graph, opset_imports=opsets, ir_version=11)


class Requests:
    """Manual calls of a model: random slices of sequences, in slots whose last owners left values that corrupt
    accumulators."""

    def __init__(self, model: lowering.Model, seed: int) -> None:
        assert model.manifest.served is not None and not model.manifest.notes
        (self.pool,) = model.manifest.served.states
        self.model, self.rng = model, np.random.default_rng(seed)
        shape = (SLOTS, self.pool.layers, *self.pool.shape)
        self.states = np.full(shape, np.nan).astype(np.dtype(self.pool.dtype))
        self.sequences = [self.rng.integers(0, VOCABULARY, count) for count in LENGTHS]
        self.slots = self.rng.permutation(SLOTS)[: len(LENGTHS)]
        self.read = [0] * len(LENGTHS)

    def call(self) -> list[tuple[int, np.ndarray]]:
        """Run requests, in any order; return their answers after so many tokens. Some requests lack rows."""
        order = [int(r) for r in self.rng.permutation(len(LENGTHS))]
        left = [len(self.sequences[r]) - self.read[r] for r in order]
        counts = [min(int(self.rng.choice([0, 1, 5, 19])), count) for count in left]
        counts = counts if any(counts) else [min(1, count) for count in left]
        tokens = [self.sequences[r][self.read[r] : self.read[r] + count] for r, count in zip(order, counts)]
        before, idle = self.states.copy(), [slot for slot in range(SLOTS) if slot not in self.slots]
        answers = self.model.run(
            {
                "ids": np.concatenate(tokens)[None],
                "row_starts": np.cumsum([0, *counts]),
                "past_lengths": np.array([self.read[r] for r in order]),
                "state_slots": self.slots[order],
                self.pool.name: self.states,
            }
        )["y"]
        idle += [int(self.slots[r]) for r, count in zip(order, counts) if not count]
        assert before[idle].tobytes() == self.states[idle].tobytes()
        for r, count in zip(order, counts):
            self.read[r] += count
        return [(r, answer) for r, answer, count in zip(order, answers, counts) if count]

    def error(self, expected: list[np.ndarray]) -> float:
        """Return the largest difference from [tokens, width] of each request, relative to the largest element."""
        worst = 0.0
        for _ in range(3):
            while any(read < len(ids) for read, ids in zip(self.read, self.sequences)):
                for r, answer in self.call():
                    difference = np.abs(answer.astype(np.float64) - expected[r][self.read[r] - 1]).max()
                    worst = max(worst, float(np.nan_to_num(difference, nan=np.inf) / np.abs(expected[r]).max()))
            self.slots, self.read = self.rng.permutation(SLOTS)[: len(LENGTHS)], [0] * len(LENGTHS)
        return worst


def draw_case(seed: int) -> LinearCase:
    rng = random.Random(seed)
    heads = rng.choice([(4, 2, 2), (2, 2, 4), (2, 4, 4), (3, 3, 3)])
    half = seed % 4 == 3
    return LinearCase(
        rule=RULES[seed % len(RULES)], q_heads=heads[0], k_heads=heads[1], v_heads=heads[2],
        head_dim=rng.choice((5, 16, 24)), v_head_dim=rng.choice((7, 16, 32)), by_element=rng.random() < 0.5,
        shared_beta=rng.random() < 0.3, dtype="float16" if half else "float32", scale=rng.choice((0.0, 0.7)),
    )  # fmt: skip


def make_linear_decoder(case: LinearCase, tables: dict[str, np.ndarray]) -> Any:
    names = ["q", "k", "v", "past", *(name if name in tables else "" for name in ("decay", "beta"))]
    node = helper.make_node(
        "LinearAttention", names, ["y", "present"], domain="com.microsoft", update_rule=case.rule, scale=case.scale,
        q_num_heads=case.q_heads, kv_num_heads=case.v_heads, name="linear",
    )  # fmt: skip
    state = (case.state_dtype, [case.v_heads, case.head_dim, case.v_head_dim])
    return make_decoder(node, tables, state, ["B", "S", case.y_heads * case.v_head_dim])


@pytest.mark.parametrize("seed", range(4))
def test_linear_attention_of_packed_requests(seed: int) -> None:
    case = draw_case(seed)
    print(f"seed {seed}: {case}")
    tables = {name: rows[0] for name, rows in replace(case, past=False).feeds(VOCABULARY, seed).items()}
    serve = lowering.Serve(CONTEXT, ids="ids")
    requests = Requests(lowering.compile(make_linear_decoder(case, tables), serve=serve, threads=2), seed)
    inputs = [{name: table[ids][None] for name, table in tables.items()} for ids in requests.sequences]
    assert requests.error([case.expected(rows)["y"][0] for rows in inputs]) < TOLERANCE[case.dtype]


def make_conv_decoder(channels: int, k: int, dtype: str, **attributes: Any) -> tuple[Any, dict[str, np.ndarray]]:
    rng = np.random.default_rng(channels)
    shapes = {"x": (VOCABULARY, channels), "w": (channels, 1, k), "bias": (channels,)}
    arrays = {name: rng.standard_normal(shape).astype(dtype) for name, shape in shapes.items()}
    node = helper.make_node(
        "CausalConvWithState", ["x", "w", "bias", "past"], ["y", "present"], domain="com.microsoft", channels_last=1,
        name="conv", **attributes,
    )  # fmt: skip
    reach = (k - 1) * attributes.get("dilation", 1)
    model = make_decoder(node, {"x": arrays["x"]}, (dtype, [reach, channels]), ["B", "S", channels])
    model.graph.initializer.extend(numpy_helper.from_array(arrays[name], name) for name in ("w", "bias"))
    return model, arrays


@pytest.mark.parametrize(
    ("channels", "k", "dtype", "attributes"),
    [
        (7, 4, "float32", {}),
        (32, 2, "float32", {"activation": "silu"}),
        (48, 3, "float16", {"dilation": 2}),
    ],
)
def test_convolutions_of_packed_requests(channels: int, k: int, dtype: str, attributes: dict[str, Any]) -> None:
    model, arrays = make_conv_decoder(channels, k, dtype, **attributes)
    requests = Requests(lowering.compile(model, serve=lowering.Serve(CONTEXT, ids="ids"), threads=2), channels)
    table, w, bias = (arrays[name].astype(np.float64) for name in ("x", "w", "bias"))
    dilation, expected = attributes.get("dilation", 1), []
    for ids in requests.sequences:
        rows = np.concatenate([np.zeros(((k - 1) * dilation, channels)), table[ids]])
        y = bias + sum(rows[j * dilation :][: len(ids)] * w[:, 0, j] for j in range(k))
        expected.append(y / (1 + np.exp(-y)) if attributes.get("activation") else y)
    assert requests.error(expected) < TOLERANCE[dtype]


LEGAL = {"row_starts": [0, 2, 2, 3], "past_lengths": [0, 4, 9], "state_slots": [3, -7, 1]}


@pytest.fixture(scope="module")
def conv() -> lowering.Model:
    return lowering.compile(make_conv_decoder(8, 4, "float32")[0], serve=lowering.Serve(CONTEXT, ids="ids"))


@pytest.mark.parametrize(
    ("tables", "text"),
    [
        ({"state_slots": [3, 0, SLOTS]}, f"state_slots of request 2 is {SLOTS}, and states have {SLOTS} slots"),
        ({"state_slots": [-1, 0, 1]}, "state_slots of request 0 is -1"),
        ({"state_slots": [3, 0, 3]}, "request 0 and request 2 share slot 3: give each a slot of its own"),
        ({"past_lengths": [CONTEXT, 4, 9]}, f"past_lengths of request 0 is {CONTEXT}"),
        ({"row_starts": [0, 2, 1, 3]}, "row_starts decreases at request 1"),
    ],
)
def test_tables_that_do_not_fit(conv: lowering.Model, tables: dict[str, Any], text: str) -> None:
    """Errors are raised before anything is written. A request without rows does not need a slot."""
    arrays = {name: np.array(table, np.int64) for name, table in LEGAL.items()} | {"ids": np.zeros((1, 3), np.int64)}
    states = np.zeros((SLOTS, 1, 3, 8), np.float32)
    conv.run({**arrays, "states": states})
    before = states.copy()
    assert before[[1, 3]].any() and not before[[0, 2, 4]].any()
    wrong = {name: np.array(table, np.int64) for name, table in tables.items()}
    with pytest.raises(lowering.InputError, match=rf"PackedRequests.*{text}"):
        conv.run({**arrays, **wrong, "states": states})
    np.testing.assert_array_equal(states, before)


@pytest.mark.parametrize("kind", ["linear", "conv"])
def test_hostile_tables_stay_inside(kind: str) -> None:
    """For any tables, only the pool is read or written, and the process survives."""
    case = LinearCase()
    tables = {name: rows[0] for name, rows in replace(case, past=False).feeds(VOCABULARY, 0).items()}
    model = make_linear_decoder(case, tables) if kind == "linear" else make_conv_decoder(8, 4, "float32")[0]
    compiled = lowering.compile(model, serve=lowering.Serve(CONTEXT, ids="ids"), checks=False)
    assert compiled.manifest.served is not None
    (pool,) = compiled.manifest.served.states
    rng, ends = np.random.default_rng(3), np.array([-(2**63), -1, 0, 1, SLOTS - 1, SLOTS, 2**31, 2**62, 2**63 - 1])
    for _ in range(40):
        rows, requests = (int(rng.integers(1, limit)) for limit in (12, 4))
        compiled.run(
            {
                "ids": rng.integers(0, VOCABULARY, (1, rows)),
                "row_starts": rng.choice([*ends, *range(12)], requests + 1),
                "past_lengths": rng.choice([*ends, *range(40)], requests),
                "state_slots": rng.choice(ends, requests),
                pool.name: np.zeros((SLOTS, 1, *pool.shape), np.float32),
            }
        )


def test_a_state_that_something_else_reads() -> None:
    model, _ = make_conv_decoder(8, 4, "float32")
    first = model.graph.output[0].name
    (last,) = (node for node in model.graph.node if first in node.output)
    last.output[0] = "before"
    model.graph.node.append(helper.make_node("ReduceSum", ["past"], ["total"], keepdims=0))
    model.graph.node.append(helper.make_node("Add", ["before", "total"], [first]))
    with raises("serve.state_unsupported"):
        lowering.compile(model, serve=lowering.Serve(CONTEXT, ids="ids"))


def test_states_are_not_int8() -> None:
    with raises("serve.cache_int8_unsupported"):
        lowering.compile(make_conv_decoder(8, 4, "float32")[0], serve=lowering.Serve(CONTEXT, cache="int8", ids="ids"))
