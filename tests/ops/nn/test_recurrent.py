"""LSTM, GRU and RNN compared with float64, with every attribute."""

from __future__ import annotations

import random
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from onnx import helper, numpy_helper

import lowering
from lowering.errors import NodeError
from tests.ops.expectations import make_model, value_info
from tests.ops.nn.recurrent_reference import make_activations, run_recurrence
from tests.support.placed_arrays import unaligned
from tests.support.this_machine import TARGETS

GATES = {"LSTM": 4, "GRU": 3, "RNN": 1}
COUNT = {"LSTM": 3, "GRU": 2, "RNN": 1}
DEFAULTS = {"LSTM": ["Sigmoid", "Tanh", "Tanh"], "GRU": ["Sigmoid", "Tanh"], "RNN": ["Tanh"]}


def check_case(seed: int) -> None:
    rng, data = random.Random(seed), np.random.default_rng(seed)
    kind, H, width = rng.choice(["LSTM", "GRU", "RNN"]), rng.choice([1, 5, 16, 17, 40]), rng.choice([1, 3, 24])
    direction = rng.choice(["forward", "reverse", "bidirectional"])
    D, dtype = 1 + (direction == "bidirectional"), rng.choice(["float32", "float32", "float16"])
    numbers = rng.choice([None, (0.3, 0.4)])
    # The first activation is a gate's: an unbounded one would make states overflow.
    first_of = [rng.choice(["HardSigmoid", "ScaledTanh", "Sigmoid", "Softsign", "Tanh"])]
    names = [*first_of, *(rng.choice(sorted(make_activations(0, 0))) for _ in range(COUNT[kind] - 1))]
    names = names if numbers else DEFAULTS[kind]
    attributes: dict[str, Any] = {"direction": direction, "hidden_size": H}
    if numbers:
        taking = {"Affine": 2, "ScaledTanh": 2, "HardSigmoid": 2, "LeakyRelu": 1, "ThresholdedRelu": 1, "Elu": 1}
        alphas, betas = (sum(taking.get(n, 0) >= k for n in names) * D for k in (1, 2))
        attributes |= {"activations": names * D}
        attributes |= {"activation_alpha": [numbers[0]] * alphas} if alphas else {}
        attributes |= {"activation_beta": [numbers[1]] * betas} if betas else {}
    clip = rng.choice([0.0, 0.5])
    attributes |= {"clip": clip} if clip else {}
    before = kind == "GRU" and rng.random() < 0.5
    coupled = kind == "LSTM" and rng.random() < 0.3
    attributes |= {"linear_before_reset": 1} if before else {}
    attributes |= {"input_forget": 1} if coupled else {}
    first = rng.random() < 0.3
    attributes |= {"layout": 1} if first else {}
    shapes = {"w": (D, GATES[kind] * H, width), "r": (D, GATES[kind] * H, H)}
    if rng.random() < 0.7:
        shapes["b"] = (D, 2 * GATES[kind] * H)
    if kind == "LSTM" and rng.random() < 0.4:
        shapes["p"] = (D, 3 * H)
    weights = {n: (data.standard_normal(s) * 0.4).astype(dtype) for n, s in shapes.items()}
    has_lens, has_state = rng.random() < 0.5, rng.random() < 0.6
    constant = rng.random() < 0.7
    print(f"seed {seed}: {kind} {attributes} {dtype} {sorted(shapes)} lens {has_lens} state {has_state}")
    order = ["x", "w", "r", "b", "lens", "h", *(["c", "p"] if kind == "LSTM" else [])]
    there = {"x", *shapes, *(["lens"] if has_lens else []), *(["h", "c"] if has_state else [])}
    inputs = [value_info("x", dtype, ["B", "L", width] if first else ["L", "B", width])]
    inputs += [value_info("lens", "int32", ["B"])] if has_lens else []
    state = ["B", D, H] if first else [D, "B", H]
    inputs += [value_info(n, dtype, state) for n in ("h", "c") if has_state and n in order]
    if not constant:
        inputs += [value_info(n, dtype, list(w.shape)) for n, w in weights.items()]
    output_names = ["y", "y_h", "y_c"][: 2 + (kind == "LSTM")]
    outputs = [value_info(n, dtype, [f"{n}{k}" for k in range(4 if n == "y" else 3)]) for n in output_names]
    node = helper.make_node(kind, [n if n in there else "" for n in order], output_names, **attributes)
    constants = [numpy_helper.from_array(w, n) for n, w in weights.items()] if constant else []
    target, threads = rng.choice(TARGETS), rng.choice([1, 2])
    module = lowering.compile(make_model([node], inputs, outputs, 22, constants), target, threads=threads)
    acts = [make_activations(*(numbers or (0, 0)))[name] for name in names]
    for L, B in ((1, 1), (7, 3), (4, 9)):
        feeds = {"x": data.standard_normal((L, B, width)).astype(dtype)}
        if has_lens:
            feeds["lens"] = data.integers(0, L + 1, B).astype(np.int32)
        if has_state:
            feeds |= {n: data.standard_normal((D, B, H)).astype(dtype) for n in ("h", "c") if n in order}
        reverses = [direction == "reverse"] if D == 1 else [False, True]
        want = run_recurrence(kind, {**feeds, **weights}, [acts] * D, reverses, clip, coupled, before)
        if first:
            feeds = {n: a if n == "lens" else a.swapaxes(0, 1).copy() for n, a in feeds.items()}
            want = [a.transpose(2, 0, 1, 3) if a.ndim == 4 else a.swapaxes(0, 1) for a in want]
        results = module(**{n: unaligned(a) for n, a in {**feeds, **({} if constant else weights)}.items()})
        for name, expected in zip(output_names, want):
            tolerance = (3e-4 if numbers else 2e-5) if dtype == "float32" else 4e-3
            np.testing.assert_allclose(
                np.asarray(results[name]).astype(np.float64), expected, rtol=tolerance, atol=tolerance
            )


@pytest.mark.parametrize("seed", range(8))
def test_any_recurrence(seed: int) -> None:
    check_case(seed)


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(8, 208))
def test_more_recurrences(seed: int) -> None:
    check_case(seed)


@pytest.mark.parametrize("value", [-5, 99])
def test_lengths_that_do_not_fit(value: int) -> None:
    """A length out of range is clamped to the sequence."""
    node = helper.make_node("RNN", ["x", "w", "r", "", "lens"], ["y"], hidden_size=4)
    w = {n: np.ones((1, 4, 4), np.float32) / 9 for n in "wr"}
    inputs = [value_info("x", "float32", ["L", "B", 4]), value_info("lens", "int32", ["B"])]
    proto = make_model([node], inputs, [value_info("y", "float32", ["L", 1, "B", 4])], 22,
                       [numpy_helper.from_array(a, n) for n, a in w.items()])  # fmt: skip
    x = np.ones((3, 2, 4), np.float32)
    lens = np.asarray([value, 2], np.int32)
    actual = np.asarray(lowering.compile(proto)(x=x, lens=lens)["y"])
    expected, _ = run_recurrence("RNN", {"x": x, "lens": lens, **w}, [[np.tanh]], [False])
    np.testing.assert_allclose(actual, expected, atol=1e-6)


@pytest.mark.parametrize(
    "attributes, words",
    [
        ({"direction": "both"}, "attribute direction is 'both'"),
        ({"hidden_size": 3}, "attribute hidden_size is 3, for 4 units"),
        ({"activations": ["Tanh"]}, "attribute activations is"),
        ({"activations": ["Cosh"] * 3}, "attribute activations is"),
    ],
)
def test_refusals(attributes: dict[str, Any], words: str) -> None:
    node = helper.make_node("LSTM", ["x", "w", "r"], ["y"], **attributes)
    constants = [numpy_helper.from_array(np.zeros((1, 16, 4), np.float32), n) for n in "wr"]
    proto = make_model([node], [value_info("x", "float32", ["L", "B", 4])],
                       [value_info("y", "float32", ["L", 1, "B", 4])], 22, constants)  # fmt: skip
    with pytest.raises(NodeError, match=words):
        lowering.compile(proto)


def test_bfloat16() -> None:
    rng = np.random.default_rng(5)
    weights = {n: (rng.standard_normal((1, 48, 16)) * 0.3).astype(ml_dtypes.bfloat16) for n in "wr"}
    node = helper.make_node("GRU", ["x", "w", "r"], ["y"], hidden_size=16)
    proto = make_model([node], [value_info("x", "bfloat16", ["L", "B", 16])],
                       [value_info("y", "bfloat16", ["L", 1, "B", 16])], 22,
                       [numpy_helper.from_array(a, n) for n, a in weights.items()])  # fmt: skip
    x = rng.standard_normal((6, 2, 16)).astype(ml_dtypes.bfloat16)
    acts = make_activations(0, 0)
    expected, _ = run_recurrence("GRU",
                                 {"x": x.astype(np.float32), **{n: a.astype(np.float32) for n, a in weights.items()}},
                                 [[acts["Sigmoid"], acts["Tanh"]]], [False])  # fmt: skip
    actual = np.asarray(lowering.compile(proto)(x=x)["y"]).astype(np.float64)
    np.testing.assert_allclose(actual, expected, atol=1e-2)
