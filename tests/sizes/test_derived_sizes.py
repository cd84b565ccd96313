"""Sizes of inputs that nodes require to be totals of others: `bench` and `verify` do not ask for them."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import onnx
import pytest

import lowering
from lowering.commands.cli import main
from lowering.profiling.inputs import add_derived_sizes, resolve_sizes
from tests.support.error_codes import raises

ATTENTION = """
  new_k = Concat <axis = 2> (past_k, k)
  kt = Transpose <perm = [0, 1, 3, 2]> (new_k)
  s = MatMul (q, kt)
  axes = Constant <value = int64[2] {1, 2}> ()
  wide = Unsqueeze (mask, axes)
  sm = Add (s, wide)
  p = Softmax <axis = -1> (sm)
  y = MatMul (p, new_k)
"""

# By description of the model: inputs, nodes, the derived sizes.
MODELS: dict[str, tuple[str, str, dict[str, dict[str, int]]]] = {
    "a decoder": (
        "float[b, 2, n, 8] q, float[b, 2, n, 8] k, float[b, 2, p, 8] past_k, float[b, t] mask",
        ATTENTION,
        {"t": {"p": 1, "n": 1}},
    ),
    "of one token": (
        "float[b, 2, 1, 8] q, float[b, 2, 1, 8] k, float[b, 2, past_length, 8] past_k, float[b, total_length] mask",
        ATTENTION,
        {"total_length": {"past_length": 1, "": 1}},
    ),
    "names that mislead": (
        'float[b, 2, "a b", 8] q, float[b, 2, "a b", 8] k, float[b, 2, P, 8] past_k, float[b, "P + 1"] mask',
        ATTENTION,
        {"P + 1": {"P": 1, "a b": 1}},
    ),
    "a sum": (
        "float[m] x, float[n] z, float[s] w",
        "c = Concat <axis = 0> (x, z) y = Add (c, w)",
        {"s": {"m": 1, "n": 1}},
    ),
    "a sum before its parts": (
        "float[s] w, float[m] x, float[n] z",
        "c = Concat <axis = 0> (x, z, x) y = Mul (w, c)",
        {"s": {"m": 2, "n": 1}},
    ),
    "equal names": ("float[m, 3] x, float[n, 3] z", "y = Add (x, z)", {"n": {"m": 1}}),
    "a matmul": ("float[3, m] x, float[n, 4] z", "y = MatMul (x, z)", {"n": {"m": 1}}),
    "a sum of a sum": (
        "float[m] x, float[n] z, float[s] w, float[t] v",
        "c = Concat <axis = 0> (x, z) d = Add (c, w) e = Concat <axis = 0> (w, x) y = Add (e, v) u = Neg (d)",
        {"s": {"m": 1, "n": 1}, "t": {"s": 1, "m": 1}},
    ),
    "a mask of Attention 24": (
        "float[b, 2, n, 8] q, float[b, 2, n, 8] k, float[b, 2, p, 8] past_k, float[b, 1, n, t] mask",
        "new_k = Concat <axis = 2> (past_k, k) y = Attention (q, new_k, new_k, mask)",
        {"t": {"p": 1, "n": 1}},
    ),
    "nothing": ("float[m, 3] x, float[n, 3] z", "y = Concat <axis = 0> (x, z)", {}),
}


def parsed(case: str) -> onnx.ModelProto:
    inputs, nodes, _ = MODELS[case]
    rank = {"a mask of Attention 24": 4, "a sum": 1, "a sum before its parts": 1, "a sum of a sum": 1}.get(
        case, 4 if nodes is ATTENTION else 2
    )
    dims = ", ".join(f"y{k}" for k in range(rank))
    opset = 24 if "24" in case else 23
    return onnx.parser.parse_model(
        f'<ir_version: 10, opset_import: ["" : {opset}]> m ({inputs}) => (float[{dims}] y) {{ {nodes} }}'
    )


@pytest.fixture(scope="module")
def compiled(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    folder = tmp_path_factory.mktemp("derived")
    for number, case in enumerate(MODELS):
        onnx.save(parsed(case), folder / f"{number}.onnx")
        lowering.compile(folder / f"{number}.onnx").save(folder / f"{number}")
    return {case: folder / f"{number}" for number, case in enumerate(MODELS)}


@pytest.mark.sampled(6)
@pytest.mark.parametrize("case", MODELS)
def test_sizes_that_follow(case: str, compiled: dict[str, Path]) -> None:
    """They are in the manifest, and a run on synthetic inputs of the other sizes passes all checks."""
    module, derived = lowering.load(compiled[case]), MODELS[case][2]
    assert module.manifest.derived == derived
    names = {d for spec in module.inputs for d in spec.dims if isinstance(d, str)} - derived.keys()
    sizes = {name: 3 + position for position, name in enumerate(sorted(names))}
    profile = lowering.bench(module, sizes, seconds=0, warm_up=0)
    assert {**sizes, **{name: profile.sizes[name] for name in derived}} == profile.sizes
    for name, terms in derived.items():
        assert profile.sizes[name] == sum(n * (profile.sizes[k] if k else 1) for k, n in terms.items())


@pytest.mark.parametrize("case", MODELS)
def test_verify_needs_none_of_them(case: str, compiled: dict[str, Path], capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["verify", f"{compiled[case]}.onnx", "--artifact", str(compiled[case])]) == 0
    assert "all outputs agree" in capsys.readouterr().out


def test_what_is_missing_is_only_what_does_not_follow(compiled: dict[str, Path]) -> None:
    module = lowering.load(compiled["a decoder"])
    with raises("dims.size_missing"):
        lowering.bench(module, {"b": 1, "p": 2})
    assert resolve_sizes(module.manifest, {"b": 1, "p": 2, "n": 3, "t": 1}, {})["t"] == 1  # what is said counts
    inputs = {"mask": np.zeros((1, 7), np.float32)}
    assert resolve_sizes(module.manifest, {"p": 2, "n": 5}, inputs) == {"p": 2, "n": 5, "b": 1, "t": 7}


def test_derived_sizes_in_any_order() -> None:
    derived = {"c": {"b": 2, "": -3}, "b": {"a": 1, "": 1}, "x": {"y": 1}, "y": {"x": 1}, "z": {"a": -1}}
    sizes = {"a": 4}
    add_derived_sizes(sizes, derived)
    assert sizes == {"a": 4, "b": 5, "c": 7}  # no size is negative, and circular definitions stay open
    sizes = {"b": 2}
    add_derived_sizes(sizes, {"t": {"b": 1, "a": 1}}, default=4)
    assert sizes == {"b": 2, "t": 6}
