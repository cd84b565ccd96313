"""Element-wise functions and rows on emulated GPUs: any length, type and number of warps, and chunks of 16 bytes."""

from __future__ import annotations

from typing import Any

import ml_dtypes
import numpy as np
import onnx
import pytest
import tvm
from tvm import te, tirx, topi

import lowering
import schedules
from schedules.cuda.elementwise.reduction import RowReductionTiles
from schedules.variant import Variant
from tests import cuda_emulation as emulated
from tests.cuda.attention.prefill_cases import TURNS
from tests.cuda.audits.machine_code import global_accesses

EPS = {"float32": 2e-6, "float16": 2e-3, "bfloat16": 2e-2}


def function(dtype: str, sizes: tuple[int | str, ...], kind: str) -> tuple[Variant, str]:
    """Return the kernel of a function of x [sizes], computed in float32, and the rule that takes it."""
    symbols: dict[str, tirx.Var] = {}

    def size(n: int | str) -> Any:
        return tirx.IntImm("int64", n) if isinstance(n, int) else symbols.setdefault(n, tirx.Var(n, "int64"))

    shape = [size(n) for n in sizes]
    x, gain = te.placeholder(shape, dtype, "x"), te.placeholder(shape[-1:], dtype, "gain")
    wide = topi.cast(x, "float32")
    if kind == "softmax":
        result = topi.nn.softmax(wide, -1)
    elif kind == "norm":
        mean = topi.divide(topi.sum(topi.multiply(wide, wide), -1), shape[-1].astype("float32"))
        scale = topi.rsqrt(topi.add(mean, tirx.const(1e-6, "float32")))
        result = te.compute(shape, lambda *at: wide(*at) * scale(*at[:-1]) * gain(at[-1]).astype("float32"), "norm")
    elif kind == "largest":
        result = topi.max(wide, -1)
    else:
        result = topi.add(topi.multiply(topi.exp(wide), topi.cast(gain, "float32")), wide)
    operands = [x, gain] if kind in ("norm", "chain") else [x]
    func = te.create_prim_func([*operands, topi.cast(result, dtype)])
    rule, variants = schedules.find_variants(
        func, tvm.target.Target({"kind": "cuda", "arch": "sm_80"}, host="llvm")
    ) or (
        "",
        [],
    )
    return variants[0], rule


def expected(kind: str, x: np.ndarray, gain: np.ndarray) -> np.ndarray:
    x, gain = x.astype("float64"), gain.astype("float64")
    if kind == "softmax":
        e = np.exp(x - x.max(-1, keepdims=True))
        return e / e.sum(-1, keepdims=True)
    if kind == "norm":
        return x / np.sqrt((x * x).mean(-1, keepdims=True) + 1e-6) * gain
    return x.max(-1) if kind == "largest" else np.exp(x) * gain + x


def check(variant: Any, kind: str, dtype: str, shapes: list[tuple[int, ...]], turns: list[Any], **tiles: Any) -> None:
    module = emulated.module({"main": variant.make(**tiles)}, arch="sm_80")
    kind_of = np.dtype(getattr(ml_dtypes, dtype, dtype))
    for shape in shapes:
        rng = np.random.default_rng(sum(shape))
        x, gain = (rng.standard_normal(s).astype(kind_of) for s in (shape, shape[-1:]))
        want = expected(kind, x, gain)
        operands = [x, gain] if kind in ("norm", "chain") else [x]
        arrays = [*operands, np.full(want.shape, np.nan, kind_of)]
        for order, arrivals in turns:
            got = module.call("main", arrays, order=order, arrivals=arrivals)[-1].astype("float64")
            np.testing.assert_allclose(got, want, rtol=EPS[dtype], atol=EPS[dtype], err_msg=f"{kind} {dtype} {shape}")


RULES = {"softmax": "reduction", "norm": "reduction", "largest": "reduction", "chain": "elementwise"}
CASES = [(kind, dtype, length) for kind in RULES for dtype in EPS for length in (1, 8, 37, 264, 1032)]


@pytest.mark.sampled(7)
@pytest.mark.parametrize(("kind", "dtype", "length"), CASES)
def test_lengths_and_types(kind: str, dtype: str, length: int) -> None:
    variant, rule = function(dtype, ("b", 3, length), kind)
    assert rule == RULES[kind]
    check(variant, kind, dtype, [(1, 3, length), (3, 3, length), (0, 3, length)], TURNS[:1])


@pytest.mark.parametrize("kind", RULES)
def test_symbolic_lengths(kind: str) -> None:
    variant, rule = function("float16", ("b", "n"), kind)
    assert rule == RULES[kind]
    check(variant, kind, "float16", [(2, 40), (5, 33), (1, 700)], TURNS[:1])


@pytest.mark.parametrize("warps", [1, 2, 8])
def test_any_number_of_warps(warps: int) -> None:
    variant, _ = function("float32", ("b", 520), "softmax")
    check(variant, "softmax", "float32", [(5, 520)], TURNS, rows=RowReductionTiles(warps, block=2))


def test_nan_and_infinity_propagate() -> None:
    """The maximum of a row with NaN equals that of the plain function, whichever thread meets it."""
    variant, _ = function("float32", ("b", 264), "softmax")
    module = emulated.module({"main": variant.make()}, arch="sm_80")
    x = np.random.default_rng(0).standard_normal((3, 264)).astype("float32")
    x[0, 7], x[1, 100] = np.nan, -np.inf
    got = module.call("main", [x, np.full_like(x, np.nan)])[-1]
    assert np.isnan(got[0]).all() and got[1, 100] == 0 and np.isfinite(got[1:]).all()


@pytest.mark.no_gpu
@pytest.mark.parametrize(("kind", "loads"), [("chain", 2), ("norm", 3)])
def test_memory_is_read_in_chunks_of_16_bytes(kind: str, loads: int) -> None:
    variant, _ = function("float16", ("b", 1024), kind)
    widths = global_accesses(variant.make(), "sm_80")
    assert set(widths) == {("LDG", 128), ("STG", 128)} and widths["LDG", 128] >= loads


@pytest.mark.no_gpu
def test_halves_of_a_rotated_head_are_read_in_chunks_of_16_bytes() -> None:
    """Indices depend on the half and on the remainder of a column, but not within eight of them."""
    b = tirx.Var("b", "int64")
    n = [b, tirx.IntImm("int64", 64)]
    x, table = te.placeholder(n, "float16", "x"), te.placeholder([b, tirx.IntImm("int64", 32)], "float16", "table")
    step = [tirx.const(k, "int64") for k in (32, -32)]

    def rotated(i: Any, j: Any) -> Any:
        return x(i, j) + x(i, j + tirx.Select(j < 32, *step)) * table(i, j % 32)

    func = te.create_prim_func([x, table, te.compute(n, rotated)])
    rule, (variant,) = schedules.find_variants(func, tvm.target.Target({"kind": "cuda", "arch": "sm_80"})) or ("", [])
    assert rule == "elementwise"
    assert global_accesses(variant.make(), "sm_80") == {("LDG", 128): 3, ("STG", 128): 1}
    rng = np.random.default_rng(0)
    inputs = [rng.standard_normal(size).astype("float16") for size in ((3, 64), (3, 32))]
    got = emulated.module({"main": variant.make()}, arch="sm_80").call("main", [*inputs, np.zeros_like(inputs[0])])[-1]
    wide, angles = inputs[0].astype("float64"), np.tile(inputs[1], 2)
    np.testing.assert_allclose(got, wide + np.roll(wide, 32, 1) * angles, rtol=2e-3, atol=2e-3)


JOINED = """
<ir_version: 10, opset_import: ["" : 23]>
m (float16[b, 2, p, 8] a, float16[b, 2, s, 8] c, int8[p, 3] d, int8[s, 3] e, double[b, p] f, double[b, s] g, bool[p] h)
  => (float16[b, 2, q, 8] ac, int8[q, 3] de, double[b, q] fg, bool[r] hhh)
{
  ac = Concat <axis = 2> (a, c)
  de = Concat <axis = 0> (d, e)
  fg = Concat <axis = 1> (f, g)
  hhh = Concat <axis = 0> (h, h, h)
}
"""


def joined(sizes: list[tuple[int, int, int]]) -> list[str]:
    """Return the wrong concatenations, and the kernels of other rules."""
    model = lowering.compile(onnx.parser.parse_model(JOINED), "cuda:sm_80")
    errors = [kernel.name for kernel in model.manifest.kernels if kernel.schedule != "concat"]
    for b, p, s in sizes:
        rng = np.random.default_rng(b + p + s)
        shapes = {"a": (b, 2, p, 8), "c": (b, 2, s, 8), "d": (p, 3), "e": (s, 3), "f": (b, p), "g": (b, s), "h": (p,)}
        types = {spec.name: spec.dtype for spec in model.inputs}
        feeds = {name: (rng.random(shape) * 100).astype(types[name]) for name, shape in shapes.items()}
        got = model.run(feeds)
        for name, axis in (("ac", 2), ("de", 0), ("fg", 1), ("hhh", 0)):
            if not np.array_equal(got[name], np.concatenate([feeds[operand] for operand in name], axis)):
                errors.append(f"{name} at {b, p, s}")
    return errors


def test_concatenations() -> None:
    assert emulated.run(joined, [(2, 3, 1), (1, 16, 8), (3, 0, 5), (2, 4, 0)], arch="sm_80", timeout=300) == []


NUMBERS = """
<ir_version: 10, opset_import: ["" : 23]>
m (int64[b, 2000] x, int8[b, 2000] e, double[b, 2000] g, float[n] p, float[n] q)
  => (int64[b, 1] total, int64[b, 1] least, int8[b, 1] most, double[b, 1] totals, float[n] quotients)
  <int64[1] axis = {1}>
{
  total = ReduceSum (x, axis)
  least = ReduceMin (x, axis)
  most = ReduceMax (e, axis)
  totals = ReduceSum (g, axis)
  quotients = Div (p, q)
}
"""


def numbers() -> tuple[set[str], list[str]]:
    """Return the rules, and the wrong outputs.

    The rule of reductions that share a launch is "several". Inputs are whole numbers beyond 2^53, and quotients of
    subnormal and huge numbers."""
    model = lowering.compile(onnx.parser.parse_model(NUMBERS), "cuda:sm_80")
    rng = np.random.default_rng(0)
    x, e = rng.integers(2**55, 2**56, (3, 2000)), rng.integers(-128, 0, (3, 2000)).astype("int8")
    g, inf = rng.standard_normal((3, 2000)), np.inf
    p = np.array([1e-40, 0, 1e38, 3, 1, 1e-39, inf, 1, 5e-45, -1e-20], "float32")
    q = np.array([1e-40, 1e-40, 2e38, 1e-39, 0, 2, inf, inf, 5e-45, 3e30], "float32")
    got = model.run({"x": x, "e": e, "g": g, "p": p, "q": q})
    with np.errstate(all="ignore"):
        want = {"total": x.sum(1), "least": x.min(1), "most": e.max(1), "totals": g.sum(1), "quotients": p / q}
    wrong = [k for k, v in want.items() if not np.allclose(got[k].ravel(), v, rtol=1e-6, atol=0, equal_nan=True)]
    wrong += [k for k in ("total", "least", "most") if not np.array_equal(got[k].ravel(), want[k])]
    return {kernel.schedule for kernel in model.manifest.kernels}, wrong


def test_numbers_beyond_the_range_of_another_type() -> None:
    assert emulated.run(numbers, arch="sm_80", timeout=300) == ({"several", "elementwise"}, [])
