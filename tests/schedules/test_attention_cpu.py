"""The CPU attention kernels against the float64 reference, at odd sizes and every width of vector."""

from __future__ import annotations

import dataclasses
import functools
import os
from collections.abc import Callable, Iterator
from typing import Any

import ml_dtypes
import numpy as np
import pytest
import tvm

import schedules
from lowering.attention.codegen.plain import build_plain_attention
from lowering.attention.record.cache_layout import CacheLayout
from lowering.attention.record.problem import AttentionProblem, Mask, Window
from lowering.attention.reference import compute_reference
from schedules.cpu.attention.attention_tiles import DecodeTiles, PrefillTiles
from schedules.cpu.primitives.vector import read_cpu_features
from tests.support.placed_arrays import borrow, guarded, unaligned
from tests.support.this_machine import LEVELS, WIDEST

Arrays = dict[str, Any]
Allocator = Callable[[np.ndarray], tvm.runtime.Tensor]


def target(mcpu: str) -> tvm.target.Target:
    return tvm.target.Target({"kind": "llvm", "mtriple": "x86_64-linux-gnu", "mcpu": mcpu})


def problem(**changes: Any) -> AttentionProblem:
    """Return a problem of two query heads on each of two key/value heads, every size symbolic, float32."""
    defaults: dict[str, Any] = {
        **{"batch": None, "q_len": None, "kv_len": None, "q_heads": 4, "kv_heads": 2},
        **{"head_dim": 64, "v_head_dim": 64, "dtype": "float32", "v_dtype": "float32", "acc_dtype": "float32"},
    }
    values = defaults | changes
    return AttentionProblem(**{"scale": values["head_dim"] ** -0.5, **values})


@functools.cache
def kernel(p: AttentionProblem, mcpu: str) -> Callable[..., None]:
    module = schedules.apply_schedules(tvm.IRModule({"attention": build_plain_attention(p)}), target(mcpu))
    return tvm.compile(module, target=target(mcpu))["attention"]


def draw(p: AttentionProblem, batch: int, q_len: int, kv_len: int, mask_len: int | None = None) -> Arrays:
    """Draw inputs by parameter name. A mask hides a third of the pairs and the whole of some rows and key tiles."""
    rng = np.random.default_rng(q_len + kv_len)

    def rows(layout: str, heads: int, length: int, dim: int, dtype: str) -> np.ndarray:
        shape = (batch, heads, length, dim) if layout == "bhtd" else (batch, length, heads * dim)
        return rng.standard_normal(shape).astype(dtype)

    inputs: Arrays = {
        "q": rows(p.row_axes, p.q_heads, q_len, p.head_dim, p.dtype),
        "k": rows(p.layout.axes, p.kv_heads, kv_len, p.head_dim, p.dtype),
        "v": rows(p.layout.axes, p.kv_heads, kv_len, p.v_head_dim, p.v_dtype),
    }
    if p.mask is not None:
        full = (batch, p.q_heads, q_len, kv_len if mask_len is None else mask_len)
        shape = tuple(n if d is None else d for n, d in zip(full, p.mask.dims))
        hidden = rng.random(shape) < 0.3
        hidden[:, :, ::5] = shape[2] > 1
        hidden[..., 64:128] = hidden[..., 20:21] = True
        lowest = 0 if p.mask.dtype == "bool" else ml_dtypes.finfo(p.mask.dtype).min
        finite = np.where(rng.random(shape) < 0.2, lowest, rng.standard_normal(shape))
        inputs["mask"] = ~hidden if p.mask.dtype == "bool" else np.where(hidden, -np.inf, finite).astype(p.mask.dtype)
    if p.lengths:
        inputs["lengths"] = rng.integers(-1, kv_len + 2, batch)
    if "past" in p.parameters():
        inputs["past"] = kv_len // 3
    return inputs


def unaligned_tensor(array: np.ndarray) -> tvm.runtime.Tensor:
    return borrow(unaligned(array))


def tensor_at_end(array: np.ndarray) -> tvm.runtime.Tensor:
    return borrow(guarded(array, at_end=True))


def call(
    run: Callable[..., None], p: AttentionProblem, inputs: Arrays, allocate: Allocator = unaligned_tensor
) -> np.ndarray:
    y_shape = (*inputs["q"].shape[:-1], p.v_head_dim * (1 if p.row_axes == "bhtd" else p.q_heads))
    y = allocate(np.full(y_shape, np.nan, p.dtype))
    arguments = {name: x if name == "past" else allocate(x) for name, x in inputs.items()} | {"y": y}
    run(*(arguments[name] for name in p.parameters()))
    result = y._create_view(y.shape, "uint16") if p.dtype == "bfloat16" else y
    return np.from_dlpack(result).view(p.dtype).astype(np.float64)


def close(got: np.ndarray, p: AttentionProblem, inputs: Arrays) -> None:
    want = compute_reference(p, **inputs)["y"]
    rounding = float(ml_dtypes.finfo(p.dtype).eps)
    accuracy = {"float32": 4e-6, "float64": 1e-13}[p.acc_dtype]
    np.testing.assert_allclose(got, want, rtol=rounding, atol=accuracy)


CAUSAL = Window(right=0)
HALF = {"dtype": "float16", "v_dtype": "float16"}
BF16 = {"dtype": "bfloat16", "v_dtype": "bfloat16"}
THREE_D = {"row_axes": "bte", "layout": CacheLayout("bte")}
PROBLEMS = {
    "full": problem(),
    "causal, 3-D, dims no vector divides": problem(window=CAUSAL, head_dim=80, v_head_dim=41, **THREE_D),
    "ragged causal cache": problem(
        window=Window(right=0, offset="lengths"), lengths=True, **HALF, layout=CacheLayout("bte")
    ),
    "window, one head of keys": problem(
        window=Window(3, 90, "past"), **BF16, kv_heads=1, q_heads=8, head_dim=17, v_head_dim=33
    ),
    "mask per row": problem(mask=Mask("bool", (1, 1, None, None))),
    "padding mask, shorter than the keys": problem(mask=Mask("float32", (None, 1, 1, None)), **THREE_D),
    "additive mask per head, soft cap, window": problem(
        mask=Mask("float16", (None, None, None, None), pad=False), softcap=5.0, window=Window(left=70)
    ),
    "float64": problem(dtype="float64", acc_dtype="float64", head_dim=6, v_head_dim=3, softcap=2.0, window=CAUSAL),
    "seven heads share keys": problem(
        kv_heads=1, q_heads=7, v_head_dim=96, mask=Mask("bool", (None, None, None, None))
    ),
    "V of another type": problem(v_dtype="bfloat16", head_dim=1, v_head_dim=130),
}
SIZES = [(1, 1, 1), (2, 1, 300), (3, 3, 70), (2, 77, 133), (1, 200, 65)]


@pytest.mark.sampled(10)
@pytest.mark.parametrize("mcpu", LEVELS[1:])
@pytest.mark.parametrize("name", PROBLEMS)
def test_equals_the_reference(name: str, mcpu: str) -> None:
    p = PROBLEMS[name]
    run = kernel(p, mcpu)
    for batch, q_len, kv_len in SIZES:
        short = p.mask is not None and p.mask.dims[2] == 1 and kv_len > 9
        inputs = draw(p, batch, q_len, kv_len, mask_len=kv_len - 7 if short else None)
        for allocate in (unaligned_tensor, tensor_at_end):
            close(call(run, p, inputs, allocate), p, inputs)


def test_a_mask_that_hides_nothing_and_only_adds() -> None:
    p = PROBLEMS["padding mask, shorter than the keys"]
    inputs = draw(p, 2, 20, 200)
    inputs["mask"] = np.arange(2 * 200, dtype=np.float32).reshape(2, 1, 1, 200) % 3
    close(call(kernel(p, WIDEST), p, inputs), p, inputs)


@pytest.mark.parametrize("sizes", [(2, 1, 90), (1, 40, 90)])
def test_narrow_vectors_and_static_sizes(sizes: tuple[int, int, int]) -> None:
    batch, q_len, kv_len = sizes
    p = problem(batch=batch, q_len=q_len, kv_len=kv_len, **HALF, window=CAUSAL, head_dim=20, v_head_dim=20)
    inputs = draw(p, *sizes)
    close(call(kernel(p, "x86-64"), p, inputs), p, inputs)


@pytest.mark.parametrize(
    ("name", "keys"),
    [("ragged causal cache", (120, 149)), ("mask per row", (70, 20)), ("window, one head of keys", (0, 149))],
)
def test_hidden_values_do_not_leak(name: str, keys: tuple[int, int]) -> None:
    """Keys and values of NaN and infinity do not change rows that do not see them."""
    p = PROBLEMS[name]
    run = kernel(p, WIDEST)
    for sizes in [(3, 1, 150), (2, 80, 150)]:
        inputs = draw(p, *sizes)
        for array, poison in [("k", (np.nan, np.inf)), ("v", (np.inf, np.nan))]:
            by_key = inputs[array] if p.layout.axes == "bte" else inputs[array].swapaxes(1, 2)
            by_key[:, keys[0]], by_key[:, keys[1]] = poison
        want = compute_reference(p, **inputs)["y"]
        clean = np.isfinite(want)
        assert clean.any()
        got = call(run, p, inputs)
        np.testing.assert_allclose(got[clean], want[clean], rtol=float(ml_dtypes.finfo(p.dtype).eps), atol=4e-6)


@pytest.fixture
def workers() -> Iterator[Callable[[int], None]]:
    configure = tvm.get_global_func("runtime.config_threadpool")
    cpus = os.sched_getaffinity(0)
    yield lambda n: configure(1, n)
    configure(1, 1)
    os.sched_setaffinity(0, cpus)  # a pool that is configured pins the thread that calls it


@pytest.mark.parametrize("q_len", [1, 130])
def test_threads_do_not_change_the_result(q_len: int, workers: Callable[[int], None]) -> None:
    p = PROBLEMS["ragged causal cache"]
    run, inputs = kernel(p, "x86-64-v3"), draw(p, 2, q_len, 1000)
    workers(1)
    single = call(run, p, inputs)
    workers(2)
    np.testing.assert_array_equal(call(run, p, inputs), single)
    close(single, p, inputs)


def test_empty_sizes_are_no_work() -> None:
    p = problem(lengths=True)
    run = kernel(p, WIDEST)
    for batch, q_len, kv_len in [(0, 3, 5), (2, 0, 5), (2, 20, 0), (2, 1, 0)]:
        inputs = draw(p, batch, q_len, kv_len)
        shapes = {name: np.zeros(x.shape, x.dtype) for name, x in inputs.items()}
        y = np.ones((batch, p.q_heads, q_len, p.v_head_dim), p.dtype)
        tensors = {name: tvm.runtime.tensor(x) for name, x in (shapes | {"y": y}).items()}
        run(*(tensors[name] for name in p.parameters()))
        assert not tensors["y"].numpy().any()  # without keys: 0


def test_a_kernel_keeps_name_parameters_and_attributes() -> None:
    p = problem(mask=Mask("bool", (1, 1, None, None)), lengths=True)
    before = build_plain_attention(p).with_attr("global_symbol", "layer_0")
    after = schedules.apply_schedules(tvm.IRModule({"layer_0": before}), target("x86-64-v4"))["layer_0"]
    assert len(after.params) == len(before.params)
    unchanged = {key: str(value) for key, value in before.attrs.items() if key != "s_tir"}  # says that there are blocks
    actual = {key: str(value) for key, value in after.attrs.items() if key != schedules.CONSIDERED}
    assert actual == {**unchanged, "lowering.schedule": "attention"}
    assert after.script() != before.script()


def test_what_no_kernel_serves_stays_plain() -> None:
    module = tvm.IRModule({"attention": build_plain_attention(problem(qk_mode=0))})
    scheduled = schedules.apply_schedules(module, target("x86-64-v4"))
    plainly = scheduled["attention"].without_attr(schedules.CONSIDERED)
    assert plainly.script() == module["attention"].script()


@pytest.mark.parametrize("mcpu", ["x86-64", "x86-64-v3", "x86-64-v4"])
def test_default_tiles_are_legal(mcpu: str) -> None:
    cpu = read_cpu_features(target(mcpu))
    for dim in (1, 8, 24, 64, 80, 128, 256, 512):
        for q_heads in (1, 3, 6, 7, 32, 71):
            for acc in ("float32", "float64"):
                p = problem(kv_heads=1, q_heads=q_heads, head_dim=dim, v_head_dim=dim, dtype=acc, acc_dtype=acc)
                PrefillTiles.default(p, cpu).check(p, cpu)
                DecodeTiles.default(p, cpu).check(p, cpu)


def test_illegal_tiles_say_why() -> None:
    p, cpu = problem(), read_cpu_features(target("x86-64-v3"))
    with pytest.raises(ValueError, match=r"8 x 2 must fit 16 registers"):
        PrefillTiles(48, 64, qk_keys=8, qk_vectors=2, pv_rows=6, pv_vectors=2).check(p, cpu)
    with pytest.raises(ValueError, match=r"q = 40 must be a multiple of qk_vectors \* W = 24"):
        PrefillTiles(40, 64, qk_keys=4, qk_vectors=3, pv_rows=5, pv_vectors=2).check(p, cpu)
    with pytest.raises(ValueError, match="kv = 12 must be a multiple of W = 8"):
        dataclasses.replace(DecodeTiles.default(p, cpu), kv=12).check(p, cpu)
