"""Clusters of blocks: the emulator reports their errors, and matmuls in clusters are right."""

from __future__ import annotations

import re
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest

import lowering
from schedules.cuda.matmul.matmul_tiles import WgmmaMatmulTiles
from tests import cuda_emulation as emulated
from tests.cuda.attention.prefill_cases import TURNS
from tests.cuda.audits.machine_code import emitted
from tests.cuda.matmul.test_matmul_on_gpus import Case, check, first_variant, make_module
from tests.cuda_emulation import EmulationError, TensorMap
from tests.cuda_emulation.mutations import survivors

SOURCE = Path(__file__).with_name("clusters.cu").read_text()
launch = partial(emulated.launch, SOURCE, cluster=2)
ALL = 31


@pytest.mark.no_gpu
def test_blocks_have_a_rank_and_synchronize() -> None:
    for order in emulated.ORDERS:
        (y,) = launch("ranks", [6], [128], [np.zeros(12, "int32")], order=order)
        assert y.tolist() == [0, 101, 2, 103, 4, 105, 101, 0, 103, 2, 105, 4]


def boxes(steps: int, order: emulated.Order, arrivals: emulated.Arrivals) -> bool:
    x = np.random.default_rng(0).standard_normal((16, 64)).astype("float16")
    y = np.full((2, 2, 8, 64), np.nan, "float16")
    arguments = [TensorMap(1, (64, 4)), x, y, np.int32(steps)]
    got = launch("shared_boxes", [2], [128], arguments, shared_bytes=1024, order=order, arrivals=arrivals)[2]
    return np.array_equal(got, np.broadcast_to(x.reshape(2, 1, 8, 64), y.shape))


@pytest.mark.no_gpu
@pytest.mark.parametrize(("order", "arrivals"), TURNS)
def test_boxes_for_both(order: emulated.Order, arrivals: emulated.Arrivals) -> None:
    assert boxes(ALL, order, arrivals)


LEFT_OUT = {
    1: r"not initialized|race: ",  # the first barrier
    2: r"a block that has ended",  # the last barrier
    4: r"deadlock|race: ",  # letting go at the other block
    8: r"deadlock: .*bytes missing",  # copies for both
    16: r"that of another block of the cluster",  # reaching it
}


@pytest.mark.no_gpu
@pytest.mark.parametrize("step", LEFT_OUT)
def test_a_step_that_is_left_out_is_found(step: int) -> None:
    """The emulator finds it under some order of threads and copies. A result may show it as well."""
    said = []
    for order, arrivals in TURNS:
        try:
            said += [] if boxes(ALL - step, order, arrivals) else ["another result"]
        except EmulationError as error:
            said.append(str(error))
    print(said)
    reported = [text for text in said if re.search(LEFT_OUT[step], text)]
    assert reported and set(said) <= {*reported, "another result"}


@pytest.mark.no_gpu
def test_what_clusters_cannot_be() -> None:
    y = [np.zeros(128, "int32")]
    with pytest.raises(EmulationError, match="no multiple of the cluster"):
        launch("ranks", [3], [128], y)
    with pytest.raises(EmulationError, match=r"compute capability 9\.0"):
        launch("ranks", [2], [128], y, arch="sm_80")
    with pytest.raises(EmulationError, match="without waiting for it"):
        launch("not_awaited", [2], [128], y)


# ---- matmuls

PAIR = WgmmaMatmulTiles(1, 64, 3, 160, 24, swizzle=2, split_steps=100, blocks=4, cluster=2)
GATE = WgmmaMatmulTiles(2, 128, 3, 160, 24, swizzle=2, split_steps=2, cluster=2)
CASES = {
    "B along k": Case(n=72, b_transposed=True, tiles=PAIR, sizes=({"m": 70}, {"m": 130}, {"m": 550})),
    "B across": Case(m=256, n=72, k=400, tiles=PAIR, epilogue="residual", sizes=({},)),
    "gate, k in parts": Case(m=256, n=64, k=272, batch=2, epilogue="gate", dtype="bfloat16", tiles=GATE, sizes=({},)),
    "large tiles": Case(m=250, n=264, k=200, tiles=WgmmaMatmulTiles(2, 256, 4, 232, 40, cluster=2), sizes=({},)),
}


@pytest.mark.sampled(3)
@pytest.mark.parametrize("name", CASES)
def test_matmuls(name: str) -> None:
    """Rows of whole clusters, so many that part of the last may be empty, and a small M, which has another launch."""
    case = CASES[name]
    check(case, make_module(case, "sm_90a"), TURNS)


SMALL = Case(m=256, n=72, k=400, tiles=WgmmaMatmulTiles(1, 64, 3, 160, 24, 2, 100, blocks=2, cluster=2), sizes=({},))


@pytest.mark.no_gpu
def test_nothing_can_be_left_out_of_matmuls() -> None:
    """The only exception is the wait of a warp after its last rows. The steps include those of the cluster."""
    arrays, want = SMALL.arrays({})

    def right(after: list[Any]) -> bool:
        return np.allclose(after[-1].astype("float64"), want, rtol=2e-3, atol=5e-2, equal_nan=True)

    assert [step.name for step in survivors(make_module(SMALL, "sm_90a"), "main", arrays, right)] == ["cuda_warp_sync"]


WRONG = {
    "copies for the first block alone": ("(ushort)3)", "(ushort)1)"),
    "copies for the second block alone": ("(ushort)3)", "(ushort)2)"),
    "copies for a third block": ("(ushort)3)", "(ushort)7)"),
    "slots let go of here alone": ('"mapa.shared::cluster.u32 %0, %1, %2;"', '"mov.u32 %0, %1;"'),
    "fewer arrivals than both blocks'": ("(uint)8);", "(uint)4);"),
}


@pytest.mark.no_gpu
@pytest.mark.parametrize("name", WRONG)
def test_a_wrong_block_is_found(name: str) -> None:
    """The emulator reports it under every order of threads and copies."""
    arrays, _ = SMALL.arrays({})
    module = make_module(SMALL, "sm_90a")
    was, becomes = WRONG[name]
    assert was in module.source()
    wrong = module.with_source(module.source().replace(was, becomes))
    for order, arrivals in TURNS:
        with pytest.raises(EmulationError):
            wrong.call("main", arrays, order=order, arrivals=arrivals)


def test_few_rows_need_no_clusters() -> None:
    """Symbolic rows have a launch of each kind, static rows have one launch."""
    symbolic, clustered, single = (
        emitted(first_variant(Case(m=m, n=4096, k=512, tiles=None), "sm_90a").make(), "sm_90a")
        for m in ("m", 8192, 128 * 7)
    )
    for source, kernels in ((symbolic, 2), (clustered, 1), (single, 1)):
        assert source.count("__launch_bounds__(384)") == 2 * kernels  # with their declarations
        assert ("multicast::cluster" in source) == (source is not single)


def of_a_model() -> float:
    """Return the largest difference from float64, at numbers of rows for both launches."""
    weight = np.random.default_rng(1).standard_normal((64, 264)).astype("float16")
    text = """<ir_version: 10, opset_import: ["" : 23]>
    matmul (float16[m, 64] x, float16[64, 264] w) => (float16[m, 264] y) { y = MatMul (x, w) }"""
    model = onnx.parser.parse_model(text)
    model.graph.initializer.append(onnx.numpy_helper.from_array(weight, "w"))
    del model.graph.input[1]
    compiled, worst = lowering.compile(model, "cuda:sm_90a"), 0.0
    for rows in (200, 300):
        x = np.random.default_rng(rows).standard_normal((rows, 64)).astype("float16")
        want = x.astype("float64") @ weight.astype("float64")
        worst = max(worst, float(np.abs(compiled.run({"x": x})["y"] - want).max()))
    return worst


def test_a_model() -> None:
    """TVM launches it itself. `test_steps.py` has clusters in graphs."""
    assert emulated.run(of_a_model, arch="sm_90a", timeout=300) < 0.05
