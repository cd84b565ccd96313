"""LinearAttention compared with float64: across chunks, in place, independent of later tokens; and convolutions
with a state."""

from __future__ import annotations

import random
from typing import Any

import numpy as np
import onnx
import pytest
from onnx import helper, numpy_helper

import lowering
from lowering.errors import InputError, NodeError
from tests.cases.linear_cases import RULES, TOLERANCE, LinearCase, differences, relative_error
from tests.support.placed_arrays import guarded, unaligned
from tests.support.this_machine import TARGETS

LENGTHS = (1, 2, 7, 8, 15, 16, 17, 33, 50)  # chunks are of 8 or 16 tokens


def draw_case(rng: random.Random) -> LinearCase:
    heads = rng.choice([(1, 1, 1), (4, 2, 2), (6, 1, 1), (3, 3, 3), (2, 2, 4), (2, 4, 4), (1, 2, 4)])
    half = rng.random() < 0.3
    return LinearCase(
        rule=rng.choice(RULES),
        batch=rng.choice((1, 2)),
        q_heads=heads[0],
        k_heads=heads[1],
        v_heads=heads[2],
        head_dim=rng.choice((1, 5, 16, 24, 40, 64)),
        v_head_dim=rng.choice((1, 7, 16, 24, 48, 64)),
        by_element=rng.random() < 0.5,
        shared_beta=rng.random() < 0.3,
        past=rng.random() < 0.8,
        dtype=rng.choice(("float16", "bfloat16")) if half else "float32",
        state_dtype=rng.choice(("float16", "bfloat16", "float32")) if half else "float32",
        scale=rng.choice((0.0, 0.7)),
    )


def check_case(seed: int) -> None:
    rng = random.Random(seed)
    case, target, threads = draw_case(rng), rng.choice(TARGETS), rng.choice((1, 2))
    print(f"seed {seed}: {case} {target}")
    donate = ("state",) if case.past and rng.random() < 0.5 else ()
    module = lowering.compile(case.model(), target, threads=threads, donate=donate)
    for length in rng.sample(LENGTHS, 4):
        feeds = case.feeds(length, seed)
        allocate = rng.choice((unaligned, lambda x: guarded(x, True), lambda x: guarded(x, False)))
        results = module(**{name: allocate(x) for name, x in feeds.items()})
        assert not differences(case, results, feeds), f"length {length}"


@pytest.mark.parametrize("seed", range(8))
def test_any_attention(seed: int) -> None:
    check_case(seed)


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(8, 158))
def test_more_attentions(seed: int) -> None:
    check_case(seed)


@pytest.mark.slow
@pytest.mark.parametrize("rule", RULES)
def test_long_sequences(rule: str) -> None:
    """Errors do not grow with the length, but for "linear", which forgets nothing: as float32 token by token there."""
    case = LinearCase(rule=rule, q_heads=1, k_heads=1, v_heads=1, head_dim=128, v_head_dim=128)
    module = lowering.compile(case.model())
    for length in (1000, 8192):
        feeds = case.feeds(length, length)
        results = module(**feeds)
        if rule != "linear":
            assert not differences(case, results, feeds)
            continue
        narrow = case.expected(feeds, np.float32)
        for name, expected in case.expected(feeds).items():
            error, usual = (relative_error(x[name].astype(np.float64), expected) for x in (results, narrow))
            assert error <= max(TOLERANCE["float32"], 1.2 * usual), (name, length, error, usual)


def test_a_sequence_in_chunks_equals_the_sequence() -> None:
    """Prefill and decoding continue each other's state in place."""
    case = LinearCase(q_heads=4, head_dim=32, v_head_dim=32)
    module = lowering.compile(case.model(), donate=("state",))
    feeds = case.feeds(41, seed=3)
    state, chunks, rows = feeds["state"].copy(), [], [name for name in feeds if name != "state"]
    for first, last in ((0, 1), (1, 2), (2, 36), (36, 40), (40, 41)):
        results = module(state=state, **{name: feeds[name][:, first:last].copy() for name in rows})
        chunks.append(np.array(results["y"]))
        assert np.shares_memory(np.asarray(results["present"]), state)
    whole = {"y": np.concatenate(chunks, axis=1), "present": state}
    assert not differences(case, whole, feeds)


@pytest.mark.parametrize("rule", RULES)
def test_later_tokens_change_nothing(rule: str) -> None:
    case = LinearCase(rule=rule, by_element=rule == "gated")
    module = lowering.compile(case.model())
    feeds = case.feeds(40, seed=5)
    clean = np.array(module(**feeds)["y"])
    for bad in (np.nan, np.inf):
        corrupted = {name: x.copy() for name, x in feeds.items()}
        for name in set(corrupted) - {"state"}:
            corrupted[name][:, 21:] = bad
        actual = np.asarray(module(**corrupted)["y"])
        assert np.array_equal(actual[:, :21], clean[:, :21])


def test_decays_of_any_size() -> None:
    """Decays that underflow within a chunk give 0; a state that grows beyond float32 is not finite."""
    case = LinearCase(rule="gated", by_element=True)
    module = lowering.compile(case.model())
    feeds = case.feeds(40, seed=7)
    feeds["decay"][:, ::3] = -500
    assert not differences(case, module(**feeds), feeds)
    feeds["decay"][...] = 100
    assert not np.isfinite(np.asarray(module(**feeds)["present"])).any()


def test_without_donation_the_state_stays() -> None:
    case = LinearCase()
    feeds = case.feeds(20, seed=9)
    before = feeds["state"].copy()
    assert not differences(case, lowering.compile(case.model())(**feeds), feeds)
    assert np.array_equal(before, feeds["state"])


@pytest.mark.parametrize(
    "change, words",
    [
        (lambda m: m.graph.node[0].input.pop(), "input beta is missing"),
        (lambda m: _set(m, "update_rule", "linear"), "input decay is given"),
        (lambda m: _set(m, "update_rule", "other"), "attribute update_rule is 'other'"),
        (lambda m: _set(m, "q_num_heads", 3), "positive multiple"),
        (lambda m: _set(m, "kv_num_heads", 0), "positive multiple"),
        (lambda m: _dim(m, "v", 2, 33), "the last dimension of input value is 33"),
        (lambda m: _dim(m, "decay", 2, 5), "the last dimension of input decay is 5"),
        (lambda m: _dim(m, "state", 1, 3), "must be 2"),
    ],
)
def test_refusals(change: Any, words: str) -> None:
    model = LinearCase().model()
    change(model)
    del model.graph.output[0].type.tensor_type.shape.dim[:]
    with pytest.raises((NodeError, InputError), match=words):
        lowering.compile(model)


def _set(model: onnx.ModelProto, name: str, value: Any) -> None:
    attribute = next(a for a in model.graph.node[0].attribute if a.name == name)
    attribute.CopyFrom(helper.make_attribute(name, value))


def _dim(model: onnx.ModelProto, name: str, axis: int, size: int) -> None:
    value = next(v for v in model.graph.input if v.name == name)
    value.type.tensor_type.shape.dim[axis].dim_value = size


def make_conv_model(domain: str, channels: int, k: int, past: bool, bias: bool, activation: str, **more: int) -> Any:
    float32, reach = onnx.TensorProto.FLOAT, (k - 1) * more.get("dilation", 1)
    last = more.get("channels_last", 0)
    x, state = (
        (["B", "L", channels], ["B", reach, channels]) if last else (["B", channels, "L"], ["B", channels, reach])
    )
    rng = np.random.default_rng(0)
    weights = {"w": rng.standard_normal((channels, 1, k)), "bias": rng.standard_normal(channels)}
    node = helper.make_node(
        "CausalConvWithState", ["x", "w", "bias" if bias else "", "past" if past else ""], ["y", "present"],
        domain=domain, activation=activation, **more,
    )  # fmt: skip
    info = helper.make_tensor_value_info
    inputs = [info("x", float32, x), *([info("past", float32, state)] if past else [])]
    outputs = [info("y", float32, x), info("present", float32, state)]
    constants = [numpy_helper.from_array(w.astype(np.float32), name) for name, w in weights.items()]
    graph = helper.make_graph([node], "g", inputs, outputs, constants)
    opsets = [helper.make_opsetid("", 27), helper.make_opsetid("com.microsoft", 1)]
    return helper.make_model(graph, opset_imports=opsets, ir_version=11), weights


@pytest.mark.parametrize("domain", ["", "com.microsoft"])
@pytest.mark.parametrize("seed", range(3))
def test_causal_conv(domain: str, seed: int) -> None:
    print(f"seed {seed}")
    rng = random.Random(seed)
    channels, k, past, bias = rng.choice((1, 5, 33)), rng.choice((1, 2, 4)), rng.random() < 0.7, rng.random() < 0.5
    activation, more = rng.choice(("none", "silu")), {}
    if domain:
        more = {"dilation": rng.choice((1, 3)), "channels_last": rng.choice((0, 1))}
    model, weights = make_conv_model(domain, channels, k, past, bias, activation, **more)
    module, data = lowering.compile(model), np.random.default_rng(seed)
    dilation, reach = more.get("dilation", 1), (k - 1) * more.get("dilation", 1)
    for length in (1, 2, 9):
        x = data.standard_normal((2, channels, length)).astype(np.float32)
        before = data.standard_normal((2, channels, reach)).astype(np.float32) * past
        permutation = (0, 2, 1) if more.get("channels_last") else (0, 1, 2)
        results = module(**{n: a.transpose(permutation) for n, a in (("x", x), ("past", before)) if past or n == "x"})
        joined = np.concatenate([before, x], axis=2).astype(np.float64)
        y = sum(joined[:, :, j * dilation :][:, :, :length] * weights["w"][:, 0, j, None] for j in range(k))
        y = y + weights["bias"][:, None] * bias
        y = y / (1 + np.exp(-y)) if activation == "silu" else y
        np.testing.assert_allclose(np.asarray(results["y"]), y.transpose(permutation), rtol=1e-5, atol=1e-5)
        np.testing.assert_array_equal(np.asarray(results["present"]), joined[:, :, length:].transpose(permutation))
