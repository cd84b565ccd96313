"""Shipped kernels access memory well: no bank conflicts in their main loops, and whole sectors of device memory.

For aligned sizes and default tiles. The access widths that nvcc merges are unknown here. Therefore only shared-memory
accesses of 16 bytes are checked: those of main loops.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import onnx
import pytest
import tvm
from tvm import tirx

import lowering
from lowering.attention.kv_write import KvWrite as New
from lowering.attention.kv_write import write_in_place
from lowering.attention.record.cache_layout import CacheLayout
from lowering.attention.record.problem import AttentionProblem, Window
from lowering.tensorir.scatter import CacheUpdate, make_copying_update, make_in_place_update
from schedules.cuda.attention.attention import attention_kernel
from schedules.cuda.attention.attention_tiles import MmaTiles
from schedules.cuda.attention.decode_tiles import DecodeTiles
from schedules.cuda.cache.kv_write import kv_write
from schedules.cuda.cache.scatter import cache_update
from schedules.cuda.primitives.device import DEVICES
from tests import cuda_emulation as emulated
from tests.cases.kv_write_cases import Case as KvWrite
from tests.cases.kv_write_cases import arrays
from tests.cases.scatter_cases import Case as Update
from tests.cases.scatter_cases import random_rows
from tests.cuda.attention.prefill_cases import CAUSAL, THREE_D, draw, problem
from tests.cuda.audits.machine_code import prefill
from tests.cuda.elementwise.test_chunks_and_rows import RULES, expected, function
from tests.cuda.matmul.test_matmul_on_gpus import Case, first_variant
from tests.cuda_emulation import Access, factor

pytestmark = pytest.mark.no_gpu

TARGET = tvm.target.Target({"kind": "cuda", "arch": "sm_80"})
Call = tuple[emulated.Module, Sequence[Any]]


def measured(call: Call) -> list[Access]:
    module, arrays = call
    with emulated.counting() as accesses:
        module.call("main", arrays)
    assert accesses
    return accesses


def is_good(accesses: Sequence[Access], few: float = 1.0) -> None:
    """Check the accesses. `few` is the accepted ratio of taken sectors to the minimum."""
    bad = [a for a in accesses if a.taken > a.least * (few if a.memory == "global" else 1)]
    bad = [a for a in bad if a.memory == "global" or a.bytes == 16]
    assert not bad, "\n".join(map(str, bad))


def attention(p: AttentionProblem, func: tirx.PrimFunc, arch: str, q_len: int, kv_len: int) -> Call:
    inputs = draw(p, 1, q_len, kv_len)
    y = (*inputs["q"].shape[:-1], p.v_head_dim * (1 if p.row_axes == "bhtd" else p.q_heads))
    arguments = inputs | {"y": np.full(y, np.nan, p.dtype), "lse": np.full((1, p.q_heads, q_len), np.nan, np.float32)}
    return emulated.module({"main": func}, arch=arch), [arguments[name] for name in p.parameters()]


PREFILL = {
    "full": {"lse": True},
    "causal, 128": {"window": CAUSAL, "head_dim": 128},
    "causal, 3-D": {"window": CAUSAL, "q_heads": 2, **THREE_D},
    "80": {"head_dim": 80, "q_heads": 2},
    "96": {"head_dim": 96, "q_heads": 2},
    "256": {"head_dim": 256, "q_heads": 2},
    "bfloat16": {"dtype": "bfloat16", "v_dtype": "bfloat16"},
}


@pytest.mark.sampled(8)
@pytest.mark.parametrize(("arch", "name"), [(a, n) for a in ("sm_80", "sm_90a") for n in PREFILL])
def test_prefill(arch: str, name: str) -> None:
    p = problem(**PREFILL[name])
    accesses = measured(attention(p, prefill(p, arch)[0], arch, 128, 256))
    # A warp has rows of all heads that share keys. They are apart in lse: 4 bytes for a row of a tile, twice as many.
    is_good(accesses, 2.0 if arch == "sm_90a" and p.lse else 1.0)
    assert factor([a for a in accesses if a.memory == "shared"]) == 1  # Y goes through it as well


DECODE: dict[str, dict[str, Any]] = {
    "128": {"head_dim": 128, "q_heads": 8},
    "64": {"lse": True},
    "80": {"head_dim": 80},
    "causal": {"head_dim": 128, "window": Window(right=0, offset="past")},
    "256": {"head_dim": 256, "q_heads": 2},
    "3-D": THREE_D,
}


@pytest.mark.sampled(9)
@pytest.mark.parametrize("name", DECODE)
def test_decode(name: str) -> None:
    p, gpu = problem(**DECODE[name]), DEVICES["sm_80"]
    func = attention_kernel(p, gpu, MmaTiles.default(p, gpu), DecodeTiles.default(p, gpu))
    is_good(measured(attention(p, func, gpu.arch, 1, 1024)))


SIZE: dict[str, Any] = {"m": 128, "n": 128, "k": 128, "tiles": None, "sizes": ({},)}
MATMULS = {
    "[N, K], residual": Case(**SIZE, b_transposed=True, epilogue="residual"),
    "[K, N], bias": Case(**SIZE),
    "A across k": Case(**SIZE, a_transposed=True, epilogue="none"),
    "gate": Case(**SIZE, epilogue="gate"),
    "bfloat16": Case(**SIZE, dtype="bfloat16"),
    "small M": Case(**SIZE | {"m": 8, "k": 1024}, b_transposed=True),
}
ON = [(arch, name) for arch in ("sm_80", "sm_90a") for name in MATMULS]


@pytest.mark.sampled(13)
@pytest.mark.parametrize(("arch", "name"), ON)
def test_matmuls(arch: str, name: str) -> None:
    case = MATMULS[name]
    module = emulated.module({"main": first_variant(case, arch).make()}, arch=arch)
    is_good(measured((module, case.arrays({})[0])))


@pytest.mark.sampled(99)
@pytest.mark.parametrize(
    ("kind", "dtype", "length"),
    [(k, d, n) for k in RULES for d in ("float16", "float32") for n in (1024, 272)],
)
def test_chunks_and_rows(kind: str, dtype: str, length: int) -> None:
    variant, _ = function(dtype, ("b", length), kind)
    rng = np.random.default_rng(0)
    x, gain = (rng.standard_normal(shape).astype(dtype) for shape in ((64, length), (length,)))
    operands = [x, gain] if kind in ("norm", "chain") else [x]
    result = np.full(expected(kind, x, gain).shape, np.nan, dtype)
    # eight elements of 4 bytes are two chunks; each chunk leaves the other half of a sector to the other
    few = 2 if dtype == "float32" else 1
    is_good(measured((emulated.module({"main": variant.make()}, arch="sm_80"), [*operands, result])), few)


@pytest.mark.slow
@pytest.mark.parametrize("form", [make_copying_update, make_in_place_update])
def test_cache_updates(form: Callable[[CacheUpdate], tirx.PrimFunc]) -> None:
    update = Update(CacheUpdate("float16", (None, 2, None, 64), None, 2), (2, 2, 64, 64), 16, (0, 48))
    rng = np.random.default_rng(0)
    cache, rows = random_rows(rng, update)
    arrays = [cache, rows, np.array(update.indices)] + [cache] * (form is make_copying_update)
    is_good(measured((emulated.module({"main": cache_update(form(update.update), TARGET)[0].make()}), arrays)))


@pytest.mark.slow
def test_kv_writes() -> None:
    case = KvWrite(record=New(None, 2, 64, 64, "float16", CacheLayout()), batch=2, seed=0, hostile=False)
    variants = kv_write(write_in_place(case.record), TARGET)
    assert variants
    module = emulated.module({"main": variants[0].make()}, arch="sm_80")
    is_good(measured((module, list(arrays(case).values()))))


JOINED = """
<ir_version: 10, opset_import: ["" : 23]>
m (float16[b, 2, p, 64] a, float16[b, 2, s, 64] c) => (float16[b, 2, q, 64] ac) { ac = Concat <axis = 2> (a, c) }
"""


def joined() -> None:
    model = lowering.compile(onnx.parser.parse_model(JOINED), "cuda:sm_80")
    a, c = (np.ones((2, 2, length, 64), "float16") for length in (128, 1))
    assert model.run({"a": a, "c": c})["ac"].shape == (2, 2, 129, 64)


@pytest.mark.slow
def test_concatenations() -> None:
    with emulated.counting() as accesses:
        emulated.run(joined, arch="sm_80")
    assert accesses
    is_good(accesses)


# ---- mutations: faults that are noticed where a kernel is changed


def test_a_swizzle_that_is_missing_is_noticed() -> None:
    p = problem(q_heads=2, kv_heads=1)
    module, arrays = attention(p, prefill(p, "sm_80")[0], "sm_80", 64, 64)
    changed, count = re.subn(r"\^ (?=\()", "+ 0 * ", module.source())  # of chunks of a row in a tile
    assert count > 5
    accesses = measured((module.with_source(changed), arrays))
    worst = max(factor([a]) for a in accesses if a.memory == "shared" and a.bytes == 16)
    assert worst == 8
    with pytest.raises(AssertionError, match=r"read of 16 bytes a lane, shared: (\d+) wavefronts.*\n.*ldmatrix"):
        is_good(accesses)


COPY = """extern "C" __global__ void __launch_bounds__(256) copy(const float* __restrict__ x, float* __restrict__ y) {{
  int row = threadIdx.x / 16, column = threadIdx.x % 16;
  y[row * 16 + column] = x[{index}];
}}"""


@pytest.mark.parametrize(("index", "taken"), [("row * 16 + column", 1), ("column * 16 + row", 4)])
def test_a_transposed_copy_is_noticed(index: str, taken: int) -> None:
    x = np.arange(256, dtype="float32")
    with emulated.counting() as accesses:
        emulated.launch(COPY.format(index=index), "copy", [1], [256], [x, np.zeros_like(x)])
    assert {a.kind: factor([a]) for a in accesses} == {"read": taken, "write": 1}
