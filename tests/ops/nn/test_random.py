"""Random operators: the random bits of Philox 4x32-10, the numbers computed from them, and the sources of seeds."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper

import lowering
from tests.ops.expectations import import_node, value_info
from tests.support.error_codes import raises

MULTIPLIERS, KEY_STEPS = (0xD2511F53, 0xCD9E8D57), (0x9E3779B9, 0xBB67AE85)


def run_philox(counter: np.ndarray, seed: int) -> np.ndarray:
    """Run Philox 4x32-10 of the paper. counter is uint64 [..., 4], with 32 bits in each element; so is the result."""
    values, key = [counter[..., k].astype(np.uint64) for k in range(4)], [seed % 2**32, seed >> 32]
    for number in range(10):
        keys = [np.uint64((k + number * step) % 2**32) for k, step in zip(key, KEY_STEPS)]
        first, second = (value * np.uint64(factor) for value, factor in zip(values[::2], MULTIPLIERS))
        half, low = np.uint64(32), np.uint64(2**32 - 1)
        values = [
            (second >> half) ^ values[1] ^ keys[0],
            second & low,
            (first >> half) ^ values[3] ^ keys[1],
            first & low,
        ]
    return np.stack(values, axis=-1)


def draw_stream(count: int, seed: int, stream: int, step: int = 0) -> np.ndarray:
    """Return the first random bits of a node's stream, 32 in each element."""
    counter = np.zeros((-(-count // 4), 4), np.uint64)
    counter[:, 0], counter[:, 2], counter[:, 3] = np.arange(len(counter)), stream, step
    return run_philox(counter, seed).reshape(-1)[:count]


@pytest.mark.parametrize(
    ("counter", "seed", "expected"),
    [
        ((0, 0, 0, 0), 0, (0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8)),
        ((2**32 - 1,) * 4, 2**64 - 1, (0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD)),
        (
            (0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344),
            0x299F31D0A4093822,
            (0xD16CFE09, 0x94FDCCEB, 0x5001E420, 0x24126EA1),
        ),
    ],
)
def test_the_reference_gives_published_values(counter: Sequence[int], seed: int, expected: Sequence[int]) -> None:
    """Published results of Random123, the library of the paper's authors."""
    assert tuple(run_philox(np.array(counter, np.uint64), seed).tolist()) == expected


def make_random_node(operator: str, output: str, *inputs: str, **attributes: Any) -> onnx.NodeProto:
    return helper.make_node(operator, list(inputs), [output], name=f"node_{output}", **attributes)


def make_random_model(
    nodes: Sequence[onnx.NodeProto],
    outputs: Mapping[str, str],
    inputs: Mapping[str, tuple[str, Sequence[int | str]]] | None = None,
    ranks: Mapping[str, int] | None = None,
) -> onnx.ModelProto:
    """Return a model of opset 22. outputs are types by name; outputs without an entry in ranks are vectors."""
    graph_inputs = [value_info(name, *kind) for name, kind in (inputs or {}).items()]
    graph_outputs = [
        value_info(name, dtype, [f"{name}_{axis}" for axis in range((ranks or {}).get(name, 1))])
        for name, dtype in outputs.items()
    ]
    graph = helper.make_graph(list(nodes), "random", graph_inputs, graph_outputs)
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 22)], ir_version=10)


def run_model(model: onnx.ModelProto, feeds: Mapping[str, np.ndarray] | None = None, **options: Any) -> dict[str, Any]:
    return lowering.compile(model, **options).run(dict(feeds or {}))


def test_uniform_numbers_are_random_bits_as_fractions() -> None:
    """Results are equal bit for bit, in every type, size and seed: each random node has the stream of its index."""
    nodes = [
        make_random_node("RandomUniform", "first", shape=[3, 5]),
        make_random_node("RandomUniform", "seeded", shape=[7], seed=3.0),
        make_random_node("RandomUniform", "fraction", shape=[8], seed=2.5),
        make_random_node("RandomUniform", "negative", shape=[6], seed=-2.0),
        make_random_node("RandomUniform", "wide", shape=[2, 2], dtype=TensorProto.DOUBLE),
        make_random_node("RandomUniformLike", "like", "x"),
        make_random_node("RandomUniform", "moved", shape=[9], low=-2.0, high=2.0),
        make_random_node("RandomUniformLike", "scalar", "s"),
        make_random_node("RandomUniform", "empty", shape=[0, 3]),
    ]
    types = {str(node.output[0]): "float64" if node.output[0] == "wide" else "float32" for node in nodes}
    ranks = {"first": 2, "wide": 2, "like": 2, "scalar": 0, "empty": 2}
    model = make_random_model(nodes, types, {"x": ("float32", ["n", "m"]), "s": ("float32", [])}, ranks)
    seed = 0x123456789ABCDEF
    actual = run_model(model, {"x": np.zeros((11, 13), np.float32), "s": np.float32(0)}, seed=seed)

    def fractions(shape: Sequence[int], seed: int, stream: int) -> np.ndarray:
        values = draw_stream(math.prod(shape), seed, stream)
        return ((values >> np.uint64(8)).astype(np.float32) * np.float32(2**-24)).reshape(shape)

    half_bits = int(np.float64(2.5).view(np.int64))
    expected = {
        "first": fractions([3, 5], seed, 0),
        "seeded": fractions([7], 3, 1),
        "fraction": fractions([8], half_bits, 2),
        "negative": fractions([6], 2**64 - 2, 3),
        "like": fractions([11, 13], seed, 5),
        "moved": fractions([9], seed, 6) * np.float32(4) - np.float32(2),
        "scalar": fractions([], seed, 7),
        "empty": np.zeros((0, 3), np.float32),
    }
    upper, lower = draw_stream(8, seed, 4).reshape(4, 2).T
    whole = (upper >> np.uint64(5)).astype(np.float64) * 2**26 + (lower >> np.uint64(6)).astype(np.float64)
    expected["wide"] = (whole * 2**-53).reshape(2, 2)
    for name, array in expected.items():
        assert actual[name].dtype == array.dtype, name
        np.testing.assert_array_equal(actual[name], array, err_msg=name)


def compute_distance(sample: np.ndarray, distribution: Any) -> float:
    """Return Kolmogorov and Smirnov's statistic: the largest distance of the empirical distribution from the other."""
    ordered = np.sort(sample.astype(np.float64).ravel())
    expected, steps = distribution(ordered), np.arange(ordered.size + 1) / ordered.size
    return float(max(np.max(steps[1:] - expected), np.max(expected - steps[:-1])))


def compute_normal_cdf(x: np.ndarray) -> np.ndarray:
    return np.array([0.5 * math.erfc(-value / math.sqrt(2)) for value in x])


COUNT = 20000
# The statistics of a correct generator exceed these for about one of 10^5 seeds; the seeds are fixed.
DISTANCE, DEVIATIONS = 2.5 / math.sqrt(COUNT), 4.5


@pytest.fixture(scope="module")
def samples() -> dict[str, np.ndarray]:
    """Draw many numbers of each type, by two nodes of each with the same attributes."""
    kinds = {"float16": TensorProto.FLOAT16, "float32": TensorProto.FLOAT, "float64": TensorProto.DOUBLE}
    nodes, types = [], {}
    for name, dtype in kinds.items():
        for copy in "ab":
            nodes.append(make_random_node("RandomNormalLike", f"normal_{name}_{copy}", "x", dtype=dtype))
            uniform = {"low": -1.0, "high": 3.0}
            nodes.append(make_random_node("RandomUniformLike", f"uniform_{name}_{copy}", "x", dtype=dtype, **uniform))
            types |= {f"{kind}_{name}_{copy}": name for kind in ("normal", "uniform")}
    nodes.append(make_random_node("RandomNormalLike", "moved", "x", mean=5.0, scale=0.25, seed=1.0))
    nodes.append(make_random_node("RandomNormal", "other_seed", shape=[COUNT], seed=2.0))
    types |= {"moved": "float32", "other_seed": "float32"}
    return run_model(make_random_model(nodes, types, {"x": ("float32", ["n"])}), {"x": np.zeros(COUNT, np.float32)})


@pytest.mark.parametrize("dtype", ["float16", "float32", "float64"])
def test_normal_numbers_have_their_distribution(samples: dict[str, np.ndarray], dtype: str) -> None:
    for copy in "ab":
        sample = samples[f"normal_{dtype}_{copy}"].astype(np.float64)
        assert abs(sample.mean()) < DEVIATIONS / math.sqrt(COUNT)
        assert abs(sample.var() - 1) < DEVIATIONS * math.sqrt(2 / COUNT)
        assert abs((sample**3).mean()) < DEVIATIONS * math.sqrt(15 / COUNT)
        assert compute_distance(sample, compute_normal_cdf) < DISTANCE


@pytest.mark.parametrize("dtype", ["float16", "float32", "float64"])
def test_uniform_numbers_have_their_distribution(samples: dict[str, np.ndarray], dtype: str) -> None:
    for copy in "ab":
        sample = samples[f"uniform_{dtype}_{copy}"].astype(np.float64)
        assert sample.min() >= -1 and sample.max() <= 3
        assert abs(sample.mean() - 1) < DEVIATIONS * math.sqrt(16 / 12 / COUNT)
        assert abs(sample.var() - 16 / 12) < DEVIATIONS * math.sqrt(256 / 180 / COUNT)
        assert compute_distance(sample, lambda x: (x + 1) / 4) < DISTANCE


def test_mean_and_scale(samples: dict[str, np.ndarray]) -> None:
    assert compute_distance((samples["moved"].astype(np.float64) - 5) / 0.25, compute_normal_cdf) < DISTANCE


def test_streams_are_independent(samples: dict[str, np.ndarray]) -> None:
    """Nodes, neighbors within one node, and seeds do not correlate."""
    bound = DEVIATIONS / math.sqrt(COUNT)
    names = sorted(samples)
    correlations = np.corrcoef(np.stack([samples[name].astype(np.float64) for name in names]))
    assert np.abs(correlations - np.eye(len(names))).max() < bound
    for name in names:
        wide = samples[name].astype(np.float64)
        for distance in (1, 2, 3, 4):
            assert abs(np.corrcoef(wide[:-distance], wide[distance:])[0, 1]) < bound, (name, distance)


LIKE = [make_random_node("RandomNormalLike", "y", "x"), make_random_node("RandomUniformLike", "z", "x")]
LIKE_MODEL = make_random_model(LIKE, {"y": "float32", "z": "float32"}, {"x": ("float32", ["n"])})
X = np.zeros(5000, np.float32)


def test_numbers_are_the_same_in_every_call_and_on_every_target() -> None:
    compiled = lowering.compile(LIKE_MODEL, threads=1)
    first = compiled.run({"x": X})
    assert all(np.array_equal(compiled.run({"x": X})[name], first[name]) for name in first)
    for options in ({"threads": 4}, {"target": "cpu:x86-64-v3"}, {"seed": np.int64(0)}):
        other = run_model(LIKE_MODEL, {"x": X}, **options)
        np.testing.assert_array_equal(other["z"], first["z"])
        np.testing.assert_allclose(other["y"], first["y"], atol=2e-6)
    shorter = compiled.run({"x": X[:77]})  # the length of a draw does not change the stream
    np.testing.assert_array_equal(shorter["z"], first["z"][:77])


def test_calls_may_give_the_seed() -> None:
    """The seed is an input of the model; the same number as an option gives the same results."""
    compiled = lowering.compile(LIKE_MODEL, seed="noise_seed")
    assert [(spec.name, spec.dtype, tuple(spec.dims)) for spec in compiled.inputs][-1] == ("noise_seed", "int64", ())
    zero, first, large, repeated = (
        compiled.run({"x": X, "noise_seed": np.int64(seed)}) for seed in (0, 1, 2**62 + 5, 1)
    )
    for name in ("y", "z"):
        np.testing.assert_array_equal(first[name], repeated[name])
        assert not (first[name] == zero[name]).any() or abs(np.corrcoef(first[name], zero[name])[0, 1]) < 0.07
        assert abs(np.corrcoef(large[name], zero[name])[0, 1]) < 0.07
    np.testing.assert_array_equal(run_model(LIKE_MODEL, {"x": X}, seed=2**62 + 5)["z"], large["z"])


@pytest.mark.parametrize("seed", [-1, 2**63, 1.5, "", "x", "y"])
def test_other_seeds_are_refused(seed: Any) -> None:
    with raises("argument.integer_invalid", "option.seed_name_invalid"):
        lowering.compile(LIKE_MODEL, seed=seed)


def test_verify_compares_no_random_numbers() -> None:
    with raises("verify.model_random"):
        lowering.verify(LIKE_MODEL)


@pytest.mark.parametrize(
    ("ratio", "training", "is_random"), [(0.5, False, False), (0.0, True, False), (0.5, True, True)]
)
def test_verify_takes_dropout_of_inference(ratio: float, training: bool, is_random: bool) -> None:
    constants = [
        helper.make_node("Constant", [], ["ratio"], value_float=ratio),
        helper.make_node("Constant", [], ["t"], value=onnx.numpy_helper.from_array(np.array(training))),
    ]
    nodes = [*constants, helper.make_node("Dropout", ["x", "ratio", "t"], ["y", "mask"])]
    model = make_random_model(nodes, {"y": "float32", "mask": "bool"}, {"x": ("float32", [3])})
    if is_random:
        with raises("verify.model_random"):
            lowering.verify(model)
    else:
        assert lowering.verify(model).first_difference is None


def test_a_seed_that_nobody_reads_is_refused() -> None:
    seeded = make_random_model(
        [make_random_node("RandomNormalLike", "y", "x", seed=1.0)], {"y": "float32"}, {"x": ("float32", [3])}
    )
    with raises("option.seed_unused"):
        lowering.compile(seeded, seed="noise_seed")


@pytest.mark.parametrize("trips", [3, None])
def test_steps_of_loops_draw_other_numbers(trips: int | None) -> None:
    """Loops are unrolled (with a static number of steps) or run at run time, with a second loop inside."""

    def body(name: str, nodes: Sequence[onnx.NodeProto], result: str, dims: Sequence[int | str]) -> onnx.GraphProto:
        inputs = [value_info(f"{name}_i", "int64", []), value_info(f"{name}_go", "bool", [])]
        outputs = [value_info(f"{name}_on", "bool", []), value_info(result, "float32", dims)]
        passed = helper.make_node("Identity", [f"{name}_go"], [f"{name}_on"])
        return helper.make_graph([passed, *nodes], name, inputs, outputs)

    inner = body("inner", [make_random_node("RandomUniform", "u", shape=[6])], "u", [6])
    nested = helper.make_node("Loop", ["count", ""], ["many"], body=inner)
    outer = body("outer", [nested], "many", ["steps", 6])
    count = [] if trips is None else [helper.make_node("Constant", [], ["count"], value_int=trips)]
    nodes = [*count, helper.make_node("Loop", ["count", ""], ["y"], body=outer)]
    inputs = {"count": ("int64", [])} if trips is None else {}
    got = run_model(
        make_random_model(nodes, {"y": "float32"}, inputs, {"y": 3}), {name: np.int64(3) for name in inputs}
    )["y"]
    assert got.shape == (3, 3, 6)
    assert len(np.unique(got)) == got.size


def test_bernoulli() -> None:
    """The rate is the probability of each element, for all types."""
    nodes = [
        make_random_node("Bernoulli", "half", "p"),
        make_random_node("Bernoulli", "flag", "p", dtype=TensorProto.BOOL),
        make_random_node("Bernoulli", "whole", "p", dtype=TensorProto.INT32, seed=4.0),
        make_random_node("Bernoulli", "wide", "q"),
        make_random_node("Bernoulli", "small", "h", dtype=TensorProto.INT8),
    ]
    types = {"half": "float32", "flag": "bool", "whole": "int32", "wide": "float64", "small": "int8"}
    inputs = {name: (dtype, ["n", "m"]) for name, dtype in (("p", "float32"), ("q", "float64"), ("h", "float16"))}
    shares = np.broadcast_to(np.array([0.0, 0.125, 0.5, 0.875, 1.0]), (4000, 5))
    feeds = {name: shares.astype(dtype) for name, (dtype, _) in inputs.items()}
    got = run_model(make_random_model(nodes, types, inputs, dict.fromkeys(types, 2)), feeds)
    for name, dtype in types.items():
        assert got[name].dtype == dtype and set(np.unique(got[name])) == {0, 1}
        mean = got[name].astype(np.float64).mean(axis=0)
        bound = DEVIATIONS * np.sqrt(shares[0] * (1 - shares[0]) / len(shares))
        assert (abs(mean - shares[0]) <= bound).all(), name


@pytest.mark.parametrize("logits_type", ["float16", "float32", "float64"])
def test_multinomial(logits_type: str) -> None:
    """Classes of weight 0 are never drawn, whichever they are; logits may be unnormalized."""
    weights = np.array([[0, 1, 2, 0, 5, 0], [3, 0, 0, 0, 0, 1], [1, 1, 1, 1, 1, 1], [0, 0, 0, 9, 0, 0]], np.float64)
    with np.errstate(divide="ignore"):
        logits = np.log(weights) + np.array([[0], [3], [-20], [8]])
    nodes = [
        make_random_node("Multinomial", "y", "x", sample_size=8000),
        make_random_node("Multinomial", "one", "x", dtype=TensorProto.INT64),
        make_random_node("Multinomial", "none", "x", sample_size=0),
    ]
    types, inputs = {"y": "int32", "one": "int64", "none": "int32"}, {"x": (logits_type, ["batch", "classes"])}
    got = run_model(make_random_model(nodes, types, inputs, dict.fromkeys(types, 2)), {"x": logits.astype(logits_type)})
    assert got["one"].shape == (4, 1) and got["one"].dtype == np.int64 and got["none"].shape == (4, 0)
    shares = weights / weights.sum(axis=1, keepdims=True)
    counted = np.stack([np.bincount(row, minlength=6) for row in got["y"]]) / 8000
    assert (counted[shares == 0] == 0).all()
    slack = 0.01 if logits_type == "float16" else 0.0
    assert (abs(counted - shares) <= DEVIATIONS * np.sqrt(shares * (1 - shares) / 8000) + slack).all()


def test_dropout_in_training() -> None:
    """Remaining values are scaled by 1 / (1 - ratio), so that means stay; the mask marks them."""
    nodes = [
        helper.make_node("Dropout", ["x", "ratio", "training"], ["y", "mask"]),
        helper.make_node("Dropout", ["x", "", "training"], ["default"], seed=5),
        helper.make_node("Dropout", ["h", "ratio", "training"], ["half"]),
    ]
    inputs = {"x": ("float32", ["n"]), "h": ("float16", ["n"]), "ratio": ("float32", []), "training": ("bool", [])}
    compiled = lowering.compile(
        make_random_model(nodes, {"y": "float32", "mask": "bool", "default": "float32", "half": "float16"}, inputs)
    )
    x = np.linspace(1, 2, COUNT, dtype=np.float32)
    feeds = {"x": x, "h": x.astype(np.float16)}
    got = compiled.run({**feeds, "ratio": np.float32(0.2), "training": np.array(True)})
    np.testing.assert_allclose(got["y"], np.where(got["mask"], x / np.float32(0.8), 0), rtol=1e-6)
    assert abs(got["mask"].mean() - 0.8) < DEVIATIONS * math.sqrt(0.16 / COUNT)
    assert abs((got["default"] != 0).mean() - 0.5) < DEVIATIONS * math.sqrt(0.25 / COUNT)
    assert abs((got["half"] != 0).mean() - 0.8) < DEVIATIONS * math.sqrt(0.16 / COUNT)
    for ratio, training in ((0.2, False), (0.0, True)):
        got = compiled.run({**feeds, "ratio": np.float32(ratio), "training": np.array(training)})
        np.testing.assert_array_equal(got["y"], x)
        assert got["mask"].all()


@pytest.mark.parametrize(
    ("operator", "inputs", "attributes", "message"),
    [
        ("RandomNormalLike", [("int32", (2,))], {}, "int32.*dtype"),
        ("RandomNormal", [], {"shape": [2, -1]}, "0 or more"),
        ("RandomUniform", [], {"shape": [2], "seed": math.nan}, "seed.*finite"),
        ("RandomUniformLike", [("float32", (2,))], {"seed": math.inf}, "seed.*finite"),
        ("Multinomial", [("float32", (2,))], {}, "rank 1"),
        ("Multinomial", [("float32", (2, 0))], {}, "no classes"),
        ("Multinomial", [("float32", (2, 3))], {"sample_size": -1}, "sample_size"),
    ],
)
def test_errors_name_the_node(operator: str, inputs: Any, attributes: dict[str, Any], message: str) -> None:
    with pytest.raises(lowering.NodeError, match=f"(?s){operator}.*{message}"):
        import_node(operator, inputs, opset=22, **attributes)
