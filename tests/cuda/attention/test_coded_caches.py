"""Quantized keys and values of 4 and 8 bits on tensor cores, against float64.

Every value, every kind of scale, dense and paged caches, prefill and decode."""

from __future__ import annotations

import dataclasses
import functools
import itertools
from typing import Any

import ml_dtypes
import numpy as np
import pytest
import tvm
from tvm.script.ir_builder import IRBuilder
from tvm.script.ir_builder import tirx as T

from lowering.attention.record.cache_layout import CacheLayout, KvQuantization, Pages, QuantizedType
from lowering.attention.record.problem import ATTRIBUTE, AttentionProblem, Mask, Window
from lowering.attention.reference import compute_reference
from schedules.cuda.attention.attention import attention, attention_kernel
from schedules.cuda.attention.attention_tiles import MmaTiles
from schedules.cuda.attention.decode_tiles import DecodeTiles
from schedules.cuda.attention.prefill_mma import can_prefill
from schedules.cuda.cache.quantized_kv import quantized_chunk_bytes
from schedules.cuda.primitives.device import DEVICES
from tests import cuda_emulation as emulated
from tests.cases.attention_cases import Case, arrays, check, outputs
from tests.cuda.audits.machine_code import HEAD_DIMS, decode_alone, machine_code, matmuls, prefill
from tests.cuda.audits.machine_code import problem as prefill_problem

ARCHS = ("sm_80", "sm_90a")
"""Which expand float8 in their own ways."""
HALF = ("float16", "bfloat16")
CODES: tuple[QuantizedType, ...] = ("int8", "float8_e4m3fn", "int4")
FLOAT8, TOKENS, LARGE = CODES[1], "int8 of tokens", "float8, large heads"
PAGED: dict[str, Any] = {
    "row_axes": "thd",
    "lengths": True,
    "window": Window(right=0, offset="lengths"),
    "layout": CacheLayout("phtd", Pages(16, "page", apart=True)),
}
KINDS: dict[str, tuple[KvQuantization, dict[str, Any]]] = {
    "int8": (KvQuantization("int8", 0), {"q_heads": 6, "window": Window(right=0, offset="past")}),
    "int8 of channels": (KvQuantization("int8", 0, channels=True), {"v_head_dim": 40, "scale": None, "sink": True}),
    "int8 of groups, in pages": (KvQuantization("int8", 8, "float16"), {"head_dim": 80, **PAGED}),
    TOKENS: (KvQuantization("int8", 64), {"dtype": "bfloat16", "mask": Mask("bool", (1, 1, None, None))}),
    "float8, in pages": (KvQuantization(FLOAT8, 0), {"dtype": "bfloat16", "head_dim": 128, **PAGED}),
    "float8 of channels": (
        KvQuantization(FLOAT8, 0, channels=True),
        {"softcap": 5.0, "head_dim": 96, "v_head_dim": 72},
    ),
    "float8 of tokens": (KvQuantization(FLOAT8, 32), {"head_dim": 32, "row_axes": "bte", "layout": CacheLayout("bte")}),
    LARGE: (KvQuantization(FLOAT8, 0), {"head_dim": 256, "kv_heads": 1, "window": Window(20, 0, "past")}),
    "int4": (KvQuantization("int4", 0), {"dtype": "bfloat16", "head_dim": 16, "v_head_dim": 24}),
    "int4 of channels, in pages": (KvQuantization("int4", 0, channels=True), PAGED),
}
SIZES = [(1, 2, 45), (2, 37, 150)]


def problem(name: str) -> AttentionProblem:
    """Return a problem of two query heads on each of two key/value heads, every size symbolic, float16, head_dim 64."""
    quantization, changes = KINDS[name]
    values: dict[str, Any] = {"q_heads": 4, "kv_heads": 2, "head_dim": 64, "dtype": "float16"} | changes
    derived: dict[str, Any] = {
        "v_head_dim": values["head_dim"],
        "v_dtype": values["dtype"],
        "scale": values["head_dim"] ** -0.5,
    }
    layout = dataclasses.replace(values.get("layout", CacheLayout()), quantization=quantization)
    sizes: dict[str, Any] = {"batch": None, "q_len": None, "kv_len": None, "acc_dtype": "float32", "lse": True}
    return AttentionProblem(**sizes | derived | values | {"layout": layout})


@functools.cache
def kernels(arch: str, name: str) -> emulated.Module:
    """Build both kernels: prefill from the third row on, with more stages for every other one, and splits of both."""
    p, gpu, number = problem(name), DEVICES[arch], list(KINDS).index(name)
    few = dataclasses.replace(DecodeTiles.default(p, gpu), blocks=12, split=16, rows=2 * p.group)
    many = MmaTiles(32, 32, warps=2, stages=1 + number % 2, q_in_registers=number % 3 == 1, split=64)
    return emulated.module({"attention": attention_kernel(p, gpu, many, few)}, arch=arch)


def drawn(name: str, batch: int, q_len: int, kv_len: int) -> tuple[Case, dict[str, Any]]:
    p, number = problem(name), list(KINDS).index(name)
    case = Case(p, batch, q_len, kv_len, kv_len, kv_len // 3, seed=number, poisoned=False)
    return case, arrays(case)


def call(module: emulated.Module, case: Case, inputs: dict[str, Any], **how: Any) -> dict[str, np.ndarray]:
    """Return the results by name, from a module of this one function."""
    results, names = outputs(case, inputs), case.problem.parameters()
    arguments = [(inputs | results)[name] for name in names]
    arguments = [x.view(np.uint8) if getattr(x, "dtype", None) == ml_dtypes.float8_e4m3fn else x for x in arguments]
    after = module.call("attention", arguments, **how)
    return {name: x for name, x in zip(names, after) if name in results}


QUICK = (("sm_80", LARGE), ("sm_80", TOKENS), ("sm_90a", "int8 of groups, in pages"))


@pytest.mark.parametrize(
    ("arch", "name"),
    [pytest.param(*c, marks=() if c in QUICK else pytest.mark.slow) for c in itertools.product(ARCHS, KINDS)],
)
def test_equals_the_reference(arch: str, name: str) -> None:
    for number, size in enumerate(SIZES):
        case, inputs = drawn(name, *size)
        assert can_prefill(case.problem)
        how = {"order": emulated.ORDERS[case.seed % 2], "arrivals": emulated.ARRIVALS[(case.seed + number) % 3]}
        check(
            case, inputs, call(kernels(arch, name), case, inputs, **how), float(ml_dtypes.finfo(case.problem.dtype).eps)
        )


@pytest.mark.parametrize(("name", "array", "key"), [(LARGE, "v", 60), (LARGE, "k", 60), (TOKENS, "v_scale", 7)])
@pytest.mark.parametrize("q_len", [2, 37])
def test_hidden_nan_does_not_leak(name: str, array: str, key: int, q_len: int) -> None:
    """NaN in quantized values, in keys and values, and in scales: only rows that see it become NaN."""
    case, inputs = drawn(name, 1, q_len, 150)
    inputs[array][:, :, key, :1] = np.nan
    if "mask" in inputs:
        inputs["mask"][:, :, :, key] = np.arange(q_len) % 3 > 0
    results, want = call(kernels("sm_80", name), case, inputs), compute_reference(case.problem, **inputs)["y"]
    hidden = np.isfinite(want).all((0, 1, 3))
    assert hidden.any() and (q_len == 2 or not hidden.all())
    check(case, inputs, results, float(ml_dtypes.finfo(case.problem.dtype).eps))
    assert (np.isnan(want) == np.isnan(results["y"].astype(np.float64))).all()


def problem_of_all_values(code: QuantizedType, dtype: str) -> AttentionProblem:
    """Return a problem of one head with 256 elements."""
    sizes: dict[str, Any] = {"batch": 1, "q_len": 1, "kv_len": 1, "q_heads": 1, "kv_heads": 1}
    types: dict[str, Any] = {"dtype": dtype, "v_dtype": dtype, "acc_dtype": "float32"}
    layout = CacheLayout(quantization=KvQuantization(code, 0))
    return AttentionProblem(**sizes, **types, head_dim=256, v_head_dim=256, scale=1.0, layout=layout)


@functools.cache
def kernels_of_all_values(arch: str) -> emulated.Module:
    functions = {}
    for code, dtype in itertools.product(CODES, HALF):
        functions[f"attention_{code}_{dtype}"] = decode_alone(problem_of_all_values(code, dtype), arch)
    return emulated.module(functions, arch=arch)


@pytest.mark.parametrize("arch", [ARCHS[0], pytest.param(ARCHS[1], marks=pytest.mark.slow)])
@pytest.mark.parametrize(("code", "dtype"), list(itertools.product(CODES, HALF)))
def test_every_quantized_value_is_its_number(code: QuantizedType, dtype: str, arch: str) -> None:
    """Attention to one key is its value, whose elements are each of the 256 bytes."""
    p, bytes_ = problem_of_all_values(code, dtype), np.arange(256, dtype=np.uint8)
    rows = bytes_.reshape(-1, p.head_dim // p.layout.packing)
    if code == "int4":
        numbers = np.stack([bytes_ % 16, bytes_ // 16], 1).astype(np.float64).reshape(rows.shape[0], -1) - 8
    else:
        numbers = rows.view(code).astype(np.float64)
    for row, want in zip(rows, numbers):
        stored = row.view("int8" if code == "int8" else "uint8")[None, None, None]
        feeds = {"q": np.ones((1, 1, 1, 256), dtype), "k": np.zeros_like(stored), "v": stored}
        feeds |= {"k_scale": np.ones(1, np.float32), "v_scale": np.full(1, 0.5, np.float32)}
        feeds |= {"y": np.full((1, 1, 1, 256), np.nan, dtype)}
        names = p.parameters()
        after = kernels_of_all_values(arch).call(f"attention_{code}_{dtype}", [feeds[name] for name in names])
        np.testing.assert_array_equal(after[names.index("y")].astype(np.float64).ravel(), want / 2)


def test_what_tensor_cores_do_not_take_is_served_by_rows() -> None:
    def variants(p: AttentionProblem) -> list[str]:
        with IRBuilder() as builder, T.prim_func():
            T.func_attr({ATTRIBUTE: p.to_json()})
        hopper = tvm.target.Target({"kind": "cuda", "arch": "sm_90a"}, host="llvm")
        return [variant.name for variant in attention(builder.get(), hopper) or []]

    p = problem("int8")
    assert variants(p) == ["mma", "rows"]
    kinds = KvQuantization("int8", 4), KvQuantization("int8", 32, "float16"), KvQuantization("int8", 64, "float16")
    assert [can_prefill(dataclasses.replace(p, layout=CacheLayout(quantization=kind))) for kind in kinds] == [
        False,
        True,
        False,
    ]
    assert not can_prefill(dataclasses.replace(p, head_dim=72)) and can_prefill(dataclasses.replace(p, v_head_dim=72))


@pytest.mark.no_gpu
@pytest.mark.slow
@pytest.mark.parametrize("name", KINDS)
def test_shared_memory_is_accessed_without_conflicts(name: str) -> None:
    """With default tiles: copies of quantized values and scales, and dequantized values on their way to ldmatrix."""
    p, gpu = problem(name), DEVICES["sm_80"]
    func = attention_kernel(p, gpu, MmaTiles.default(p, gpu), DecodeTiles.default(p, gpu))
    module = emulated.module({"attention": func}, arch=gpu.arch)
    for q_len in (1, 128):
        case, inputs = drawn(name, 1, q_len, 256)
        with emulated.counting() as accesses:
            call(module, case, inputs)
        in_main_loop = [a for a in accesses if a.memory == "shared" and "ptx_" in a.source]  # no merge
        assert {a.bytes for a in in_main_loop} >= {quantized_chunk_bytes(p), 16}
        conflicts = [a for a in in_main_loop if a.taken > a.least]
        assert not conflicts, "\n".join(map(str, conflicts))


# Machine code.


def quantize_cache(head_dim: int, name: str, causal: bool) -> AttentionProblem:
    p, (quantization, _) = prefill_problem(head_dim, causal), KINDS[name]
    quantization = dataclasses.replace(quantization, group=head_dim if quantization.group > 8 else quantization.group)
    if "pages" not in name:
        return dataclasses.replace(p, layout=CacheLayout(quantization=quantization))
    paged: dict[str, Any] = {**PAGED, "layout": dataclasses.replace(PAGED["layout"], quantization=quantization)}
    return dataclasses.replace(p, **paged)


ALL = list(itertools.product(("sm_80", "sm_89", "sm_90a"), HEAD_DIMS, KINDS, (False, True)))


@pytest.mark.sampled(len(ALL))
@pytest.mark.no_gpu
@pytest.mark.parametrize(("arch", "head_dim", "name", "causal"), ALL)
def test_nothing_is_spilled(arch: str, head_dim: int, name: str, causal: bool) -> None:
    """No register in memory, no conversion of integers, and no matmul more than tiles ask for."""
    p = quantize_cache(head_dim, name, causal)
    func, tiles = prefill(p, arch)
    many, few = machine_code(func, arch), machine_code(decode_alone(p, arch), arch)
    assert many.loop["HMMA"] == matmuls(p, tiles)
    for code in (many, few):
        assert (code.spills, code.stack) == (0, 0) and not code.said
        assert not code.loop["I2F"] and not code.loop["I2FP"] and code.loop["LDGSTS"]
