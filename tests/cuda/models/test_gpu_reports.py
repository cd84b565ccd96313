"""The report of a GPU bundle: variants by their time, and profiles by kernel."""

from __future__ import annotations

from pathlib import Path

import pytest

from benchmarks.gpu import results
from benchmarks.gpu.bundling import cases
from benchmarks.gpu.host.profiles import Launch, kernels_of, summarize
from benchmarks.gpu.plan import Plan
from benchmarks.gpu.report import rows, table
from tests.cuda.models.errands import timed

pytestmark = pytest.mark.no_gpu

KERNELS, CASES = cases.plan()


def test_variants_are_shown_by_their_time(tmp_path: Path) -> None:
    name = "decode tiles B1 kv 4096"
    contenders = [KERNELS[kernel].contender for kernel in CASES[name].kernels]
    record = results.Results("digest", "a GPU", "2000-01-01")
    times = {contender: (1 + (5 * n) % len(contenders)) * 1e-5 for n, contender in enumerate(contenders)}
    record.found["cases"][name] = {contender: timed(seconds) for contender, seconds in times.items()}
    record.found["cases"][name]["flashinfer"] = timed(2e-5)
    plan = Plan("digest", KERNELS, CASES)
    shown = [row.contender for row in rows(plan, record)]
    assert shown == sorted(times, key=lambda contender: times[contender])
    best = min(times, key=lambda contender: times[contender])
    said = f"best of {name}: {best} 10 us, default decode {times['decode'] * 1e6:.4g} us, {times['decode'] / 1e-5:.3f}x"
    assert said in table(plan, record)


def test_a_profile_is_accumulated_by_kernel() -> None:
    launches = [Launch("a", 0.0, 1.0), Launch("b", 1.5, 2.0), Launch("a", 2.0, 5.0), Launch("b", 5.0, 6.0)]
    record = summarize(launches, 2)
    assert record["kernels"] == {
        "a": {"seconds": 2.0, "launches": 1.0, "median": 2.0},
        "b": {"seconds": 0.75, "launches": 1.0, "median": 0.75},
    }
    assert (record["span"], record["busy"]) == (3.0, 2.75)
    with pytest.raises(ValueError, match="saw no kernel"):
        summarize([], 2)
    results_of = results.Results("digest", "a GPU", "2000-01-01")
    results_of.found["steps"]["llama profile"] = record
    assert "step of llama profile: 3e+06 us from first to last" in table(Plan("digest", {}, {}), results_of)


@pytest.mark.slow  # needs torch
def test_the_profiler_has_what_is_asked_of_it() -> None:
    torch = pytest.importorskip("torch")
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profiled:
        torch.ones(3) + 1
    assert any("add" in launch.kernel and launch.end >= launch.start for launch in kernels_of(profiled.events(), "CPU"))
    assert kernels_of(profiled.events(), "CUDA") == []
