"""Scores that FlexAttention's graphs change one by one are never materialized; those that depend on others are."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import lowering
import schedules
from lowering.attention.record.problem import ATTRIBUTE, AttentionProblem
from lowering.runtime.model import Model
from tests.support.error_codes import raises

from .flex_models import HEADS, KV_HEADS, D, attend, draw_operands, make_model

SIZES = [(1, 1, 1), (2, 7, 7), (3, 1, 70), (2, 70, 70), (1, 150, 260)]
BUCKETS = 9


@dataclass(frozen=True)
class Case:
    """body computes r from s, i, j and the inputs, and may name nodes before FlexAttention; expected computes it from
    arrays. record_fields are the fields of the attention record: "softcap", "score", "mask"; None where
    scores stay a tensor. keys is the name of the number of keys."""

    body: str
    expected: Callable[..., np.ndarray]
    record_fields: tuple[str, ...] | None
    inputs: dict[str, str] = field(default_factory=dict)
    around: str = ""
    keys: str = "N"


def hide_scores(s: np.ndarray, visible: np.ndarray) -> np.ndarray:
    return np.where(visible, s, -np.inf)


CAUSAL = "seen = GreaterOrEqual(i, j) r = Where(seen, x, low)"
CLIPPED = """least = Constant<value_int=-4>() most = Constant<value_int=4>() near = Clip(d, least, most)
    at = Sub(near, least)"""
PAD, TABLE = {"pad": "int64[B, N]"}, {"table": f"float[{BUCKETS}, {HEADS}]"}

CASES = {
    "the same": Case("r = Identity(s)", lambda s, i, j: s, ()),
    "causal": Case("x = Identity(s) " + CAUSAL, lambda s, i, j: hide_scores(s, i >= j), ("mask",)),
    "soft cap": Case(
        "c = Constant<value_float=3.0>() a = Div(s, c) t = Tanh(a) r = Mul(t, c)",
        lambda s, i, j: 3 * np.tanh(s / 3),
        ("softcap",),
    ),
    "soft cap, bias by distance and causal": Case(
        f"""c = Constant<value_float=3.0>() a = Div(s, c) t = Tanh(a) capped = Mul(t, c)
        bias = Constant<value = float[{BUCKETS}] {{4.0, 3.0, 2.0, 1.0, 0.0, -1.0, -2.0, -3.0, -4.0}}>() {CLIPPED}
        b = Gather(bias, at) x = Add(capped, b) {CAUSAL}""",
        lambda s, i, j: hide_scores(3 * np.tanh(s / 3) - np.clip(i - j, -4, 4), i >= j),
        ("softcap", "score", "mask"),
    ),
    "bias by head and distance from outside": Case(
        f"{CLIPPED} b = Gather(table, at) t = Transpose<perm=[2, 0, 1]>(b) r = Add(s, t)",
        lambda s, i, j, table: s + table[np.clip(i - j, -4, 4) + 4].transpose(2, 0, 1),
        ("score",),
        TABLE,
    ),
    "ALiBi": Case(
        """slopes = Constant<value = float[4, 1, 1] {0.5, 0.25, 0.125, 0.0625}>() f = Cast<to=1>(d)
        b = Mul(slopes, f) x = Sub(s, b) """
        + CAUSAL,
        lambda s, i, j: hide_scores(s - (0.5 ** np.arange(1, 5))[:, None, None] * (i - j), i >= j),
        ("score", "mask"),
    ),
    "padding from outside": Case(
        "p = Unsqueeze(valid, middle) r = Where(p, s, low)",
        lambda s, i, j, pad: hide_scores(s, pad[:, None, None] > 0),
        ("mask",),
        PAD,
        "valid = Cast<to=9>(pad)",
    ),
    "an added padding mask, computed outside": Case(
        "x = Add(s, m) " + CAUSAL,
        lambda s, i, j, pad: hide_scores(s, (pad[:, None, None] > 0) & (i >= j)),
        ("mask",),
        PAD,
        """valid = Cast<to=9>(pad) z = Constant<value_float=0.0>() l = Constant<value_float=-inf>()
        axes = Constant<value_ints=[1, 2]>() w = Where(valid, z, l) m = Unsqueeze(w, axes)""",
    ),
    "documents": Case(
        """third = Constant<value_ints=[1, 3]>() a = Unsqueeze(ids, third) b = Unsqueeze(ids, middle)
        same = Equal(a, b) r = Where(same, s, low)""",
        lambda s, i, j, ids: hide_scores(s, ids[:, None, i[:, 0], None] == ids[:, None, None]),
        ("mask",),
        {"ids": "int64[B, S]"},
        keys="S",
    ),
    "a bias for each pair from outside": Case(
        "r = Add(s, pairs)", lambda s, i, j, pairs: s + pairs, ("score",), {"pairs": "float[S, N]"}
    ),
    "a mask for each pair from outside": Case(
        "r = Where(shown, s, low)",
        lambda s, i, j, shown: hide_scores(s, shown),
        ("mask",),
        {"shown": "bool[B, 1, S, N]"},
    ),
    "the lowest number": Case(
        "l = Constant<value_float=-3.0e38>() seen = GreaterOrEqual(i, j) r = Where(seen, s, l)",
        lambda s, i, j: np.where(i >= j, s, -3e38),
        ("score",),
    ),
    "a function": Case("r = Softplus(s)", lambda s, i, j: np.log1p(np.exp(s)), ("score",)),
    "by the sign": Case(
        "o = Constant<value_float=0.0>() p = Greater(s, o) h = Mul(s, s) r = Where(p, h, s)",
        lambda s, i, j: np.where(s > 0, s * s, s),
        ("score",),
    ),
    "the largest only": Case(
        "m = ReduceMax(s, last) best = Equal(s, m) r = Where(best, s, low)",
        lambda s, i, j: hide_scores(s, s == s.max(-1, keepdims=True)),
        None,
    ),
    "less the mean of all keys": Case(
        "m = ReduceMean(s, last) r = Sub(s, m)", lambda s, i, j: s - s.mean(-1, keepdims=True), None
    ),
    "cumulative": Case("axis = Constant<value_int=3>() r = CumSum(s, axis)", lambda s, i, j: s.cumsum(-1), None),
    "of the key before": Case(
        """pads = Constant<value_ints=[0, 0, 0, 1, 0, 0, 0, 0]>() w = Pad(s, pads) z = Constant<value_ints=[0]>()
        minus = Constant<value_ints=[-1]>() p = Slice(w, z, minus, last) r = Add(s, p)""",
        lambda s, i, j: s + np.pad(s, [(0, 0)] * 3 + [(1, 0)])[..., :-1],
        None,
    ),
    "by a matmul": Case(
        "t = Transpose<perm=[0, 1, 3, 2]>(s) p = MatMul(s, t) m = ReduceMean(p, last) r = Add(s, m)",
        lambda s, i, j: s + (s @ s.swapaxes(-1, -2)).mean(-1, keepdims=True),
        None,
    ),
}


def draw_inputs(case: Case, b: int, s: int, t: int) -> dict[str, np.ndarray]:
    """Draw the case's inputs other than q, k and v."""
    rng = np.random.default_rng(1)
    ends = rng.integers(1, t + 1, b)
    arrays: dict[str, Any] = {
        "pad": (np.arange(t) < ends[:, None]).astype(np.int64),
        "ids": np.sort(rng.integers(0, 4, (b, t)), axis=1),
        "table": rng.standard_normal((BUCKETS, HEADS), "f"),
        "pairs": rng.standard_normal((s, t), "f"),
        "shown": rng.integers(0, 2, (b, 1, s, t)) > 0,
    }
    return {name: arrays[name] for name in case.inputs}


def compile_case(case: Case, **options: Any) -> Model:
    kv = f"B, {KV_HEADS}, {case.keys}, {D}"
    return lowering.compile(make_model(case.body, kv=kv, inputs=case.inputs, around=case.around), **options)


def check_equal(case: Case, module: Model) -> None:
    for b, s, t in SIZES:
        if case.keys == "S" and s != t:
            continue
        inputs, extra_inputs = draw_operands(b, s, t), draw_inputs(case, b, s, t)
        expected = attend(**inputs, score=case.expected, **extra_inputs)
        actual = module.run({**inputs, **extra_inputs})["y"]
        np.testing.assert_allclose(actual, expected, atol=2e-5, err_msg=f"{b} {s} {t}")


@pytest.mark.sampled(3)
@pytest.mark.parametrize("name", CASES)
def test_equals_the_scores_it_replaces(name: str) -> None:
    case, modules = CASES[name], {}
    module = compile_case(case, dump=modules.__setitem__)
    records = [
        f.attrs[ATTRIBUTE] for _, f in modules["eliminate_folded"].functions_items() if f.attrs and ATTRIBUTE in f.attrs
    ]
    (record,) = map(AttentionProblem.from_json, records)
    (kernel,) = (k for k in module.manifest.kernels if k.kind == "attention")
    assert kernel.schedule == "attention"  # not "plain"
    rows_and_keys = [dims for k in module.manifest.kernels for dims in k.arguments if {"S", "N"} <= {*dims}]
    assert bool(rows_and_keys) == (case.record_fields is None)
    if case.record_fields is not None:
        assert (
            tuple(record_field for record_field in ("softcap", "score", "mask") if getattr(record, record_field))
            == case.record_fields
        )
    check_equal(case, module)


@pytest.mark.parametrize("name", ["soft cap, bias by distance and causal", "documents", "less the mean of all keys"])
def test_the_plain_lowering_evaluates_formulas_too(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(schedules.RULES, "llvm", ())
    check_equal(CASES[name], compile_case(CASES[name]))


@pytest.mark.parametrize("name", ["soft cap, bias by distance and causal", "ALiBi"])
def test_static_sizes_do_not_fold_tables_of_pairs(name: str) -> None:
    """Positions are static numbers here, but tables of S x T elements are not folded from them."""
    case = CASES[name]
    sizes = {"q": f"1, {HEADS}, 150, {D}", "kv": f"1, {KV_HEADS}, 260, {D}"}
    module = lowering.compile(make_model(case.body, **sizes))
    (kernel,) = module.manifest.kernels[:1]
    assert kernel.kind == "attention"
    assert all(len(dims) == 1 for dims in kernel.arguments if any("table" in dim for dim in dims))
    inputs = draw_operands(1, 150, 260)
    np.testing.assert_allclose(module.run(inputs)["y"], attend(**inputs, score=case.expected), atol=2e-5)


def test_indices_from_outside_are_checked() -> None:
    """Indices that a graph reads by are in range, or the call is an error before anything is read."""
    body = "w = Gather(table, at) b = Unsqueeze(w, zeros) r = Add(s, b)"
    around = "zeros = Constant<value_ints=[0, 1, 2]>()"
    inputs = {"table": "float[M]", "at": "int64[N]"}
    module = lowering.compile(make_model(body, inputs=inputs, around=around))
    arrays = draw_operands(1, 3, 4) | {"table": np.arange(5, dtype="f"), "at": np.array([0, 4, -5, 1])}
    expected = attend(**draw_operands(1, 3, 4), score=lambda s, i, j: s + arrays["table"][arrays["at"]])
    np.testing.assert_allclose(module.run(arrays)["y"], expected, atol=2e-6)
    for outside in (5, -6, 2**40):
        with raises("run.index_out_of_range"):
            module.run({**arrays, "at": np.array([0, outside, 1, 1])})


def test_distances_beyond_a_table_are_checked() -> None:
    """An index bounded by positions is compared with the table once, before the attention."""
    body = "n = Sub(key_count, one) e = Add(d, n) b = Gather(table, e) r = Add(s, b)"
    module = lowering.compile(make_model(body, inputs={"table": "float[M]"}))
    arrays = draw_operands(1, 3, 4) | {"table": np.arange(6, dtype="f")}
    expected = attend(**draw_operands(1, 3, 4), score=lambda s, i, j: s + arrays["table"][i - j + 3])
    np.testing.assert_allclose(module.run(arrays)["y"], expected, atol=2e-6)
    with raises("run.index_out_of_range"):
        module.run({**arrays, "table": np.arange(5, dtype="f")})


def test_a_bias_of_other_sizes_is_an_error() -> None:
    module = lowering.compile(make_model("r = Add(s, pairs)", inputs={"pairs": "float[P, Q]"}))
    arrays = draw_operands(1, 3, 4) | {"pairs": np.ones((3, 4), "f")}
    module.run(arrays)
    for shape in ((2, 4), (3, 5), (1, 4)):
        with raises("run.size_mismatch"):
            module.run({**arrays, "pairs": np.ones(shape, "f")})


LONG = """
import sys
import numpy as np
import lowering

def peak():
    return int(next(line for line in open("/proc/self/status") if line.startswith("VmHWM")).split()[1]) / 1024

model = lowering.load(sys.argv[1])
tokens = int(sys.argv[2])
inputs = {"q": np.zeros((1, 4, tokens, 16), "f")} | {n: np.zeros((1, 2, tokens, 16), "f") for n in "kv"}
before = peak()
model.run(inputs)
print(peak() - before)
"""


def test_memory_is_linear_in_the_length(tmp_path: Path) -> None:
    """At 4096 tokens the scores of a head would be 64 MiB; Y is 1 MiB."""
    compile_case(CASES["soft cap, bias by distance and causal"]).save(tmp_path / "m")
    command = [sys.executable, "-c", LONG, str(tmp_path / "m"), "4096"]
    assert float(subprocess.run(command, check=True, capture_output=True, text=True).stdout) < 8
