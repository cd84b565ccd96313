"""Tuning for GPUs: candidates of tiles and of loops, from the search to records that compile uses.

The GPU is emulated, which tells right answers from wrong ones and nothing about time.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import onnx
import pytest
from onnx import TensorProto, helper

import lowering
from lowering.measuring.batch import read_batch, read_results
from lowering.tuning_records.candidate_choices import DEFAULT
from lowering.tuning_records.database import read_journal
from tests.cuda_emulation.processes import environment
from tests.support.error_codes import raises
from tests.tuning.models import matmul

ROOT = Path(__file__).parents[2]

# The program next to the GPU.
MEASURE = """
import sys
for name in ("tvm", "onnx", "onnx_ir", "schedules", "xgboost"):
    sys.modules[name] = None
from lowering.commands.cli import main
sys.exit(main(["measure", sys.argv[1]]))
"""


def attention(rows: int | str = 70) -> onnx.ModelProto:
    """Return attention for tensor cores: half precision, 64 elements."""
    ports = [helper.make_tensor_value_info(n, TensorProto.FLOAT16, [1, 2, rows, 64]) for n in "qkvy"]
    node = helper.make_node("Attention", ["q", "k", "v"], ["y"], name="attention", is_causal=1)
    graph = helper.make_graph([node], "attention", ports[:3], ports[3:])
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 23)])


def measured(batch: Path, arch: str) -> subprocess.CompletedProcess[str]:
    command, here = [sys.executable, "-c", MEASURE, str(batch)], {**os.environ, **environment(arch)}
    return subprocess.run(command, capture_output=True, text=True, timeout=600, cwd=ROOT, env=here)


@pytest.mark.slow
@pytest.mark.parametrize("arch", ("sm_90a", "sm_80"))
def test_round_trip_of_tiles(arch: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """All tiles give the right answer there; the best ones become the card's records, and compile takes them."""
    monkeypatch.setenv("PATH", environment(arch)["PATH"])
    batch, database, target = tmp_path / "batch", tmp_path / "database", f"cuda:{arch}"
    tuning = lowering.tune(attention(), database, target, trials=4, export=batch)
    assert [o.trials for o in tuning.outcomes] == [4]
    done = measured(batch, arch)
    assert done.returncode == 0 and " 0 of candidates that failed" in done.stdout, done.stdout + done.stderr
    filed = lowering.file_results(batch, database, target)
    assert (filed.tasks, filed.trials) == (1, 4)
    (architecture,) = (p for p in database.iterdir() if read_journal(p))
    assert architecture.name.startswith(f"{arch}-CPU_emulation_of_{arch.rstrip('a')}")
    module = lowering.compile(attention(), target, database=database)
    assert module.manifest.kernels[0].source.startswith("tuned")
    # The last results decide which candidates come next.
    lowering.tune(attention(), database, target, trials=2, export=tmp_path / "next")
    before = {trial.candidate for trial in read_journal(architecture)}
    choices = next((tmp_path / "next").glob("*/choices.jsonl")).read_text().splitlines()
    assert len(before) == 5 and len(choices) == 2 and not before & set(choices)


@pytest.mark.slow
def test_loops_on_the_gpu_that_is_here(tmp_path: Path) -> None:
    """Tuning on the GPU itself: MetaSchedule's rules for GPUs schedule the other functions."""
    command = [sys.executable, "-m", "lowering", "tune", str(tmp_path / "model.onnx"), "--target", "cuda:sm_80"]
    onnx.save(matmul(rows=8), tmp_path / "model.onnx")
    here = {**os.environ, **environment("sm_80")}
    options = ["--database", str(tmp_path / "database"), "--trials", "4", "--effort", "quick"]
    done = subprocess.run([*command, *options], capture_output=True, text=True, timeout=600, cwd=ROOT, env=here)
    assert done.returncode == 0, done.stderr
    (architecture,) = (tmp_path / "database").iterdir()
    trials = read_journal(architecture)
    assert len(trials) >= 6 and all(trial.seconds for trial in trials)  # with two defaults
    assert sum(trial.candidate == DEFAULT for trial in trials) == 2
    module = lowering.compile(matmul(rows=8), "cuda:sm_80", database=tmp_path / "database")
    assert {kernel.source.partition(" ")[0] for kernel in module.manifest.kernels} <= {"tuned", ""}


def test_refusals(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with raises("tune.target_unavailable"):
        lowering.tune(attention(), tmp_path, "cuda:sm_80")
    with raises("tune.several_targets"):
        lowering.tune(attention(), tmp_path, "cuda:sm_80,sm_90a")
    monkeypatch.setenv("PATH", environment("sm_80")["PATH"])
    batch = tmp_path / "batch"
    lowering.tune(attention(), tmp_path / "database", "cuda:sm_80", trials=1, export=batch)
    done = measured(batch, "sm_90a")
    assert done.returncode != 0 and "of architecture sm_80, but the GPU here is sm_90" in done.stderr
    assert read_results(batch) is None
    wrong = read_batch(batch).tasks[0]
    shutil.copy(batch / wrong.name / "default.so", batch / wrong.name / "0.so")
    (batch / wrong.name / "expected.bin").write_bytes(b"\x3c" * (batch / wrong.name / "expected.bin").stat().st_size)
    assert measured(batch, "sm_80").returncode == 0
    results = read_results(batch)
    assert results is not None and [r.cause for r in results[1]] == ["wrong"]
