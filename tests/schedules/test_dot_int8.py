"""Words of four bytes: every machine's way to multiply them gives the same sums."""

from __future__ import annotations

import numpy as np
import pytest
import tvm
from tvm import tirx
from tvm.script.ir_builder import IRBuilder
from tvm.script.ir_builder import tirx as T

from lowering.target import host_features, resolve
from schedules.cpu.dot_int8 import dot
from schedules.cpu.vector import Machine, load, store

WAYS = {
    "AVX-512 VNNI": (Machine(64, 32, f16_conversion=True, int8_dot=True), "avx512_vnni"),
    "pairs in 512 bits": (Machine(64, 32, f16_conversion=True), "avx512bw"),
    "pairs in 256 bits": (Machine(32, 16, f16_conversion=True), "avx2"),
    "one by one": (Machine(16, 16, f16_conversion=False), ""),
}


def kernel(cpu: Machine) -> tirx.PrimFunc:
    lanes = cpu.lanes("int32")
    with IRBuilder() as builder, T.prim_func():
        T.func_name("dot")
        total, a, b, y = (T.arg(name, T.buffer((lanes,), "int32")) for name in ("total", "a", "b", "y"))
        store(y, dot(load(total, lanes, 0), load(a, lanes, 0), load(b, lanes, 0), cpu), 0)
    return builder.get()


@pytest.mark.parametrize("way", [way for way, (_, feature) in WAYS.items() if feature in ("", *host_features())])
def test_sums_are_exact(way: str) -> None:
    cpu, _ = WAYS[way]
    target = resolve("cpu")[0].tvm
    run = tvm.compile(tvm.IRModule({"dot": kernel(cpu)}), target=target)["dot"]
    lanes, rng = cpu.lanes("int32"), np.random.default_rng(0)
    for _ in range(20):
        a = rng.choice([0, 1, 127, 128, 254, 255], (lanes, 4)).astype(np.uint8)
        b = rng.choice([-128, -127, -1, 0, 1, 127], (lanes, 4)).astype(np.int8)
        total = rng.integers(-(2**31), 2**31, lanes).astype(np.int32)
        given = [tvm.runtime.tensor(x) for x in (total, a.view(np.int32)[:, 0], b.view(np.int32)[:, 0], total)]
        run(*given)
        want = total.astype(np.int64) + (a.astype(np.int64) * b.astype(np.int64)).sum(1)
        np.testing.assert_array_equal(given[-1].numpy(), want.astype(np.int32))
