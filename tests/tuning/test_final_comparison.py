"""A winner by itself must win in whole runs of the model, or it is dropped; presets are candidates, too."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

import lowering
from lowering.measuring.isolated import CandidateFailure
from lowering.measuring.measure import Measurement
from lowering.tuning import upkeep
from lowering.tuning.local import LocalBench
from lowering.tuning.search.final_comparison import FinalComparison
from lowering.tuning.search.scheduler import TaskSearch
from lowering.tuning.search.whole_runs import WholeRunTimes, compare_whole_runs
from lowering.tuning_records import lookup
from lowering.tuning_records.database import read_best_records, read_journal
from tests.tuning.models import matmul

SIZES = {"n": 64}


@pytest.fixture
def easy(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let the fastest candidate win by itself, whether or not it is faster than the default."""

    def compare(self: FinalComparison, search: TaskSearch) -> None:
        search.won, search.won_seconds = search.space.default, search.reference
        faster = [choice for choice in search.timings if choice != search.space.default]
        if faster:
            search.won, search.won_seconds = min(faster, key=search.timings.__getitem__), search.reference / 1.5

    monkeypatch.setattr(FinalComparison, "_compare", compare)


def tune(folder: Path, **options: Any) -> lowering.Tuning:
    return lowering.tune(matmul(), folder, trials=4, sizes=[SIZES], effort="quick", **options)


def defaults_alone(folder: Path) -> bool:
    (architecture,) = upkeep.list_architecture_folders(folder)
    records = read_best_records(architecture)
    return len(records) == len({str(record.workload.mod) for record in records})


def answer(ratio: float, run: float = 0.9) -> Any:
    """Fake whole runs: every kernel takes such a share of its time, and the run such a share of its own."""

    def runs(self: LocalBench, was: Path, became: Path, sizes: Any, seconds: float) -> WholeRunTimes:
        true = compare_whole_runs(str(was), str(became), sizes, 1, 0.0)
        assert all(len(m.ratios) == len(true.runs.ratios) >= 7 for m in true.calls.values())
        return WholeRunTimes(
            Measurement(1e-3, (run,), 0.0), {call: Measurement(1e-4, (ratio,), 0.0) for call in true.calls}
        )

    return runs


@pytest.mark.usefixtures("easy")
def test_a_winner_in_the_model_is_recorded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(LocalBench, "whole_runs", answer(0.8))
    tuning = tune(tmp_path)
    won = [o for o in tuning.outcomes if o.gain > 1]
    assert won and all(o.gain == pytest.approx(1.5) and o.in_model == 0.8 for o in won)
    assert tuning.whole_gain == pytest.approx(1 / 0.9) and not defaults_alone(tmp_path)


@pytest.mark.usefixtures("easy")
@pytest.mark.parametrize("kernels, run", [(1.02, 0.9), (0.8, 1.1)], ids=["kernels", "runs"])
def test_what_loses_there_is_not(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kernels: float, run: float) -> None:
    monkeypatch.setattr(LocalBench, "whole_runs", answer(kernels, run))
    tuning = tune(tmp_path)
    assert {o.in_model for o in tuning.outcomes if o.trials} == {kernels}
    assert all(o.gain == 1 for o in tuning.outcomes) and tuning.whole_gain == 1 and defaults_alone(tmp_path)


@pytest.mark.usefixtures("easy")
def test_what_crashes_there_is_filed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def crash(*_: Any) -> WholeRunTimes:
        raise CandidateFailure("crash", "signal 11")

    monkeypatch.setattr(LocalBench, "whole_runs", crash)
    tuning = tune(tmp_path)
    assert defaults_alone(tmp_path) and {cause for o in tuning.outcomes for cause in o.failures} == {"crash"}
    (architecture,) = upkeep.list_architecture_folders(tmp_path)
    assert {t.text for t in read_journal(architecture) if t.cause} == {"in whole runs: signal 11"}


@pytest.mark.usefixtures("easy")
def test_presets_are_candidates(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Next to presets, a database that knows only the default would be worse than none."""
    monkeypatch.setattr(LocalBench, "whole_runs", answer(0.8))
    choices = {(o.name, o.searched): o.choice for o in tune(tmp_path / "presets").outcomes if o.gain > 1}
    monkeypatch.setattr(lookup, "PRESETS", tmp_path / "presets")
    tuning = lowering.tune(matmul(), tmp_path / "database", trials=0, sizes=[SIZES])
    chosen = {(o.name, o.searched): o.choice for o in tuning.outcomes if o.gain > 1}
    assert choices and chosen == choices
