"""Matmuls of matrices on tensor cores, emulated: right for every order of operands, size, epilogue and split of k."""

from __future__ import annotations

import dataclasses
import math
from dataclasses import dataclass
from typing import Any

import ml_dtypes
import numpy as np
import pytest
import tvm
from tvm import te, tirx, topi

from schedules.cuda.matmul.matmul import accepts_siblings, matmul
from schedules.cuda.matmul.matmul_tiles import MatmulTiles, WgmmaMatmulTiles
from schedules.reading.matmul import MATMULS
from schedules.variant import Variant
from tests import cuda_emulation as emulated
from tests.cuda.attention.prefill_cases import TURNS
from tests.cuda.audits.machine_code import machine_code

Arrays = list[np.ndarray]
SMALL = MatmulTiles(32, 32, 32, 2, 1, 3, swizzle=2, split_steps=2)


@dataclass(frozen=True)
class Case:
    """C [batch, m, n] = A [batch, m, k] B [batch, k, n] under an epilogue. A size that is a string is symbolic."""

    m: int | str = "m"
    n: int | str = 96
    k: int | str = 72
    dtype: str = "float16"
    batch: int | str | None = None
    a_transposed: bool = False
    b_transposed: bool = False
    epilogue: str = "bias"
    """bias, residual, float32, gate (two matmuls), or none."""
    tiles: MatmulTiles | None = SMALL
    sizes: tuple[dict[str, int], ...] = ({"m": 1}, {"m": 45})
    matmuls: str = ""
    """tf32 or 3xtf32, of float32."""

    def function(self) -> tirx.PrimFunc:
        symbols: dict[str, tirx.Var] = {}

        def size(n: int | str) -> Any:
            return tirx.IntImm("int64", n) if isinstance(n, int) else symbols.setdefault(n, tirx.Var(n, "int64"))

        m, n, k = map(size, (self.m, self.n, self.k))
        outer = () if self.batch is None else (size(self.batch),)
        a = te.placeholder((*outer, k, m) if self.a_transposed else (*outer, m, k), self.dtype, "a")
        names = ("b", "up") if self.epilogue == "gate" else ("b",)
        shape = (*outer, n, k) if self.b_transposed else (*outer, k, n)
        bs = [te.placeholder(shape, self.dtype, name) for name in names]

        def matmul(b: te.Tensor) -> te.Tensor:
            step = te.reduce_axis((0, k), "step")

            def element(*index: Any) -> Any:
                *o, i, j = index
                x = a(*o, step, i) if self.a_transposed else a(*o, i, step)
                y = b(*o, j, step) if self.b_transposed else b(*o, step, j)
                return te.sum(x.astype("float32") * y.astype("float32"), axis=step)

            return te.compute((*outer, m, n), element, b.op.name)

        matmuls = [topi.cast(matmul(b), self.dtype) for b in bs]
        operands = [a, *bs]
        if self.epilogue == "bias":
            operands.append(te.placeholder((n,), self.dtype, "bias"))
            result = topi.add(matmuls[0], operands[-1])
        elif self.epilogue == "residual":
            operands.append(te.placeholder((*outer, m, n), self.dtype, "residual"))
            result = topi.add(topi.tanh(matmuls[0]), operands[-1])
        elif self.epilogue == "gate":
            result = topi.multiply(topi.multiply(matmuls[0], topi.sigmoid(matmuls[0])), matmuls[1])
        else:
            result = topi.cast(matmuls[0], "float32") if self.epilogue == "float32" else matmuls[0]
        func = te.create_prim_func([*operands, result])
        return func.with_attr(MATMULS, self.matmuls) if self.matmuls else func

    def arrays(self, sizes: dict[str, int]) -> tuple[Arrays, np.ndarray]:
        """Return random finite inputs, and the expected result in float64."""
        rng = np.random.default_rng(sum(sizes.values()))
        kind = np.dtype(getattr(ml_dtypes, self.dtype, self.dtype))
        m, n, k = (s if isinstance(s, int) else sizes[s] for s in (self.m, self.n, self.k))
        outer = () if self.batch is None else (self.batch if isinstance(self.batch, int) else sizes[self.batch],)

        def draw(*shape: int) -> np.ndarray:
            return rng.standard_normal(shape).astype(kind)

        a = draw(*outer, k, m) if self.a_transposed else draw(*outer, m, k)
        bs = [
            draw(*outer, n, k) if self.b_transposed else draw(*outer, k, n)
            for _ in range(2 if self.epilogue == "gate" else 1)
        ]
        x = a.astype("float64").swapaxes(-1, -2) if self.a_transposed else a.astype("float64")
        ys = [b.astype("float64").swapaxes(-1, -2) if self.b_transposed else b.astype("float64") for b in bs]
        matmuls, operands = [x @ y / 1.0 for y in ys], [a, *bs]
        result = matmuls[0]
        if self.epilogue == "bias":
            operands.append(draw(n))
            result = result + operands[-1].astype("float64")
        elif self.epilogue == "residual":
            operands.append(draw(*outer, m, n))
            result = np.tanh(result) + operands[-1].astype("float64")
        elif self.epilogue == "gate":
            result = result / (1 + np.exp(-result)) * matmuls[1]
        stored = "float32" if self.epilogue == "float32" else kind
        return [*operands, np.full((*outer, m, n), np.nan, stored)], result


def first_variant(case: Case, arch: str = "sm_80") -> Variant:
    return (matmul(case.function(), tvm.target.Target({"kind": "cuda", "arch": arch}, host="llvm")) or [])[0]


def make_module(case: Case, arch: str = "sm_80", rows: int | None = None) -> emulated.Module:
    """Build a module. `rows` is the largest number of rows for the small-M kernel."""
    variant = first_variant(case, arch)
    tiles: dict[str, Any] = {} if case.tiles is None else {"tiles": case.tiles}
    if case.tiles is not None and "low" in variant.tiles:
        tiles["low"] = case.tiles
    if rows is not None:
        tiles["rows"] = dataclasses.replace(variant.tiles["rows"], rows=rows)
    return emulated.module({"main": variant.make(**tiles)}, arch=arch)


EPS = {"float16": 2.0**-10, "bfloat16": 2.0**-7, "tf32": 2.0**-10, "3xtf32": 2.0**-20}


def check(case: Case, module: emulated.Module, turns: list[tuple[Any, Any]]) -> None:
    for sizes in case.sizes:
        arrays, want = case.arrays(sizes)
        for order, arrivals in turns:
            got = module.call("main", arrays, order=order, arrivals=arrivals)[-1].astype("float64")
            # Matmuls of normal numbers are as large as the root of the number of terms.
            scale = math.sqrt(sizes.get("k", case.k if isinstance(case.k, int) else 1)) * (
                np.abs(want).max() / max(np.abs(want).std(), 1e-9) if case.epilogue == "gate" else 1
            )
            eps = EPS[case.matmuls or case.dtype]
            np.testing.assert_allclose(got, want, rtol=2 * eps, atol=2 * eps * scale, err_msg=f"{case} {sizes}")


CASES = {
    "columns of B": Case(),
    "rows of B": Case(b_transposed=True),
    "A transposed, residual": Case(m=40, a_transposed=True, epilogue="residual", sizes=({},)),
    "bfloat16, gate": Case(epilogue="gate", dtype="bfloat16", n=48, tiles=dataclasses.replace(SMALL, n=64)),
    "k in parts": Case(k=256, epilogue="residual", b_transposed=True),
    "k in parts, gate": Case(k=264, epilogue="gate", tiles=dataclasses.replace(SMALL, n=64)),
    "nothing is a multiple": Case(n=37, k=19, epilogue="float32"),
    "columns are none": Case(n=37, k=24, b_transposed=True),
    "symbolic columns": Case(n="n", k=40, epilogue="residual", sizes=({"m": 33, "n": 40}, {"m": 5, "n": 37})),
    "symbolic depth": Case(k="k", batch=2, sizes=({"m": 33, "k": 48}, {"m": 7, "k": 21}, {"m": 7, "k": 0})),
    "batches": Case(batch="b", b_transposed=True, epilogue="residual", sizes=({"b": 3, "m": 40}, {"b": 0, "m": 4})),
    "default tiles": Case(m=130, n=136, k=80, tiles=None, sizes=({},)),
}


@pytest.mark.sampled(3)
@pytest.mark.parametrize("name", CASES)
def test_equals_float64(name: str) -> None:
    case = CASES[name]
    check(case, make_module(case), TURNS[:1])


@pytest.mark.slow
@pytest.mark.parametrize("name", CASES)
def test_every_order_of_threads_and_copies(name: str) -> None:
    case = CASES[name]
    check(case, make_module(case), TURNS[1:])


HOPPER = WgmmaMatmulTiles(1, 64, 3, 160, 24, swizzle=2, split_steps=2)
ON_HOPPER = {
    "columns of B": Case(tiles=HOPPER, sizes=({"m": 17}, {"m": 130})),
    "rows of B": Case(b_transposed=True, tiles=HOPPER, epilogue="residual", sizes=({"m": 17}, {"m": 130})),
    "bfloat16, gate, k in parts": Case(
        k=272, batch=2, epilogue="gate", dtype="bfloat16", tiles=WgmmaMatmulTiles(2, 128, 3, 160, 24, 2, 2)
    ),
    "ragged": Case(n=37, k=40, b_transposed=True, epilogue="float32", tiles=HOPPER),
    "batches": Case(batch="b", b_transposed=True, tiles=HOPPER, sizes=({"b": 3, "m": 40}, {"b": 0, "m": 4})),
    "default tiles": Case(m=260, n=520, k=200, b_transposed=True, tiles=None, sizes=({},)),
}


@pytest.mark.sampled(4)
@pytest.mark.parametrize("name", ON_HOPPER)
def test_on_hopper(name: str) -> None:
    """By TMA and wgmma, under every order of threads and of asynchronous work."""
    case = ON_HOPPER[name]
    check(case, make_module(case, "sm_90a"), TURNS)


@pytest.mark.no_gpu
def test_what_tma_does_not_reach_is_left_to_mma() -> None:
    """Rows whose length is not a multiple of 16 bytes, or symbolic, and A across k."""
    for case in (Case(k=19), Case(k="k"), Case(m=40, a_transposed=True), Case(n=37)):
        variants = matmul(case.function(), tvm.target.Target({"kind": "cuda", "arch": "sm_90a"}, host="llvm"))
        assert [variant.name for variant in variants or ()] == ["mma"], case


FEW = {
    "one row": Case(k=2064, b_transposed=True, sizes=({"m": 1}, {"m": 2}, {"m": 0})),
    "gate": Case(k=200, n=40, b_transposed=True, epilogue="gate", sizes=({"m": 1}, {"m": 8})),
    "ragged columns": Case(k=72, n=37, b_transposed=True, epilogue="residual", dtype="bfloat16", sizes=({"m": 13},)),
}


@pytest.mark.parametrize("name", FEW)
def test_small_m(name: str) -> None:
    case = FEW[name]
    check(case, make_module(case, rows=8 if case.epilogue == "gate" else 16), TURNS[:2])


def three_matmuls(m: Any, depth: int, widths: tuple[int, ...]) -> tirx.PrimFunc:
    """Return A times three matrices of different widths, the first with a bias: queries, keys and values."""
    k = tirx.IntImm("int64", depth)
    a = te.placeholder((m, k), "float16", "a")
    bs = [te.placeholder((tirx.IntImm("int64", n), k), "float16", f"b{i}") for i, n in enumerate(widths)]
    bias = te.placeholder((tirx.IntImm("int64", widths[0]),), "float16", "bias")

    def matmul(b: te.Tensor) -> te.Tensor:
        step = te.reduce_axis((0, k), "step")

        def element(i: Any, j: Any) -> Any:
            return te.sum(a(i, step).astype("float32") * b(j, step).astype("float32"), axis=step)

        return topi.cast(te.compute((m, b.shape[0]), element, b.op.name), "float16")

    q, *rest = map(matmul, bs)
    return te.create_prim_func([a, *bs, bias, topi.add(q, bias), *rest])


@pytest.mark.sampled(2)
@pytest.mark.parametrize("arch", ["sm_80", "sm_90a"])
def test_queries_keys_and_values_are_one_function(arch: str) -> None:
    """Small M takes one launch for all three, large M one launch each."""
    widths, depth = (72, 24, 40), 264
    func = three_matmuls(tirx.Var("m", "int64"), depth, widths)
    target = tvm.target.Target({"kind": "cuda", "arch": arch}, host="llvm")
    assert accepts_siblings(func, target) is False  # it is full
    (variant, *_) = matmul(func, target) or []
    module = emulated.module({"main": variant.make()}, arch=arch)
    rng = np.random.default_rng(7)
    for m in (1, 5, 45):
        a = rng.standard_normal((m, depth)).astype("float16")
        bs = [rng.standard_normal((n, depth)).astype("float16") for n in widths]
        bias = rng.standard_normal(widths[0]).astype("float16")
        arguments = [a, *bs, bias, *(np.full((m, n), np.nan, "float16") for n in widths)]
        after = module.call("main", arguments, order=TURNS[0][0], arrivals=TURNS[0][1])[-3:]
        want = [a.astype("float64") @ b.astype("float64").T for b in bs]
        want[0] = want[0] + bias
        for got, right in zip(after, want):
            np.testing.assert_allclose(got.astype("float64"), right, rtol=2e-3, atol=2e-2)


def test_tiles_change_no_result() -> None:
    """Tiles far from the default, where they are legal."""
    rng = np.random.default_rng(3)
    case = Case(m=70, n=72, k=104, tiles=None, sizes=({},))
    for kind, arch in ((MatmulTiles, "sm_80"), (WgmmaMatmulTiles, "sm_90a")):
        variant = first_variant(case, arch)
        space = kind.space(variant.problem, variant.machine)
        for _ in range(3):
            drawn = kind(**{name: values[rng.integers(len(values))] for name, values in space.items()})
            tiles = drawn.nearest_legal(variant.problem, variant.machine)
            print(tiles)
            check(case, emulated.module({"main": variant.make(tiles=tiles)}, arch=arch), TURNS[:1])


@pytest.mark.no_gpu
def test_illegal_tiles_are_refused() -> None:
    variant = first_variant(Case())
    with pytest.raises(ValueError, match="at least 2"):
        variant.make(tiles=dataclasses.replace(SMALL, stages=1))
    with pytest.raises(ValueError, match="power of two"):
        variant.make(tiles=dataclasses.replace(SMALL, m=48))


@pytest.mark.no_gpu
def test_other_matmuls_are_left() -> None:
    target = tvm.target.Target({"kind": "cuda", "arch": "sm_80"}, host="llvm")
    a, b = (te.placeholder((tirx.IntImm("int64", 8), tirx.IntImm("int64", 8)), "float32", name) for name in "ab")
    assert matmul(te.create_prim_func([a, b, topi.matmul(a, b)]), target) is None


AUDITED = {
    "sm_80": Case(n=768, k=768, tiles=None),
    "sm_120": Case(n=768, k=768, b_transposed=True, epilogue="gate", tiles=None),
    "sm_90a": Case(n=4096, k=8192, b_transposed=True, epilogue="residual", tiles=None),
    "sm_90a, gate": Case(n=4096, k=8192, b_transposed=True, epilogue="gate", tiles=None),
    "sm_90a, ping-pong": Case(n=4096, k=256, b_transposed=True, epilogue="residual", tiles=None),
    "sm_90a, few": Case(m=48, n=768, k=768, epilogue="float32", tiles=None),
}


@pytest.mark.sampled(6)
@pytest.mark.no_gpu
@pytest.mark.parametrize("name", AUDITED)
def test_machine_code(name: str) -> None:
    """Tensor cores, no register in memory, and no complaint of ptxas."""
    arch = name.split(",")[0]
    variant = first_variant(AUDITED[name], arch)
    code = machine_code(variant.make(), arch)
    assert (code.spills, code.stack, code.said) == (0, 0, "")
    if arch != "sm_90a":
        tiles = variant.tiles["tiles"]
        # 16 x 8 x 16 each, of a warp and a step along k
        assert code.loop["HMMA"] == tiles.m * tiles.n * tiles.k // (tiles.threads // 32) // 2048
        assert code.loop["LDGSTS"] == (tiles.m + tiles.n) * tiles.k // 8 // tiles.threads
        return
    assert code.whole["HGMMA"] and code.whole["UTMALDG"]
    assert code.whole["MEMBAR"] <= 4, "a fence of the whole GPU in addition to those of the cluster's two barriers"
    moved = variant.tiles["tiles"].consumer_registers > 65536 // variant.tiles["tiles"].threads
    assert code.whole["USETMAXREG"] == (2 if moved else 0)
