"""Records of the package: for machines like those that were tuned, and with less priority than the user's own."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tvm.s_tir import meta_schedule as ms

import lowering
from lowering.tuning import upkeep
from lowering.tuning.search.tile_space import TileSpace
from lowering.tuning_records import lookup
from lowering.tuning_records.candidate_choices import read_trace_choice
from lowering.tuning_records.database import ARCHITECTURE, BEST, TRIALS, open_writable, read_best_records
from lowering.tuning_records.task import has_kernel, is_current
from tests.tuning.models import K, expected, matmul


@pytest.fixture(scope="module")
def tuned(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("tuned")
    lowering.tune(matmul(rows=8), folder, budget=300, trials=8)
    return folder


@pytest.fixture
def presets(tuned: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    upkeep.export_best_records(tuned, tmp_path / "presets")
    monkeypatch.setattr(lookup, "PRESETS", tmp_path / "presets")
    return tmp_path / "presets"


def test_those_of_the_package_fit_its_kernels() -> None:
    """Records of other kernel versions are dead weight: tune again, or remove them."""
    folders = sorted(lookup.PRESETS.iterdir())
    assert {folder.name.split("-")[1] for folder in folders} == {"avx512f", "avx2"}
    for record in (record for folder in folders for record in read_best_records(folder)):
        assert is_current(record.workload.mod, record.target)
        if has_kernel(record.workload.mod):
            TileSpace(record.workload.mod, record.target).read(read_trace_choice(record.trace) or "")


def win(folder: Path) -> None:
    """Make other tiles than the defaults win."""
    (architecture,) = upkeep.list_architecture_folders(folder)
    trials, best = open_writable(architecture / TRIALS), open_writable(architecture / BEST)
    for record in trials.get_all_tuning_records():
        task = record.workload.mod
        if has_kernel(task) and read_trace_choice(record.trace) != TileSpace(task, record.target).default:
            workload = best.commit_workload(task)
            won = ms.database.TuningRecord(record.trace, workload, [1e-9], record.target, record.args_info)
            best.commit_tuning_record(won)


def sources(rows: int | str = 8, **options: Any) -> set[str]:
    """Return where the tiles of the kernels are from, without their gains."""
    kernels = lowering.compile(matmul(rows=rows), **options).manifest.kernels
    return {kernel.source.partition(" ")[0] for kernel in kernels}


def test_a_preset_is_used_where_nothing_was_tuned(presets: Path, tuned: Path) -> None:
    assert sources() == {"preset"}
    assert sources(database=tuned) == {"tuned"}
    assert sources(rows="n") == {""}  # one size says nothing of all others
    assert sources(rows=30) == {""}  # other functions
    assert sources(target="cpu:x86-64-v3") == {""}  # whose machine is unknown


def test_what_nobody_tuned_takes_the_tiles_of_the_nearest_sizes(tuned: Path, tmp_path: Path) -> None:
    """If those are better than the defaults, and at most a factor of two away."""
    shutil.copytree(tuned, tmp_path / "database")
    win(tmp_path / "database")
    x = np.random.default_rng(0).standard_normal((12, K)).astype(np.float32)
    module = lowering.compile(matmul(rows=12), database=tmp_path / "database")
    assert "tuned of nearby sizes" in {kernel.source for kernel in module.manifest.kernels}
    np.testing.assert_allclose(module.run({"x": x})["y"], expected(matmul(), x), rtol=1e-4, atol=1e-6)
    assert sources(rows=8, database=tmp_path / "database") == {"tuned"}
    assert sources(rows=30, database=tmp_path / "database") == {""}
    assert sources(rows="n", database=tmp_path / "database") == {"tuned"}  # those that were tuned


@pytest.mark.parametrize(
    "change, used",
    [
        (lambda a: a | {"caches": [*a["caches"][:2], 12345]}, True),  # shared by cores, of the whole package
        (lambda a: a | {"features": [f for f in a["features"] if "bf16" not in f and "vnni" not in f]}, True),
        (lambda a: a | {"caches": [a["caches"][0], 12345, *a["caches"][2:]]}, False),
        (lambda a: a | {"caches": []}, False),
        (lambda a: a | {"features": ["+neon"]}, False),
        (lambda a: a | {"kind": "riscv64"}, False),
    ],
    ids=["third cache", "features", "second cache", "no caches", "vectors", "kind"],
)
def test_a_preset_is_for_machines_like_its_own(
    presets: Path, change: Callable[[dict[str, Any]], dict[str, Any]], used: bool
) -> None:
    (architecture,) = presets.iterdir()
    path = architecture / ARCHITECTURE
    path.write_text(json.dumps(change(json.loads(path.read_text()))))
    assert sources() == ({"preset"} if used else {""})
