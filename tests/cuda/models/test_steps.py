"""Decode steps on a GPU: calls of the driver in each step, and that graphs compute the same."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests import cuda_emulation as emulated
from tests.cuda.models import steps
from tests.support.error_codes import raises

SAMPLES = Path(__file__).parents[2] / "exports" / "samples"
PAGE = (Path(__file__).parents[3] / "docs" / "gpu_steps.md").read_text()
# Kernels of a step, by model, as the page has them.
LAUNCHES = {name: int(count) for name, count in re.findall(r"^\| (\w+): [^|]*\| (\d+) \|", PAGE, re.MULTILINE)}
MODELS = pytest.mark.parametrize("name", ["attention", pytest.param("decoder", marks=pytest.mark.slow)])


def run(function: Callable, *arguments: Any) -> Any:
    return emulated.run(function, *arguments, arch="sm_80", timeout=500)


@pytest.mark.no_gpu
@MODELS
def test_a_bound_step_launches_kernels_and_nothing_else(name: str) -> None:
    """They go to the caller's stream. Memory comes from the runtime's pool, which suffices after two steps."""
    for calls, free in run(steps.calls_of_steps, name, False)[2:]:
        assert calls == {"cuLaunchKernelEx": LAUNCHES[name]}
        assert free["cudaGetDevice"] == LAUNCHES[name]


@pytest.mark.no_gpu
def test_copies_wait_for_the_callers_stream_and_it_for_them() -> None:
    """The runtime copies on the default stream, of which other streams may know nothing."""
    calls = [call for call in run(steps.copies_of_a_step) if call not in ("cudaEventCreate", "cudaEventDestroy")]
    assert calls == [
        "cudaEventRecord own", "cudaStreamWaitEvent default", "cudaMemcpyAsync default",
        "cudaEventRecord default", "cudaStreamWaitEvent own",
    ]  # fmt: skip


@pytest.mark.no_gpu
@MODELS
def test_a_replayed_step_is_one_call(name: str) -> None:
    first, *later_steps = run(steps.calls_of_steps, name, True)
    for calls, free in later_steps:
        assert (calls, free) == ({"cudaGraphLaunch": 1}, {"cudaGetDevice": 1})
    assert first[0]["cuLaunchKernelEx"] == first[0]["cuLaunchKernelEx elsewhere"] == LAUNCHES[name]
    assert first[0]["cudaStreamSynchronize"] == 0


@MODELS
def test_replayed_steps_are_the_others(name: str) -> None:
    """Also while others run, and where the runtime's pool frees memory."""
    assert run(steps.replayed, name) == (0, True)


@pytest.mark.no_gpu
def test_a_graph_of_copies_is_noticed() -> None:
    worst, same = run(steps.replayed, "attention", "copies are recorded")
    assert worst > 0 and not same


@pytest.mark.no_gpu
def test_a_step_that_waits_is_noticed() -> None:
    with pytest.raises(emulated.EmulationError, match=r"does no work to wait for|the capture has failed before"):
        run(steps.replayed, "attention", "a step waits")


@pytest.mark.no_gpu
@pytest.mark.parametrize("fault", ["memory is not retained", "no thread is retained"])
def test_memory_that_is_not_retained_is_noticed(fault: str) -> None:
    with pytest.raises(emulated.EmulationError, match="freed"):
        run(steps.replayed, "attention", fault)


def test_a_disturbed_capture_says_so_and_is_made_by_the_next_call() -> None:
    message, worst = run(steps.captured_again)
    assert worst == 0
    assert re.match(
        r"the call has run, but could not be captured as a graph \(.*CUDA_ERROR_STREAM_CAPTURE_INVALIDATED.*\)\. "
        r"During the first call no other thread may allocate",
        message,
    )


def test_tensor_maps_are_part_of_a_graph() -> None:
    steps_of_graph = emulated.run(steps.matmul_by_tensor_maps, arch="sm_90a", timeout=500)
    assert [difference for difference, _ in steps_of_graph] == [0, 0, 0]
    assert not emulated.counts() or steps_of_graph[0][1] > 0
    assert [maps for _, maps in steps_of_graph[1:]] == [0, 0]


@pytest.mark.no_gpu
def test_a_dropped_graph_gives_everything_back() -> None:
    allocated, freed = run(steps.memory_of_a_graph)
    assert 0 < allocated <= freed  # allocations of earlier tests may be freed as well


def test_what_cannot_be_a_graph() -> None:
    with raises("cuda_graph.host_read"):
        run(steps.reads_a_size)
    with raises("cuda_graph.static_cache_unsupported"):
        run(steps.has_slots, str(SAMPLES / "llama-past-dynamo23"))
    with raises("cuda_graph.outputs_unsupported"):
        run(steps.binds_an_output)
    with raises("artifact.graph_unsupported"):
        run(steps.is_old)
    with raises("cuda_graph.inputs_missing"):
        run(steps.has_no_inputs)
