"""The emulator reports the errors of kernels, and runs right ones."""

from __future__ import annotations

import os
from functools import partial
from pathlib import Path

import numpy as np
import onnx
import pytest

from lowering.compiling.cache import artifact_cache
from lowering.compiling.compiler import compile_to
from tests import cuda_emulation as emulated
from tests.cuda_emulation import EmulationError, TensorMap, build

pytestmark = pytest.mark.no_gpu

SOURCE = Path(__file__).with_name("bugs.cu").read_text()
BOTH = pytest.mark.parametrize("order", emulated.ORDERS)
WHENEVER = pytest.mark.parametrize("arrivals", emulated.ARRIVALS)

launch = partial(emulated.launch, SOURCE)


RNG = np.random.default_rng(0)


def random(*shape: int, dtype: str = "float32") -> np.ndarray:
    return RNG.standard_normal(shape).astype(dtype)


def unwritten(*shape: int, dtype: str = "float32") -> np.ndarray:
    return np.full(shape, np.nan, dtype)


@BOTH
def test_shared_memory_with_a_barrier(order: emulated.Order) -> None:
    x = random(128)
    np.testing.assert_array_equal(launch("reverse", [1], [128], [x, unwritten(128)], order=order)[1], x[::-1])


@BOTH
@pytest.mark.parametrize("kernel", ["no_barrier", "no_second_barrier"])
def test_a_missing_barrier_is_a_race(kernel: str, order: emulated.Order) -> None:
    with pytest.raises(EmulationError, match="race: "):
        launch(kernel, [1], [128], [random(128), unwritten(128)], order=order)


def test_bounds_of_shared_memory() -> None:
    for beyond in (1, 2, -1):
        with pytest.raises(EmulationError, match=r"write of 4 bytes .*shared"):
            launch("static_bounds", [1], [128], [unwritten(128), np.int32(beyond)])
    launch("static_bounds", [1], [128], [unwritten(128), np.int32(0)])
    launch("dynamic_bounds", [1], [128], [unwritten(128), np.int32(1)], shared_bytes=516)
    with pytest.raises(EmulationError, match=r"at byte 516 of the shared array \(dynamic\), which has 516 bytes"):
        launch("dynamic_bounds", [1], [128], [unwritten(128), np.int32(2)], shared_bytes=516)


def test_what_was_not_written_is_nan() -> None:
    (y,) = launch("not_written", [1], [128], [random(128)])
    np.testing.assert_array_equal(y, [np.nan, 1] * 64)


def test_bounds_of_device_memory() -> None:
    x, y = random(5), unwritten(7)
    launch("device_bounds", [1], [1], [x, y, np.int32(4), np.int32(6)])
    for at, to, what in [(5, 0, "read"), (-1, 0, "read"), (0, 7, "write"), (0, 1 << 30, "write")]:
        with pytest.raises(EmulationError, match=f"{what} of 4 bytes"):
            launch("device_bounds", [1], [1], [x, y, np.int32(at), np.int32(to)])


def test_host_memory_is_refused() -> None:
    address = np.array([1 << 40], "uint64")
    with pytest.raises(EmulationError, match="not device memory"):
        launch("host_memory", [1], [1], [address, unwritten(1)])


def test_vectors_are_aligned() -> None:
    x = random(8)
    np.testing.assert_array_equal(launch("misaligned", [1], [1], [x, unwritten(4), np.int32(4)])[1], x[4:])
    with pytest.raises(EmulationError, match="not aligned to 16 bytes"):
        launch("misaligned", [1], [1], [x, unwritten(4), np.int32(2)])


def test_divergence_and_deadlock() -> None:
    with pytest.raises(EmulationError, match=r"divergence: vote.sync, while .* in shfl.sync"):
        launch("divergent", [1], [32], [unwritten(32)])
    with pytest.raises(EmulationError, match=r"deadlock: thread 0 to 31: barrier 1 .*; thread 32 to 63: barrier 2"):
        launch("deadlock", [1], [64], [unwritten(64)])


@BOTH
def test_named_barriers(order: emulated.Order) -> None:
    x = random(32)
    np.testing.assert_array_equal(launch("named", [1], [64], [x, unwritten(32)], order=order)[1], x)


def test_mbarriers_count() -> None:
    with pytest.raises(EmulationError, match="more arrivals than its count of 1"):
        launch("over_arrived", [1], [32], [unwritten(32)])


@BOTH
@WHENEVER
def test_asynchronous_copies(order: emulated.Order, arrivals: emulated.Arrivals) -> None:
    x = random(128)
    good = launch("copies", [1], [32], [x, unwritten(128), np.int32(1)], order=order, arrivals=arrivals)
    np.testing.assert_array_equal(good[1], x[::-1])
    with pytest.raises(EmulationError, match=r"race: .* write by cp.async of warp 0"):
        launch("copies", [1], [32], [x, unwritten(128), np.int32(0)], order=order, arrivals=arrivals)


# ---- bulk tensor copies: bits of `steps` in bugs.cu

ALL = 15
LEFT_OUT = {
    1: "no fence.mbarrier_init",
    2: "race: ",
    4: "without a fence.proxy.async",
    8: "the block ended while bulk stores",
}


def boxes(
    x: np.ndarray, steps: int = ALL, *, rows: int = 8, displace: int = 0, swizzle: int = 0, **named: str
) -> np.ndarray:
    maps = [TensorMap(i, (64, rows), swizzle) for i in (2, 3)]
    numbers = [np.int32(rows), np.int32(steps), np.int32(displace)]
    arguments = [*maps, x, unwritten(*x.shape, dtype="float16"), *numbers]
    grid = [-(-x.shape[0] // rows)]
    return launch("boxes", grid, [128], arguments, shared_bytes=rows * 128, **named)[3]


@BOTH
@WHENEVER
@pytest.mark.parametrize("swizzle", [0, 128])
def test_boxes(swizzle: int, order: emulated.Order, arrivals: emulated.Arrivals) -> None:
    x = random(21, 72, dtype="float16")
    expected = np.full((21, 72), np.nan, "float16")
    expected[:, :64] = 0  # outside of the tensor are zeros, and no stores
    expected[1:, 3:64] = 2 * x[:20, :61]
    np.testing.assert_array_equal(boxes(x, swizzle=swizzle, order=order, arrivals=arrivals), expected)


@BOTH
@WHENEVER
@pytest.mark.parametrize("step", LEFT_OUT)
def test_boxes_with_a_step_left_out(step: int, order: emulated.Order, arrivals: emulated.Arrivals) -> None:
    with pytest.raises(EmulationError, match=LEFT_OUT[step]):
        boxes(random(21, 72, dtype="float16"), ALL - step, order=order, arrivals=arrivals)


def test_boxes_fit_shared_memory() -> None:
    x = random(16, 72, dtype="float16")
    with pytest.raises(EmulationError, match="not aligned to 128 bytes"):
        boxes(x, displace=8)
    with pytest.raises(EmulationError, match="not aligned to 1024 bytes"):
        boxes(x, displace=64, swizzle=128)
    with pytest.raises(EmulationError, match=r"bulk tensor load of 1024 bytes at byte 128 of the shared array"):
        boxes(x, displace=64)


@pytest.mark.parametrize(
    "tensor_map, why",
    [
        (TensorMap(2, (64, 257)), "box is 0 or above 256"),
        (TensorMap(2, (64, 0)), "box is 0 or above 256"),
        (TensorMap(2, (4, 8)), "no multiple of 16 bytes"),
        (TensorMap(2, (72, 8), 128), "exceeds the swizzle"),
        (TensorMap(2, (64, 8), strides=(136,)), "a stride is no multiple of 16 bytes"),
        (TensorMap(2, (64, 8), offset=8), "not aligned to 16 bytes"),
    ],
)
def test_tensor_maps_that_the_driver_refuses(tensor_map: TensorMap, why: str) -> None:
    x = random(16, 72, dtype="float16")
    with pytest.raises(EmulationError, match=f"cuTensorMapEncodeTiled: .*{why}"):
        launch("boxes", [1], [128], [tensor_map, tensor_map, x])


def test_launches_that_the_driver_refuses() -> None:
    x = [random(256), unwritten(256)]
    with pytest.raises(EmulationError, match=r"256 threads .*__launch_bounds__\(128\)"):
        launch("reverse", [1], [256], x)
    with pytest.raises(EmulationError, match="an extent of the grid or block is 0"):
        launch("reverse", [0], [128], x)
    with pytest.raises(EmulationError, match="more shared memory than the device has"):
        launch("reverse", [1], [128], x, shared_bytes=100 << 10, arch="sm_86")
    with pytest.raises(EmulationError, match="static shared memory"):
        launch("reverse", [1], [128], x, shared_bytes=99 << 10, arch="sm_86")
    # Static arrays count among the 48 KB of a kernel by default.
    with pytest.raises(EmulationError, match="48640 dynamic are allowed"):
        launch("reverse", [1], [128], x, shared_bytes=(48 << 10) - 256)
    launch("reverse", [1], [128], x, shared_bytes=(48 << 10) - 512)
    with pytest.raises(EmulationError, match="cuModuleGetFunction: nothing"):
        launch("nothing", [1], [128], x)


def test_a_crash_ends_no_more_than_its_own_call() -> None:
    with pytest.raises(EmulationError, match="died with exit status 7"):
        emulated.run(os._exit, 7)
    with pytest.raises(EmulationError, match="did not answer within 1 seconds"):
        emulated.run(_forever, timeout=1)
    assert emulated.run(os.getpid) != os.getpid()


def _forever() -> None:
    while True:
        pass


def test_unknown_instructions_are_named() -> None:
    source = 'extern "C" __global__ void k() { asm volatile("tcgen05.wait::ld.sync.aligned;"); }'
    with pytest.raises(NotImplementedError, match="does not know the PTX instruction"):
        emulated.launch(source, "k", [1], [32], [])


def test_artifacts_for_the_emulation_are_not_cached(tmp_path: Path) -> None:
    """Otherwise, the same file compiled for a GPU would come from the cache."""
    value = onnx.helper.make_tensor_value_info
    graph = onnx.helper.make_graph(
        [onnx.helper.make_node("Relu", ["x"], ["y"])],
        "relu",
        [value("x", onnx.TensorProto.FLOAT, [64])],
        [value("y", onnx.TensorProto.FLOAT, [64])],
    )
    onnx.save(onnx.helper.make_model(graph), tmp_path / "model.onnx")
    assert emulated.run(count_cached_artifacts, tmp_path, arch="sm_80") == 0


def count_cached_artifacts(folder: Path) -> int:
    """Return how many artifacts are cached when the model of a folder is compiled, in the emulation's process."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("ONNX_LOWERING_CACHE", str(folder / "cache"))
        compile_to(folder / "artifact", folder / "model.onnx", "cuda:sm_80")
        return artifact_cache.size()[0]


def test_cached_files_have_keys_of_sources_and_compiler(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def read_digest() -> str:
        build._digest_of_sources.cache_clear()
        return build._digest_of_sources(tmp_path)

    (tmp_path / "emulation.h").write_text("int a;")
    digests = [read_digest(), read_digest()]
    assert digests[0] == digests[1]
    (tmp_path / "emulation.h").write_text("int b;")
    digests.append(read_digest())
    for name in ("_compiler", "_cpu"):
        monkeypatch.setattr(build, name, lambda: "another")
        digests.append(read_digest())
    monkeypatch.undo()
    build._digest_of_sources.cache_clear()
    assert len(set(digests)) == len(digests) - 1
