"""The variants of every rule, and their tiles: a tuner changes speed, never results."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

import numpy as np
import pytest
import tvm
from tvm import te, tirx, topi

import schedules
from lowering.attention.codegen.plain import build_plain_attention
from lowering.attention.record.problem import AttentionProblem, Window
from lowering.passes.tvm_workarounds.guard_divisions import guard_divisions
from lowering.tensorir.scatter import CacheUpdate, make_copying_update
from schedules.reading.quantized_weights import NIBBLES, PanelFormat, dequantize_element
from schedules.reading.row_segments import SEGMENTS
from schedules.tiles import Tiles
from schedules.variant import Choice, Variant

CPU = tvm.target.Target({"kind": "llvm", "mcpu": "x86-64-v3"})
WIDE = tvm.target.Target({"kind": "llvm", "mcpu": "x86-64-v4"})
GPU = tvm.target.Target({"kind": "cuda", "arch": "sm_90a"})


def attention(dtype: str = "float32") -> AttentionProblem:
    types = {"dtype": dtype, "v_dtype": dtype, "acc_dtype": "float32"}
    return AttentionProblem(1, None, None, 4, 2, 32, 32, **types, scale=0.2, window=Window(None, 0, "zero"))


def placeholder(name: str, *shape: int, dtype: str = "float32") -> te.Tensor:
    return te.placeholder([tirx.IntImm("int64", n) for n in shape], dtype, name)


def matmul(m: int, n: int, k: int, transposed: bool = False) -> tirx.PrimFunc:
    a, b = placeholder("a", m, k), placeholder("b", *((n, k) if transposed else (k, n)))
    return te.create_prim_func([a, b, topi.matmul(a, b, transp_b=transposed)])


def sweep() -> tirx.PrimFunc:
    a, b = placeholder("a", 70, 130), placeholder("b", 130, 70)
    return te.create_prim_func([a, b, topi.add(topi.transpose(a), b)])


def total() -> tirx.PrimFunc:
    a = placeholder("a", 33, 70)
    return te.create_prim_func([a, topi.sum(topi.exp(a), axis=1)])


def quantized_rows() -> tirx.PrimFunc:
    """Return two matmuls of bytes, and a reduction of the first one's rows between."""
    q, k, v = (placeholder(n, 2, *shape, dtype=t) for n, shape, t in (
        ("q", (130, 8), "uint8"), ("k", (8, 64), "int8"), ("v", (64, 32), "int8"),
    ))  # fmt: skip

    def multiply(a: te.Tensor, b: te.Tensor) -> te.Tensor:
        d = te.reduce_axis((tirx.const(0, "int64"), b.shape[1]), "d")
        shape = *a.shape[:2], b.shape[2]
        return te.compute(
            shape, lambda n, i, j: te.sum(a[n, i, d].astype("int32") * b[n, d, j].astype("int32"), axis=d)
        )

    s = multiply(q, k)
    top = topi.max(s, axis=2)
    p = te.compute(s.shape, lambda n, i, j: tirx.max(255 - (top[n, i] - s[n, i, j]) // 64, 0).astype("uint8"))
    return te.create_prim_func([q, k, v, multiply(p, v)]).with_attr(SEGMENTS, [1, 2, 1])


def quantized_matmul(rows: int, k: int, form: PanelFormat) -> tirx.PrimFunc:
    """Return a matmul by a quantized matrix of two panels."""
    a = placeholder("a", rows, k)
    stored = (2, k // NIBBLES, form.nr) if form.nibbles else (2, k, form.nr)
    values = placeholder("values", *stored, dtype="int32" if form.nibbles else "int8")
    scales = placeholder("scales", 2, k // form.block if form.block else 1, form.nr)
    d = te.reduce_axis((tirx.const(0, "int64"), tirx.const(k, "int64")), "d")
    shape = [tirx.const(n, "int64") for n in (rows, 2 * form.nr)]
    result = te.compute(
        shape, lambda i, j: te.sum(a[i, d] * dequantize_element(form, values, scales, None, d, j), axis=d), "result"
    )
    return te.create_prim_func([a, values, scales, result])


FUNCTIONS: dict[str, tuple[Callable[[], tirx.PrimFunc], tvm.target.Target]] = {
    "attention": (lambda: build_plain_attention(attention()), CPU),
    "matmul": (lambda: matmul(37, 50, 70), CPU),
    "matmul, small M": (lambda: matmul(7, 90, 70), CPU),
    "matmul, small M, transposed": (lambda: matmul(3, 90, 70, transposed=True), CPU),
    "element-wise": (sweep, CPU),
    "reduction": (total, CPU),
    "quantized rows": (quantized_rows, CPU),
    "matmul by columns of 8 bits": (lambda: quantized_matmul(7, 704, PanelFormat(16, 0, False, False)), CPU),
    "matmul by columns of 4 bits": (lambda: quantized_matmul(7, 704, PanelFormat(16, 0, True, False)), CPU),
    "matmul by blocks of 4 bits": (lambda: quantized_matmul(37, 704, PanelFormat(16, 32, True, False)), CPU),
    "matmul by wide columns of 4 bits": (lambda: quantized_matmul(7, 704, PanelFormat(48, 0, True, False)), WIDE),
    "attention on a GPU": (lambda: build_plain_attention(attention("float16")), GPU),
    "attention in float32 on a GPU": (lambda: build_plain_attention(attention()), GPU),
    "cache update on a GPU": (lambda: make_copying_update(CacheUpdate("float16", (1, 2, 8, 4), 1, 2)), GPU),
}
RUNNING = [name for name, (_, target) in FUNCTIONS.items() if target is CPU]
RNG = np.random.default_rng(0)
NUMBERS = 8  # random tiles of each


def variants(name: str) -> list[Variant]:
    make, target = FUNCTIONS[name]
    function = make()
    rules = schedules.RULES[target.kind.name]
    return list(next(candidates for rule in rules if (candidates := rule(function, target))))


def drawn(tiles: Tiles, variant: Variant) -> Tiles:
    space = tiles.space(variant.problem, variant.machine)
    values = {field: values[RNG.integers(len(values))] for field, values in space.items()}
    return type(tiles).from_data(values).nearest_legal(variant.problem, variant.machine)


@pytest.mark.parametrize("name", FUNCTIONS)
def test_spaces_have_every_field_and_legal_defaults(name: str) -> None:
    for variant in variants(name):
        assert variant.tiles
        for tiles in variant.tiles.values():
            space = tiles.space(variant.problem, variant.machine)
            assert {*space} == {field.name for field in dataclasses.fields(tiles)}
            assert tiles == tiles.default(variant.problem, variant.machine)
            assert tiles.is_legal(variant.problem, variant.machine)
            assert all(getattr(tiles, field) in values for field, values in space.items()), tiles
            assert tiles.nearest_legal(variant.problem, variant.machine) == tiles


@pytest.mark.parametrize("name", FUNCTIONS)
def test_the_nearest_of_any_tiles_is_legal_and_survives_json(name: str) -> None:
    for variant in variants(name):
        for _ in range(NUMBERS):
            choice = Choice(variant.name, {k: drawn(tiles, variant) for k, tiles in variant.tiles.items()})
            assert all(tiles.is_legal(variant.problem, variant.machine) for tiles in choice.tiles.values())
            assert variant.read(choice.to_json()) == choice


@pytest.mark.sampled(3)
@pytest.mark.parametrize("name", RUNNING)
def test_tiles_change_no_result(name: str) -> None:
    function = FUNCTIONS[name][0]()
    arrays = _arguments(function)
    want = _run(tvm.IRModule({"main": function}), arrays)
    for _ in range(NUMBERS):

        def choose(func: tirx.PrimFunc, candidates: list[Variant]) -> Choice:
            tiles = {kernel: drawn(own, candidates[0]) for kernel, own in candidates[0].tiles.items()}
            print(tiles)
            return Choice(candidates[0].name, tiles)

        got = _run(schedules.apply_schedules(tvm.IRModule({"main": function}), CPU, choose), arrays)
        np.testing.assert_allclose(got, want, rtol=1e-4, atol=1e-4)


def test_a_gpu_has_all_its_kernels_as_variants() -> None:
    assert [v.name for v in variants("attention on a GPU")] == ["wgmma", "mma", "rows"]
    assert [v.name for v in variants("attention in float32 on a GPU")] == ["rows"]
    function = FUNCTIONS["attention on a GPU"][0]()
    texts = set()
    for name in ("wgmma", "mma", "rows"):
        module = schedules.apply_schedules(
            tvm.IRModule({"main": function}), GPU, lambda f, v, name=name: Choice(name, {})
        )
        texts.add(str(module))
    assert len(texts) == 3


def test_choices_that_do_not_exist_are_refused() -> None:
    module = tvm.IRModule({"main": matmul(37, 50, 70)})
    (variant,) = variants("matmul")
    for choice, message in (
        (Choice("tiles", {}), "There is no variant 'tiles'; there are panels"),
        (Choice("panels", {"rows": variant.tiles["panels"]}), "has no kernel 'rows'"),
        (Choice("panels", {"panels": dataclasses.replace(variant.tiles["panels"], mc=1)}), "mc = 1 must be a multiple"),
    ):
        with pytest.raises(ValueError, match=message):
            schedules.apply_schedules(module, CPU, lambda func, candidates, choice=choice: choice)
    with pytest.raises(ValueError, match="is not a choice of variant 'panels'"):
        variant.read('{"variant": "panels", "tiles": {"panels": {"width": 3}}}')


def _arguments(function: tirx.PrimFunc) -> list[np.ndarray]:
    """Return random inputs, and an output at the end."""
    if "attention" in str(function.attrs):
        return [RNG.standard_normal(shape).astype(np.float32) for shape in ((1, 4, 9, 32), *[(1, 2, 70, 32)] * 2)] + [
            np.empty((1, 4, 9, 32), np.float32)
        ]
    shapes = [[int(n) for n in x.shape] for x in function.params]
    return [
        RNG.standard_normal(shape).astype(x.dtype)
        if x.dtype == "float32"
        else RNG.integers(0, 128, shape).astype(x.dtype)
        for x, shape in zip(function.params, shapes)
    ]


def _run(module: tvm.IRModule, arrays: list[np.ndarray]) -> np.ndarray:
    tensors = [tvm.runtime.tensor(x) for x in arrays]
    tvm.compile(guard_divisions(module), target=CPU)["main"](*tensors)
    return tensors[-1].numpy()
