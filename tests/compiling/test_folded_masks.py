"""Masks that are computed from positions, lengths, ids and small tables never exist as tensors."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
import tvm
from tvm import relax

import lowering
import schedules
from lowering.attention.record.formula import Formula
from lowering.attention.record.problem import ATTRIBUTE, AttentionProblem

SAMPLES = Path(__file__).parents[1] / "exports" / "samples"
HEADS, KV_HEADS, D = 4, 2, 16
LOWEST = float(np.finfo(np.float32).min)

# i and j are the positions of queries and keys among the keys, [S, 1] and [1, T]; numbers are spelled out.
PRELUDE = """
    zero = Constant<value_int=0>() one = Constant<value_int=1>() first = Constant<value_ints=[0]>()
    second = Constant<value_ints=[1]>() third = Constant<value_ints=[2]>() middle = Constant<value_ints=[1, 2]>()
    S = Shape<start=2, end=3>(q) Ss = Squeeze(S) Tt = Shape<start=2, end=3>(k) Ts = Squeeze(Tt) past = Sub(Ts, Ss)
    seq = Range(zero, Ss, one) shifted = Add(seq, past) i = Unsqueeze(shifted, second)
    keys = Range(zero, Ts, one) j = Unsqueeze(keys, first)
"""


@dataclass(frozen=True)
class Case:
    """body computes `mask` from i, j and the inputs; expected does so from arrays i, j and the inputs' arrays."""

    body: str
    expected: Callable[..., np.ndarray]
    inputs: dict[str, tuple[str, str]] = field(default_factory=dict)
    folded: bool = True
    atol: float = 3e-6

    def model(self) -> onnx.ModelProto:
        parameters = "".join(f", {dtype}[{dims}] {name}" for name, (dtype, dims) in self.inputs.items())
        return onnx.parser.parse_model(f"""<ir_version: 10, opset_import: ["" : 23]>
            g (float[B, {HEADS}, S, {D}] q, float[B, {KV_HEADS}, T, {D}] k, float[B, {KV_HEADS}, T, {D}] v{parameters})
            => (float[B, {HEADS}, S, {D}] y) {{ {PRELUDE} {self.body} y = Attention (q, k, v, mask) }}""")


def padding(b: int, t: int, rng: np.random.Generator) -> np.ndarray:
    """Ones for the tokens that count: padded on the left, on the right, everywhere."""
    ends = rng.integers(0, t + 1, b)
    return np.stack([np.arange(t) < end if k % 2 else np.arange(t) >= end for k, end in enumerate(ends)]).astype(
        np.int64
    )


def documents(b: int, t: int, rng: np.random.Generator) -> np.ndarray:
    return np.sort(rng.integers(0, 4, (b, t)), axis=1)


def positions(b: int, t: int, rng: np.random.Generator) -> np.ndarray:
    return rng.integers(0, 2, (b, t)).cumsum(1)


INPUTS = {"pad": padding, "doc": documents, "step": positions}
PAD, DOC = {"pad": ("int64", "B, T")}, {"doc": ("int64", "B, T")}


def additive(visible: np.ndarray, lowest: float = LOWEST) -> np.ndarray:
    return np.where(visible, np.float32(0), np.float32(lowest))


CASES = {
    "causal": Case("mask = LessOrEqual (j, i)", lambda i, j: j <= i),
    "window": Case(
        """c = LessOrEqual (j, i) w = Constant<value_int=5>() d = Sub (i, j) near = Less (d, w) mask = And (c, near)""",
        lambda i, j: (j <= i) & (i - j < 5),
    ),
    "padding": Case(
        "valid = Cast<to=9> (pad) mask = Unsqueeze (valid, middle)", lambda i, j, pad: pad[:, None, None] > 0, PAD
    ),
    "causal and padding by GatherND": Case(
        """c = LessOrEqual (j, i) valid = Cast<to=9> (pad) B = Shape<start=0, end=1>(pad) Bs = Squeeze (B)
        batches = Range (zero, Bs, one) b4 = Constant<value_ints=[1, 2, 3]>() b = Unsqueeze (batches, b4)
        j4 = Constant<value_ints=[0, 1]>() jj = Unsqueeze (j, j4) both = Max (b, jj) shape = Shape (both)
        be = Expand (b, shape) je = Expand (jj, shape) last = Constant<value_ints=[4]>() b5 = Unsqueeze (be, last)
        j5 = Unsqueeze (je, last) at = Concat<axis=-1> (b5, j5) p = GatherND (valid, at) mask = And (c, p)""",
        lambda i, j, pad: (j <= i) & (pad[:, None, None] > 0),
        PAD,
    ),
    "additive with the lowest number": Case(
        """c = LessOrEqual (j, i) valid = Cast<to=9> (pad) p = Unsqueeze (valid, middle) seen = And (c, p)
        o = Constant<value_float=0.0>() low = Constant<value_float=-3.4028234663852886e38>()
        mask = Where (seen, o, low)""",
        lambda i, j, pad: additive((j <= i) & (pad[:, None, None] > 0)),
        PAD,
    ),
    "one minus the mask times the lowest number": Case(
        """x = Cast<to=1> (pad) p = Unsqueeze (x, middle) o = Constant<value_float=1.0>() m = Sub (o, p)
        low = Constant<value_float=-3.4028234663852886e38>() mask = Mul (m, low)""",
        lambda i, j, pad: additive(pad[:, None, None] > 0),
        PAD,
    ),
    "ten thousand": Case(
        """x = Cast<to=1> (pad) p = Unsqueeze (x, middle) o = Constant<value_float=1.0>() m = Sub (o, p)
        low = Constant<value_float=-10000.0>() mask = Mul (m, low)""",
        lambda i, j, pad: additive(pad[:, None, None] > 0, -1e4),
        PAD,
        atol=2e-3,  # as float32 rounds accumulators of such numbers
    ),
    "minus infinity by Trilu": Case(
        """full = Concat<axis=0> (S, Tt) low = ConstantOfShape<value = float[1] {-inf}> (full)
        above = Add (past, one) mask = Trilu<upper=1> (low, above)""",
        lambda i, j: np.where(j > i, np.float32(-np.inf), np.float32(0)),
    ),
    "documents": Case(
        """a = Unsqueeze (doc, third) start = Unsqueeze (past, first) ends = Unsqueeze (Ts, first)
        mine = Slice (a, start, ends, second) b = Unsqueeze (doc, second) same = Equal (mine, b)
        s4 = Unsqueeze (same, second) c = LessOrEqual (j, i)
        mask = And (s4, c)""",
        lambda i, j, doc: (doc[:, None, i[:, 0], None] == doc[:, None, None]) & (j <= i),
        DOC,
    ),
    "positions by CumSum": Case(
        """p = CumSum (step, one) a = Unsqueeze (p, third) start = Unsqueeze (past, first) ends = Unsqueeze (Ts, first)
        mine = Slice (a, start, ends, second) b = Unsqueeze (p, second) no = Less (b, mine) n4 = Unsqueeze (no, second)
        mask = Not (n4)""",
        lambda i, j, step: step.cumsum(1)[:, None, None] >= step.cumsum(1)[:, None, i[:, 0], None],
        {"step": ("int64", "B, T")},
    ),
    "prefix": Case(
        """c = LessOrEqual (j, i) three = Constant<value_int=3>() p = Less (j, three) mask = Or (c, p)""",
        lambda i, j: (j <= i) | (j < 3),
    ),
    "blocks": Case(
        """four = Constant<value_int=4>() bi = Div (i, four) bj = Div (j, four) mask = Equal (bi, bj)""",
        lambda i, j: i // 4 == j // 4,
    ),
    "dilated": Case(
        """d = Sub (i, j) three = Constant<value_int=3>() r = Mod (d, three) mask = Equal (r, zero)""",
        lambda i, j: (i - j) % 3 == 0,
    ),
    "ALiBi": Case(
        """d = Sub (j, i) x = Cast<to=1> (d) slopes = Constant<value = float[4, 1, 1] {0.5, 0.25, 0.125, 0.0625}> ()
        bias = Mul (slopes, x) c = LessOrEqual (j, i) low = Constant<value_float=-inf>() mask = Where (c, bias, low)""",
        lambda i, j: np.where(j <= i, (0.5 ** np.arange(1, 5, dtype="f"))[:, None, None] * (j - i), -np.inf).astype(
            "f"
        ),
    ),
    "relative bias by logarithmic buckets": Case(
        """d = Sub (j, i) n = Neg (d) zeros = Sub (n, n) m = Max (n, zeros) x = Cast<to=1> (m)
        o = Constant<value_float=1.0>() y1 = Add (x, o) l = Log (y1) bucket = Cast<to=7> (l) b = Gather (table, bucket)
        mask = Transpose<perm=[2, 0, 1]> (b)""",
        lambda i, j, table: table[np.log(np.maximum(i - j, 0).astype("f") + 1).astype(int)].transpose(2, 0, 1),
        {"table": ("float", f"8, {HEADS}")},
    ),
    "an input": Case(
        "mask = Identity (visible)", lambda i, j, visible: visible, {"visible": ("bool", "B, 1, S, T")}, False
    ),
    "a matmul": Case(
        """fi = Cast<to=1> (i) fj = Cast<to=1> (j) p = MatMul (fi, fj) h = Constant<value_float=30.0>()
        mask = Less (p, h)""",
        lambda i, j: i * j < 30,
        {},
        False,
    ),
}


def attend(q: np.ndarray, k: np.ndarray, v: np.ndarray, mask: np.ndarray) -> np.ndarray:
    """As the standard says it, in float64."""
    k, v = (np.repeat(x.astype(float), HEADS // KV_HEADS, axis=1) for x in (k, v))
    scores = q.astype(float) @ k.swapaxes(-1, -2) / np.sqrt(D)
    bias = np.where(mask, 0, -np.inf) if mask.dtype == bool else mask.astype(float)
    if mask.dtype == np.float32 and mask.min(initial=0) == np.float32(LOWEST):
        scores = np.where(bias == LOWEST, LOWEST, scores + bias)  # as float32 rounds the sum
    else:
        scores = scores + bias
    m = scores.max(-1, keepdims=True, initial=-np.inf)
    p = np.exp(scores - np.where(m == -np.inf, 0, m))
    l = p.sum(-1, keepdims=True)
    return np.divide(p, l, out=np.zeros_like(p), where=l > 0) @ v


@pytest.mark.sampled(3)
@pytest.mark.parametrize("name", CASES)
def test_equals_the_mask_it_replaces(name: str) -> None:
    case = CASES[name]
    modules: dict[str, tvm.IRModule] = {}
    model = lowering.compile(case.model(), dump=modules.__setitem__)
    assert is_folded(modules["eliminate_folded"]) == case.folded
    rng = np.random.default_rng(0)
    for b, s, t in [(1, 1, 1), (2, 7, 7), (3, 1, 70), (2, 70, 70), (1, 5, 200), (2, 150, 260)]:
        feeds: dict[str, Any] = {
            "q": rng.standard_normal((b, HEADS, s, D), "f"),
            "k": rng.standard_normal((b, KV_HEADS, t, D), "f"),
            "v": rng.standard_normal((b, KV_HEADS, t, D), "f"),
        }
        extra: dict[str, Any] = {n: INPUTS[n](b, t, rng) for n in case.inputs if n in INPUTS}
        extra |= {n: rng.standard_normal((8, HEADS), "f") for n in case.inputs if n == "table"}
        extra |= {n: rng.integers(0, 2, (b, 1, s, t)).astype(bool) for n in case.inputs if n == "visible"}
        i, j = np.arange(t - s, t)[:, None], np.arange(t)[None]
        expected = attend(**feeds, mask=case.expected(i, j, **extra))
        actual = model.run({**feeds, **extra})["y"]
        np.testing.assert_allclose(actual, expected, atol=case.atol, err_msg=f"{b} {s} {t}")


@pytest.mark.parametrize("name", ["documents", "additive with the lowest number"])
def test_the_plain_lowering_evaluates_formulas_too(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(schedules.RULES, "llvm", ())
    test_equals_the_mask_it_replaces(name)


def is_folded(module: tvm.IRModule) -> bool:
    """Whether the attention has a formula, and no tensor rows and keys."""
    records = [f.attrs[ATTRIBUTE] for _, f in module.functions_items() if f.attrs and ATTRIBUTE in f.attrs]
    (problem,) = map(AttentionProblem.from_json, records)
    if not isinstance(problem.mask, Formula):
        return False
    for block in module["main"].body.blocks:
        for binding in block.bindings:
            shape = getattr(binding.var.ty, "shape", None)
            names = {str(d) for d in shape.values} if isinstance(shape, relax.ShapeExpr) else set()
            assert not {"S", "T"} <= names, binding
    return True


PREFILL = """
import sys
import numpy as np
import lowering

def peak():
    return int(next(line for line in open("/proc/self/status") if line.startswith("VmHWM")).split()[1]) / 1024

model = lowering.load(sys.argv[1])
tokens = int(sys.argv[2])
inputs = {"input_ids": np.zeros((1, tokens), np.int64), "attention_mask": np.ones((1, tokens), np.int64)}
for spec in model.inputs:
    if spec.name.startswith("past"):
        inputs[spec.name] = np.zeros([1, *(0 if isinstance(d, str) else d for d in spec.dims[1:])], spec.dtype)
before = peak()
model.run(inputs)
print(peak() - before)
"""


def test_memory_of_a_prefill_is_linear(tmp_path: Path) -> None:
    """A decoder with sliding windows at 4096 tokens: one byte per pair alone would be 16 MiB."""
    lowering.compile(SAMPLES / "mistral-past-dynamo18" / "model.onnx").save(tmp_path / "m")
    grown = {}
    for tokens in (1024, 4096):
        command = [sys.executable, "-c", PREFILL, str(tmp_path / "m"), str(tokens)]
        grown[tokens] = float(subprocess.run(command, check=True, capture_output=True, text=True).stdout)
    assert grown[4096] < 6 and grown[4096] < 6 * max(grown[1024], 0.5)
