"""`python -m benchmarks cuda`: a bundle is checked as on a GPU, and a run survives the errors that occur there."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import lowering
from benchmarks.gpu import command, results
from benchmarks.gpu.bundling import bundle, cases, kernels, llama, problems
from benchmarks.gpu.host import attention, drawn, jobs, measure, sanitizer
from benchmarks.gpu.host.check import check
from benchmarks.gpu.host.isolate import Answer, isolated
from benchmarks.gpu.host.memory import Host, Torch
from benchmarks.gpu.plan import Bar, Case, Kernel, Plan, Program, Sizes, read
from benchmarks.gpu.report import rows, table
from lowering.attention.record.problem import AttentionProblem, Window
from lowering.attention.reference import compute_reference
from lowering.demo.decoder import DecoderConfig
from lowering.manifest import WEIGHTS
from lowering.target import resolve
from tests import cuda_emulation as emulated
from tests.cuda.models import errands

pytestmark = pytest.mark.no_gpu

TINY = Sizes(2, 5, 9, (4, 12))
KERNELS, CASES = cases.plan()
PROBLEMS = {k.problem: k for k in KERNELS.values() if k.operation == "attention"}


def small(kernel: Kernel) -> AttentionProblem:
    """Return its problem with few heads."""
    p = AttentionProblem.from_json(kernel.problem)
    return replace(p, q_heads=2 * p.group, kv_heads=2, head_dim=8, v_head_dim=8)


# -- on the emulated GPU ----------------------------------------------------------------------------------------------


def build_and_check(folder: Path) -> list[Any]:
    """Build a bundle in the emulation, and return the result of `check` for each kernel, right and wrong."""
    heads, ragged_window = {"q_heads": 4, "kv_heads": 2}, Window(right=0, offset="lengths")
    causal = problems.attention_problem("f16", 64, window=Window(right=0), **heads)
    ragged = problems.attention_problem("bf16", 64, lengths=True, window=ragged_window, **heads)
    update = replace(KERNELS["update in place"], checks=(Sizes(2, 3, 7, (-1, 5)),))
    kernels = {
        "causal": problems.attention_kernel("causal", "wgmma", causal, ((1, 70, 133),)),
        "ragged": problems.attention_kernel("ragged", "decode", ragged, ((3, 1, 77),)),
        "update": update,
        "wrapping": replace(update, problem=update.problem.replace('"circular": false', '"circular": true')),
    }
    pool = ThreadPoolExecutor(1)  # the emulation belongs to this process
    plan = bundle.libraries(folder, kernels, {}, pool)
    times = [path.stat().st_mtime_ns for path in folder.rglob("*.so")]
    assert bundle.libraries(folder, kernels, {}, pool) == plan
    assert [path.stat().st_mtime_ns for path in folder.rglob("*.so")] == times, "they were built again"
    right = plan.kernels
    wrong = {
        "causal": replace(right["causal"], problem=right["causal"].problem.replace("0.125", "0.13")),
        "ragged": replace(right["ragged"], problem=right["ragged"].problem.replace('"right": 0', '"right": -1')),
    }
    replace(plan, kernels={**right, **{f"not {name}": kernel for name, kernel in wrong.items()}}).write(folder)
    answers: list[Any] = []
    for name in (*right, *(f"not {name}" for name in wrong)):
        try:
            answers.append(check(folder, name, lambda text: None)["error"])
        except ValueError as error:
            answers.append(str(error))
    return answers


def test_a_bundle_is_checked_where_its_gpu_is(tmp_path: Path) -> None:
    causal, ragged, update, *wrong = emulated.run(build_and_check, tmp_path)
    assert 0 < causal < 2e-3 and 0 < ragged < 1.6e-2 and update == 0
    assert len(wrong) == 3 and all(problem.startswith("wrong at") for problem in wrong)


# -- expected results, and counts of work ------------------------------------------------------------------------------


@pytest.mark.parametrize("kernel", PROBLEMS.values(), ids=lambda kernel: kernel.name)
def test_expected_results_are_the_reference(kernel: Kernel) -> None:
    p, memory = small(kernel), Host(0)
    arrays = attention.draw(p, TINY, memory, poison=True)
    right = attention.expected(p, arrays, memory)
    want = compute_reference(p, **{name: arrays[name] for name in p.inputs()})["y"]
    np.testing.assert_allclose(right, want, rtol=1e-12, atol=1e-12)
    assert np.isfinite(want).all()
    hidden = np.isnan(arrays["k"].astype(np.float64)).any()
    assert hidden == (p.lengths or p.mask is not None or p.window is not None)


def test_one_wrong_row_is_an_error() -> None:
    memory = Host(1)
    right = memory.normal((2, 3, 50, 64), "float64")
    y = right.astype(np.float16)
    assert attention.error(y, right, memory) < 5e-4
    y[1, 2, 49] *= 1.01
    assert attention.error(y, right, memory) == pytest.approx(0.01, rel=0.1)
    y[0, 0, 0, 0] = np.nan
    assert attention.error(y, right, memory) == float("inf")
    right[0, 0, 0] = 0
    y[0, 0, 0] = 1e-3
    assert attention.error(y, right, memory) > 1e9


@pytest.mark.parametrize("kernel", PROBLEMS.values(), ids=lambda kernel: kernel.name)
def test_work_is_that_of_visible_pairs(kernel: Kernel) -> None:
    p, memory = replace(small(kernel), mask=None), Host(2)
    sizes = TINY if p.lengths else replace(TINY, lengths=())
    arrays = attention.draw(p, sizes, memory, poison=False)
    seen = 0
    for b in range(sizes.batch):
        shown, _ = attention.visible(p, arrays, memory, b, 0, slice(0, sizes.q_len))
        seen += p.q_heads * int(shown.sum())
    assert problems.pairs(p, sizes) == seen
    assert problems.flops(p, sizes) == 4 * 8 * seen


def test_the_plan_travels(tmp_path: Path) -> None:
    programs = {"decoder": Program("decoder", "model", "models/decoder", {"tolerance": 0.1})}
    plan = Plan("abc", KERNELS, CASES, programs, ("update in place",), {"flashinfer": "x.so"}, {"this": "not there"})
    plan.write(tmp_path)
    assert read(tmp_path) == plan
    assert {case.group for case in plan.chosen(["decode*", "update"])} == {"decode", "decode tiles", "update"}
    with pytest.raises(ValueError, match="no case or group matches 'nothing'"):
        plan.chosen(["nothing"])
    for case in plan.cases.values():
        records = {plan.kernels[name].problem for name in case.kernels}
        assert len(records) == 1 and case.amount > 0
        assert {bar.contender for bar in case.bars} <= {plan.kernels[name].contender for name in case.kernels}


@pytest.mark.slow  # needs torch
@pytest.mark.parametrize("kernel", PROBLEMS.values(), ids=lambda kernel: kernel.name)
def test_pytorch_agrees(kernel: Kernel) -> None:
    pytest.importorskip("torch")
    from benchmarks.gpu.host.peers import makers_of

    p, memory = small(replace(kernel, problem=kernel.problem.replace("float16", "float32"))), Torch(0, "cpu")
    p = replace(p, dtype="float32", v_dtype="float32")
    poisoned = attention.draw(p, TINY, memory, poison=True)
    right = attention.expected(p, poisoned, memory)
    inputs = {name: poisoned[name].numpy() for name in p.parameters() if name != "y"}
    np.testing.assert_allclose(right.numpy(), compute_reference(p, **inputs)["y"], rtol=1e-12, atol=1e-12)
    if not p.softcap:
        arrays = attention.draw(p, TINY, memory, poison=False)
        sees = attention.expected(p, arrays, memory)
        y = makers_of(("math",), p, memory, {})["math"](arrays)()
        assert attention.error(y.nan_to_num(), sees, memory) < 1e-5


# -- runs -------------------------------------------------------------------------------------------------------------


def test_hangs_and_crashes_cost_one_call() -> None:
    assert isolated(errands.returns, 1, limit=30) == Answer(2, doing="returning")
    assert isolated(errands.raises, limit=30) == Answer(problem="RuntimeError: no", doing="raising")
    died = "the process died with exit status -6"
    assert isolated(errands.crashes, limit=30) == Answer(problem=died, doing="crashing")
    assert isolated(errands.hangs, limit=5) == Answer(problem="no answer in 5 s", doing="hanging", late=True)


PLAN = Plan(
    "digest",
    {name: replace(KERNELS["mma f16 D128 full"], name=f"{name} full", contender=name) for name in ("mma", "wgmma")},
    {
        "full": Case(
            "full", "prefill", ("wgmma", "mma"), ("cudnn", "flash"), TINY, 2e9, "FLOP",
            (Bar("wgmma", rate=1e12), Bar("wgmma", ratio=1.0), Bar("mma", share=0.9)),
        )
    },
)  # fmt: skip


def test_a_run_goes_on_where_the_last_one_stopped(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    done, good = [], {"mma": False}

    def job(kind: str, name: str, answer: Callable[[], Answer]) -> jobs.Job:
        def run(limit: float) -> Answer:
            done.append(name)
            return answer()

        return jobs.Job(kind, name, run, 30)

    def todo(record: results.Results) -> list[jobs.Job]:
        case = {
            "wgmma": errands.timed(1e-3),
            "mma": errands.timed(4e-3),
            "cudnn": errands.timed(2e-3),
            "flash": {"problem": "refused"},
        }
        return [
            job(
                "checks", "mma", lambda: Answer({"error": 1e-4}) if good["mma"] else Answer(problem="boom", doing="S 3")
            ),
            job("limits", "matmul", lambda: Answer({"rate": 4e12})),
            job("cases", "full", lambda: Answer(case)),
        ]

    layout = results.Store([tmp_path, tmp_path / "copy"], PLAN.digest, "a GPU")
    measure.measure(PLAN, todo, layout, 60, 60)
    assert done == ["mma", "matmul", "full"]
    shown = capsys.readouterr().out
    assert "checks: mma: S 3: boom" in shown and "bars met: 2 of 3" in shown
    wgmma, mma = rows(PLAN, results.read(layout.path))
    assert (wgmma.rate, wgmma.share, wgmma.ratio) == (2e12, 0.5, 2.0)
    assert mma.ratio == 0.5 and mma.bars == [("0.9 of limit", False)]
    assert results.read(tmp_path / "copy" / layout.path.name) == results.read(layout.path)
    measure.measure(PLAN, todo, layout, 5, 60)
    assert done[3:] == [], "no time was left"
    assert "1 of 1 jobs are left" in capsys.readouterr().out
    good["mma"] = True
    layout = results.Store([tmp_path], PLAN.digest, "a GPU")
    measure.measure(PLAN, todo, layout, 60, 60)
    measure.measure(PLAN, todo, layout, 60, 60)
    assert done[3:] == ["mma"]
    assert "checks: 1 right of 1" in table(PLAN, layout.results)


def test_each_gpu_has_results_of_its_own(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "no folder").write_text("")
    layout, other = (
        results.Store([tmp_path, tmp_path / "no folder"], "abc", name) for name in ("NVIDIA H100", "NVIDIA H200")
    )
    layout.add("checks", "mma", {"error": 0.0})
    other.add("checks", "mma", {"problem": "wrong"})
    assert "no folder" in capsys.readouterr().out, "what cannot be copied is said, and nothing else is lost"
    assert results.Store([tmp_path], "abc", "NVIDIA H100").results.has("checks", "mma")
    assert results.read(other.path).found["checks"] == {"mma": {"problem": "wrong"}}
    assert sorted(path.name for path in tmp_path.glob("*.json")) == [
        "results-nvidia-h100-abc.json", "results-nvidia-h200-abc.json",
    ]  # fmt: skip


def test_checks_do_not_wait_for_one_that_hangs(tmp_path: Path) -> None:
    """Results of other jobs are in the file before the last one answers, and its time counts."""
    layout = results.Store([tmp_path], PLAN.digest, "a GPU")
    seen: list[list[str]] = []

    def slow(limit: float) -> Answer:
        time.sleep(1.0)
        seen.append(sorted(results.read(layout.path).found["checks"]))
        return Answer(problem=f"no answer in {limit:.0f} s", late=True)

    def todo(record: results.Results) -> list[jobs.Job]:
        quick = [jobs.Job("checks", name, lambda limit: Answer({"error": 0.0}), 30) for name in ("a", "b")]
        return [jobs.Job("checks", "hanging", slow, 30), *quick]

    measure.measure(PLAN, todo, layout, 60, 12)
    assert seen == [["a", "b"]]
    assert layout.results.found["checks"]["hanging"] == {"problem": "no answer in 12 s"}


def test_a_job_that_had_less_than_its_time_is_not_blamed(tmp_path: Path) -> None:
    layout = results.Store([tmp_path], PLAN.digest, "a GPU")
    late = jobs.Job("cases", "full", lambda limit: Answer(problem="no answer", late=True), 30)
    measure.measure(PLAN, lambda _: [late], layout, 20, 60)
    assert not layout.path.exists()
    measure.measure(PLAN, lambda _: [late], layout, 60, 60)
    assert results.read(layout.path).found["cases"]["full"] == {"problem": "no answer"}


def test_what_nobody_knows_comes_first(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sanitizer, "find", lambda: "compute-sanitizer")
    kinds = ("model", "step", "weights", "flex", "decoder", "batcher")
    programs = {kind: Program(kind, kind, kind) for kind in kinds}
    plan = Plan("digest", KERNELS, CASES, programs, ("update in place",)).with_peers([], [])
    everything = jobs.Bundle(tmp_path, plan, tuple(plan.cases.values()), everything=True)
    listed = everything.jobs(results.Results("digest", "a GPU", "2000-01-01"))
    order = [f"{job.kind} {job.name}" for job in listed]
    assert len(order) == len(set(order)) and {job.name for job in listed if job.kind == "checks"} == set(KERNELS)
    stages = [
        "limits copy", "checks 4 blocks memory", "cases read 16 MiB", "checks k16w8s2p128m1 decode f16",
        "checks wgmma f16 D128 full", "models model", "steps step tokens", "steps step profile",
        "cases decode tiles B1 kv 16384", "weights weights", "flex flex", "decoders decoder", "decoders batcher",
        "sanitizer racecheck update in place", "cases decode f16 B1 kv 4096", "cases f16 D128 full S4096",
    ]  # fmt: skip
    assert [order.index(stage) for stage in stages] == sorted(order.index(stage) for stage in stages)
    peers = {peer for case in plan.cases.values() for peer in case.peers}
    assert "cublas" in peers and not peers & {"flex", "compiled"}
    with pytest.raises(ValueError, match="no case has the peer 'nothing'"):
        plan.with_peers(["nothing"], [])


def test_missing_things_are_in_the_results(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "")
    plan = Plan("digest", KERNELS, CASES, missing={"flashinfer": "not installed"}).with_peers(["flex"], [])
    missing = measure.missing_here(plan)
    assert missing["flashinfer"] == "not installed" and "--with" in missing["compiled"]
    assert set(missing) == {"flashinfer", "compiled", "compute-sanitizer"}
    record = results.Results("digest", "a GPU", "2000-01-01")
    record.found["missing"] = {what: {"note": why} for what, why in missing.items()}
    assert "missing: flashinfer: not installed" in table(plan, record)


def test_a_case_goes_on_without_who_ended_it(monkeypatch: pytest.MonkeyPatch) -> None:
    calls = []

    def run_alone(function: Any, folder: Path, name: str, peers: Any, without: dict[str, str], limit: float) -> Answer:
        calls.append(dict(without))
        dying = {"wgmma": "the process died", "cudnn": "no answer"}
        for contender, problem in dying.items():
            if contender not in without:
                return Answer(problem=problem, doing=contender)
        return Answer({"mma": errands.timed(1.0)}, doing="timing")

    monkeypatch.setattr(jobs, "run_isolated", run_alone)
    record = results.Results("digest", "a GPU", "2000-01-01")
    record.found["checks"] = {"mma": {"error": 0.0}, "wgmma": {"error": 0.0}}
    answer = jobs.timed(Path(), PLAN, PLAN.cases["full"], record, 60)
    assert answer.result == {"mma": errands.timed(1.0)}
    assert calls[-1] == {"wgmma": "the process died", "cudnn": "no answer"}
    record.found["checks"]["mma"] = {"problem": "wrong"}
    jobs.timed(Path(), PLAN, PLAN.cases["full"], record, 60)
    assert calls[-1]["mma"] == "wrong", "what is not right is not timed"


def test_results_are_drawn_anywhere(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    record = results.Results("digest", "a GPU", "2000-01-01")
    record.found["limits"] = {"matmul": {"rate": 8e14}, "about": {"torch": "2", "cuda": "13", "cudnn": 9}}
    name = "f16 D128 full S4096"
    record.found["cases"][name] = {
        "wgmma": errands.timed(1e-3),
        "mma": {"problem": "no answer"},
        "cudnn": errands.timed(5e-4),
    }
    record.found["cases"]["no longer a case"] = {"wgmma": errands.timed(1.0)}
    path = tmp_path / "results.json"
    path.write_text(json.dumps(asdict(record)))
    command.draw(path)
    shown = capsys.readouterr().out
    assert f"cases: {name}: mma: no answer" in shown and "bars met: 1 of 3; kernels digest" in shown
    speed = CASES[name].amount / 1e-3 / 1e12
    assert f"{speed:.4g} TFLOP/s" in shown and f"{speed / 800:.2f}" in shown
    assert (tmp_path / "results.png").stat().st_size > 1000


@pytest.mark.parametrize("kernel", KERNELS.values(), ids=lambda kernel: kernel.name)
def test_every_kernel_can_be_made(kernel: Kernel) -> None:
    function = kernels.function(kernel, resolve("cuda:sm_90a")[0])
    assert len(function.params) == len(kernel.parameters) and kernel.result in kernel.parameters


# -- what travels ------------------------------------------------------------------------------------------------------


def test_a_bundle_has_all_sources(tmp_path: Path) -> None:
    """Where nothing else of this repository is installed."""
    bundle.copy_sources(tmp_path)
    names = ["lowering.runtime.gpu", "lowering.runtime.library"]
    names += [f"benchmarks.gpu.host.{name}" for name in ("measure", "check", "memory", "matmul", "drawn", "mods")]
    names += ["lowering.serving", "benchmarks.gpu.report"]
    code = f"import sys; sys.path.insert(0, sys.argv[1]); import lowering, {', '.join(names)}; print(lowering.__file__)"
    done = subprocess.run([sys.executable, "-c", code, tmp_path], cwd=tmp_path, capture_output=True, text=True)
    assert done.returncode == 0 and done.stdout.startswith(str(tmp_path)), done.stderr


def test_weights_are_drawn_again(tmp_path: Path) -> None:
    """A decoder's artifact travels without its weights. An artifact that was changed does not load."""
    config = DecoderConfig(1, hidden=128, heads=4, kv_heads=2, head_dim=32, mlp=256, vocabulary=500, positions=64)
    llama.artifact(tmp_path, "cpu", config)
    assert not (tmp_path / WEIGHTS).exists()
    assert drawn.fill(tmp_path)["config"]["mlp"] == 256
    rng = np.random.default_rng(0)
    caches = {f"cache_{kind}.0": rng.standard_normal((1, 2, 16, 32)).astype("float16") for kind in "kv"}
    logits = lowering.load(tmp_path).run({"ids": np.array([[3]]), "write_indices": np.array([0]), **caches})["logits"]
    assert np.isfinite(logits).all() and 0.2 < logits.std() < 5
