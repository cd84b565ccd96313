"""Stream-K matmuls on Hopper: the work list splits steps along k evenly, across tile boundaries."""

from __future__ import annotations

import dataclasses
import re
from typing import Any

import numpy as np
import onnx
import pytest
import tvm_ffi

import lowering
from lowering.runtime.arrays import tensors
from schedules.cuda.matmul.matmul_tiles import WgmmaMatmulTiles
from tests import cuda_emulation as emulated
from tests.cuda.attention.prefill_cases import TURNS
from tests.cuda.matmul.test_matmul_on_gpus import Case, check, make_module
from tests.cuda.models.steps import on_host
from tests.cuda_emulation import EmulationError, device
from tests.cuda_emulation.mutations import survivors

# Tiles of 64 x 64 on three SMs, which are the largest number of blocks; the ends of a share cost two steps.
THREE = WgmmaMatmulTiles(1, 64, 3, 160, 24, swizzle=2, split_steps=1, blocks=3)
PAIRS = dataclasses.replace(THREE, blocks=6, cluster=2)
IN_TURN = dataclasses.replace(PAIRS, consumers=2, ping_pong=True)
GATE = dataclasses.replace(THREE, consumers=2, n=128)
CASES = {
    # Shares of 4, 5 and 8 tiles; the last has one whole tile before each share.
    "clusters, by ping-pong": Case(n=64, k=400, tiles=IN_TURN, sizes=({"m": 300}, {"m": 600}, {"m": 1000})),
    "rows of B": Case(n=72, k=400, b_transposed=True, epilogue="residual", tiles=THREE, sizes=({"m": 65}, {"m": 200})),
    "clusters": Case(n=72, k=400, b_transposed=True, tiles=PAIRS, sizes=({"m": 200}, {"m": 500})),
    "gate, batches": Case(batch=5, m=40, n=64, k=512, epilogue="gate", dtype="bfloat16", tiles=GATE, sizes=({},)),
    "ragged": Case(n=37, k=1000, b_transposed=True, epilogue="float32", tiles=THREE, sizes=({"m": 65}, {"m": 300})),
    "few tiles": Case(m=64, n=128, k=1600, tiles=THREE, sizes=({},)),
}


@pytest.mark.sampled(4)
@pytest.mark.parametrize("name", CASES)
def test_equals_float64(name: str) -> None:
    """Under every order of threads and of asynchronous work."""
    case = CASES[name]
    check(case, make_module(case, "sm_90a"), TURNS)


def matmuls(module: emulated.Module, arrays: list[Any]) -> int:
    """Count the matmuls of wgmma in a call."""
    emulated.run(device.take_matmuls, arch="sm_90a")
    module.call("main", arrays)
    return emulated.run(device.take_matmuls, arch="sm_90a")


# By steps of each tile, and tiles: the steps that each of three blocks multiplies.
DEALT = {
    7: {
        4: [9, 9, 10],
        8: [7 + 11, 7 + 12, 7 + 12],
        3: [7, 7, 7],  # whole
        1: [2, 2, 3],  # split
    },
    25: {2: [16, 17, 17]},
    4: {5: [8, 8, 4]},  # whole, as a split would cost more
}


@pytest.mark.sampled(3)
@pytest.mark.no_gpu
@pytest.mark.parametrize("steps", DEALT)
def test_blocks_have_equal_shares(steps: int) -> None:
    """No step is multiplied twice, and none is left out."""
    case = Case(n=64, k=64 * steps, b_transposed=True, tiles=THREE)
    module = make_module(case, "sm_90a")
    source = module.source()
    pattern = r'extern "C" __global__ void __launch_bounds__\(256\) (\w+)\([^)]*CUtensorMap[^)]*\) \{'
    guards = [f"\\g<0>\n  if (blockIdx.x != {block}) return;\n" for block in range(3)]
    modules = [module.with_source(re.sub(pattern, text, source)) for text in guards]
    for tiles, want in DEALT[steps].items():
        arrays, _ = case.arrays({"m": 64 * tiles})
        counts = [matmuls(block, arrays) for block in modules]
        per_step = matmuls(module, arrays) // sum(want)
        assert per_step and counts == [n * per_step for n in want]
        limit = THREE.estimate_busiest(tiles, 3, steps)[1]  # as the tuner estimates it, with the cost of splits
        assert max(want) <= limit <= max(want) + 2


SMALL = Case(m=256, n=64, k=400, tiles=THREE)


@pytest.mark.no_gpu
def test_nothing_can_be_left_out() -> None:
    """The only exception is the wait of a warp after its last rows."""
    arrays, want = SMALL.arrays({})

    def right(after: list[Any]) -> bool:
        return np.allclose(after[-1].astype("float64"), want, rtol=2e-3, atol=5e-2, equal_nan=True)

    assert [step.name for step in survivors(make_module(SMALL, "sm_90a"), "main", arrays, right)] == ["cuda_warp_sync"]


def test_the_same_bits_in_any_order() -> None:
    """Partial results are added in the order of k, whoever is first."""
    arrays, _ = SMALL.arrays({})
    module = make_module(SMALL, "sm_90a")
    first, *later = (module.call("main", arrays, order=order, arrivals=arrivals)[-1] for order, arrivals in TURNS)
    assert all(np.array_equal(first, other) for other in later)


WRONG = {
    "a share is not added": (r"\((_ptr_\d+\[0\]) \+ \(int64_t\)1\) - _ptr", r"(\1) - _ptr"),
    "tiles of a share in one slot": (r"= \(\(\(int\)blockIdx\.x\) \+ _ptr_\d+\[0\]\);", "= ((int)blockIdx.x);"),
    "parts taken for tiles": (r"\(_ptr_\d+\[0\] - _ptr_\d+\[0\]\) == _ptr_\d+\[0\]", "true"),
    "parts from the first step on": (r"max\(\(_ptr_\d+\[0\] - _ptr_\d+\[0\]\), 0\)", "0"),
    "parts to the last step": (r"min\(\(_ptr_\d+\[\d\] - _ptr_\d+\[0\]\), (_ptr_\d+\[0\])\)", r"\1"),
}


@pytest.mark.no_gpu
@pytest.mark.parametrize("name", WRONG)
def test_a_wrong_share_is_found(name: str) -> None:
    """Inputs differ from those of other calls: accumulators of the call before may still be in memory."""
    (was, becomes), (arrays, want) = WRONG[name], SMALL.arrays({"seed": 1 + list(WRONG).index(name)})
    module = make_module(SMALL, "sm_90a")
    source, count = re.subn(was, becomes, module.source())
    assert count
    try:
        got = module.with_source(source).call("main", arrays)[-1]
    except EmulationError:
        return
    assert not np.allclose(got.astype("float64"), want, rtol=2e-3, atol=5e-2)


def replayed() -> list[tuple[float, bool, int]]:
    """Return, for each call, the error against float64, whether a replayed graph gives the same bits, and launches."""
    rng, (rows, depth, columns) = np.random.default_rng(2), (48, 34 * 64, 67 * 128)  # 67 tiles for 132 SMs
    weight = rng.standard_normal((depth, columns)).astype("float16")
    text = f"""<ir_version: 10, opset_import: ["" : 23]>
    matmul (float16[{rows}, {depth}] x, float16[{depth}, {columns}] w) => (float16[{rows}, {columns}] y) {{
        y = MatMul (x, w)
    }}"""
    model = onnx.parser.parse_model(text)
    model.graph.initializer.append(onnx.numpy_helper.from_array(weight, "w"))
    del model.graph.input[1]
    compiled = lowering.compile(model, "cuda:sm_90a")
    x = compiled.gpu.copy(np.zeros((rows, depth), "float16"))
    plain, graph = compiled.bind({"x": x}), compiled.bind({"x": x}, graph=True)
    results = []
    for _ in range(2):
        feed = rng.standard_normal((rows, depth)).astype("float16")
        tensors.copy_to(tvm_ffi.from_dlpack(feed), x)
        device.take_calls()
        got = on_host(plain()["y"])
        launches = sum(call.name == "cuLaunchKernelEx" for call in device.take_calls())
        worst = float(np.abs(got - feed.astype("float64") @ weight.astype("float64")).max())
        results.append((worst, np.array_equal(got, on_host(graph()["y"])), launches))
    return results


@pytest.mark.slow
def test_a_model_and_its_graph() -> None:
    """Default tiles, new numbers in the workspace of partial results: their reduction is a launch of its own."""
    for worst, same, launches in emulated.run(replayed, arch="sm_90a", timeout=500):
        assert (
            worst < 0.25 and same and (launches == 2 or not emulated.counts())
        )  # totals of 2176 terms are up to about 250: half a step of float16
