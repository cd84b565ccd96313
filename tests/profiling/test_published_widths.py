"""Models at published widths: what each contender is fed, their tables, what a quick run leaves out."""

from __future__ import annotations

import subprocess
import sys
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import pytest

from benchmarks import peers
from benchmarks.cases import all_cases
from benchmarks.cases.published import GROUP, PublishedCase, quick
from benchmarks.measure import prepare
from benchmarks.records import Outcome, Record, here
from benchmarks.report import rows
from benchmarks.timing import Timing
from benchmarks.widths import tables

ROOT = Path(__file__).parents[2]
SAMPLES = Path(__file__).parents[1] / "exports" / "samples"
PUBLISHED = [case for case in all_cases().values() if isinstance(case, PublishedCase)]


@dataclass(frozen=True, kw_only=True)
class Small(PublishedCase):
    """A sample at its second sizes: one token after four."""

    @property
    def setting(self) -> int:
        return 1


@pytest.mark.parametrize("form", ["batch1", "fixed"])
def test_decoding_into_slots_is_right_compared_with_peers_whose_past_grows(form: str) -> None:
    case = all_cases()[f"published-llama-past-dynamo23-{form}, slots"]
    assert isinstance(case, PublishedCase) and case.export == "published-llama-past-dynamo23-batch1"
    fields = {name: getattr(case, name) for name in case.__dataclass_fields__}
    small = Small(**fields | {"export": "llama-past-dynamo23-batch1", "folder": SAMPLES, "slots": 8})
    assert small.feeds()["past_0"].shape[2] == 4 and small.own_feeds()["past_0"].shape[2] == 8
    sizes = {d.dim_param or d.dim_value for d in small.model().graph.input[0].type.tensor_type.shape.dim}
    assert sizes == ({1} if form == "fixed" else {1, "tokens"})
    openers = {name: partial(peers.load, name, 1) for name in (peers.OURS, "onnxruntime")}
    record = prepare(small, {name: opener() for name, opener in openers.items()}, openers, 1).measure(1, 1e-4)
    assert [(o.contender, o.form) for o in record.outcomes] == [(peers.OURS, "bound"), ("onnxruntime", "bound")]
    for outcome in record.outcomes:
        assert outcome.timing is not None and outcome.error is not None and outcome.error < 1e-5, outcome


def test_every_architecture_of_the_page_in_every_form() -> None:
    page = (ROOT / "docs" / "models.md").read_text().splitlines()
    models = {line.split("|")[1].strip() for line in page if "| dynamo |" in line}
    for model in models:
        cases = [case for case in PUBLISHED if case.model_name == model]
        tasks = {case.task for case in cases}
        assert {(c.form, c.opset, c.task) for c in cases} == {
            (form, opset, task) for form in ("symbolic", "batch1", "fixed") for opset in (18, 23) for task in tasks
        }
        assert len(tasks) in (1, 3)
    assert {case.checkpoint for case in PUBLISHED} >= {"TinyLlama-1.1B", "bert-base-uncased"}


def test_a_quick_run_has_one_opset_of_each_model() -> None:
    cases = quick([*PUBLISHED, all_cases()["P1 full"]])
    assert cases[-1].name == "P1 full"
    opsets: dict[str, set[int]] = {}
    for case in cases[:-1]:
        opsets.setdefault(case.model_name, set()).add(case.opset)
    assert {len(numbers) for numbers in opsets.values()} == {1}
    assert set().union(*opsets.values()) == {18, 23}
    assert 2 * (len(cases) - 1) == len(PUBLISHED)


def test_exports_that_are_missing_and_time_that_is_over(tmp_path: Path) -> None:
    (tmp_path / "published-bert-dynamo18-fixed").mkdir()
    line = ["cpu", "published-bert-*", "--exports", tmp_path, "--peers", "", "--minutes", "0"]
    done = subprocess.run(
        [sys.executable, "-m", "benchmarks", *map(str, line)], cwd=ROOT, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    assert "6 exports that --exports lacks, 'published-bert-dynamo18-batch1' among them" in done.stderr
    assert "0 minutes are over: 1 of 1 cases were not begun" in done.stderr


def record_of(case: PublishedCase, own: float | None, onnxruntime: float, openvino: float) -> Record:
    times = {peers.OURS: own, "onnxruntime": onnxruntime, "openvino": openvino}
    outcomes = [
        Outcome(name, "bound", 1, None if time is None else Timing(time, time, time, time), 0.0 if time else 1.0)
        for name, time in times.items()
    ]
    return Record(case.name, GROUP, "2000-01-01", 1, 0.0, "FLOP", outcomes, [], 0.0)


def test_a_cell_has_the_opset_that_does_worse() -> None:
    results = here(1)
    times_by_case = {
        "bert-dynamo18-symbolic": (0.010, 0.012, 0.013),
        "bert-dynamo23-symbolic": (0.010, 0.011, 0.020),
        "bert-dynamo18-fixed": (0.012, 0.012, 0.013),
        "bert-dynamo23-fixed": (None, 0.012, 0.013),
        "llama-dynamo18-batch1": (0.100, 0.020, 0.011),
        "llama-past-dynamo18-batch1, slots": (0.004, 0.02, 0.008),
    }
    for name, times in times_by_case.items():
        case = all_cases()[f"published-{name}"]
        assert isinstance(case, PublishedCase)
        results.records[case.name] = record_of(case, *times)
    text = tables(rows(results))
    lines = {line.split(" | ")[0].strip("| "): line for line in text.splitlines() if line.startswith("|")}
    assert lines["bert (bert-base-uncased)"].endswith("| **wrong (1e+00)** 12 - |  | **10** 11 1.10 | 1.20 |")
    assert "| **4** 8 2.00 |" in lines["llama (TinyLlama-1.1B)"]
    assert "| prefill | every size fixed | batch 1 | symbolic | fixed / symbolic |" in text
    assert "| decode, slots |" in text and "| decode, growing |" not in text
    assert "| geometric mean | 1.00, worst 1.00 | 0.11, worst 0.11 | 1.15, worst 1.10 |  |" in text
    assert tables([]) == ""
