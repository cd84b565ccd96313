"""The benchmarks measure, check before they time, and pages quote what they found."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import lowering
from benchmarks import appends, limits, page_reads, peers, stores, thread_shares
from benchmarks.cases import all_cases, chosen
from benchmarks.cases.attention import AttentionCase
from benchmarks.cases.case import Case
from benchmarks.measure import prepare
from benchmarks.records import Outcome, Record, Results, here, read
from benchmarks.report import peer_cell, rows
from benchmarks.timing import Timing
from lowering.attention.record.cache_layout import CacheLayout, KvQuantization, Pages
from lowering.demo.decoder import DecoderConfig
from tests.support.error_codes import raises

PACKED = replace(stores.problem(2, CacheLayout()), row_axes="te")
ROOT = Path(__file__).parents[2]

TINY = AttentionCase(name="P1 full", group="attention", S=3, T=5, D=8)


def command(*arguments: object) -> subprocess.CompletedProcess[str]:
    line = [sys.executable, "-m", "benchmarks", *map(str, arguments)]
    return subprocess.run(line, cwd=ROOT, capture_output=True, text=True)


def test_one_case_from_end_to_end(tmp_path: Path) -> None:
    out = tmp_path / "results.json"
    line = ["cpu", "S 3", "--peers", "onnxruntime", "--turns", 2, "--seconds", 0.001, "--out", out]
    done = command(*line)
    assert done.returncode == 0, done.stderr
    assert "S 3" in done.stdout and "geometric mean" in done.stdout
    record = read(out).records["S 3"]
    assert record.amount == 4 * 8 * 3 * 3 * 64
    for contender in ("onnx-lowering", "onnxruntime"):
        best = record.best(contender)
        assert best is not None and best.timing is not None and best.error is not None
        assert 0 < best.timing.low <= best.timing.median <= best.timing.high and best.error < 1e-5
    assert record.limit() is not None
    written = out.read_text()
    assert command(*line, "--resume").returncode == 0
    assert json.loads(out.read_text())["records"] == json.loads(written)["records"]


@pytest.mark.slow
def test_a_database_is_compared_with_the_default(tmp_path: Path) -> None:
    lowering.tune(all_cases()["S 3"].model(), tmp_path / "tuned", trials=2, sizes=[{"B": 1, "S": 3, "T": 3}])
    line = ["cpu", "S 3", "--peers", "", "--tuned", tmp_path / "tuned", "--turns", 2, "--seconds", 0.001]
    done = command(*line, "--out", tmp_path / "results.json")
    assert done.returncode == 0, done.stderr
    assert "tuned: 1 cases" in done.stdout
    best = read(tmp_path / "results.json").records["S 3"].best(peers.TUNED)
    assert best is not None and best.error is not None and best.error < 1e-5


class Fake:
    """A peer whose answer is off by `off` of its range, or that refuses."""

    def __init__(self, off: float | None) -> None:
        self.off = off

    def forms(self, case: Any) -> dict[str, peers.Form]:
        def make() -> peers.Contender:
            if self.off is None:
                raise RuntimeError("no such operator\nand more")
            answer = case.expected()["Y"] + self.off * np.ptp(case.expected()["Y"])
            return peers.Contender(lambda: answer, lambda result: {"Y": result})

        return {"model": peers.Form(make, 1)}


def test_only_what_is_right_is_timed() -> None:
    fakes = {"torch": Fake(1e-3), "onnxruntime": Fake(None), "openvino": Fake(1e-7)}
    record = prepare(TINY, fakes, {name: partial(Fake, peer.off) for name, peer in fakes.items()}, threads=1).measure(
        turns=2, seconds=1e-4
    )
    wrong, refused, right = record.outcomes
    assert wrong.timing is None and wrong.error == pytest.approx(1e-3, rel=1e-3)
    assert refused.timing is None and refused.refused == "RuntimeError: no such operator"
    assert right.timing is not None
    cells = [peer_cell(record, name) for name in fakes]
    assert cells[0] == "wrong (1e-03)" and cells[1] == "-" and cells[2].endswith("us")
    results = here(1)
    results.records[record.case] = record
    (row,) = rows(results)
    assert row.best is right and row.seconds is None and not any(met for _, met in row.bars)


def measured_by_us(case: Case) -> Record:
    opener = partial(peers.load, peers.OURS, 1)
    return prepare(case, {peers.OURS: opener()}, {peers.OURS: opener}, 1).measure(turns=1, seconds=1e-4)


@pytest.mark.parametrize("name", ["mask [H1T]", "decode B8 ragged", "window 256, S 4096"])
def test_expected_answers_are_those_of_the_compiled_model(name: str) -> None:
    case = all_cases()[name]
    assert isinstance(case, AttentionCase)
    small = replace(case, B=2, Hq=4, Hkv=2, S=min(case.S, 9), T=9, D=8, window=case.window and 3)
    record = measured_by_us(small)
    assert record.own_timing() is not None, record.outcomes


def test_two_threads_are_compared_with_one() -> None:
    def outcome(contender: str, form: str, threads: int, seconds: float) -> Outcome:
        return Outcome(contender, form, threads, Timing(seconds, seconds, seconds, seconds), 0.0)

    outcomes = [outcome(peers.OURS, "bound", 2, 4.0), outcome(peers.OURS, "bound, one thread", 1, 8.0)]
    limits = [outcome("limit", "a", 2, 2.0), outcome("limit", "a, one thread", 1, 3.0), outcome("limit", "b", 2, 1.0)]
    record = Record("P1 full", "attention", "2000-01-01", 2, 6e9, "FLOP", outcomes, limits, 3e9)
    (row,) = rows(Results("here", 2, {}, {record.case: record}))
    assert (row.seconds, row.rate, row.share, row.scaling) == (4.0, 1.5, 0.5, 2.0)
    assert record.limit_scaling() == 1.5  # of "a", the one that ran on both
    assert row.bars == [("1.85x one thread", True)]


def test_cases_are_picked_by_name_group_and_pattern() -> None:
    assert [case.name for case in chosen(["P2 full", "decode B8*"])][:2] == ["P2 full", "decode B8 kv 1024"]
    assert {case.group for case in chosen(["masks"])} == {"masks"}
    with pytest.raises(ValueError, match="no case or group matches 'nothing'"):
        chosen(["nothing"])


def test_every_model_of_the_page_is_a_case() -> None:
    names = {case.name for case in all_cases().values() if case.group == "models"}
    assert {"bert-dynamo18", "t5-past-dynamo23-f16", "llama-past-traced17"} <= names
    assert f"Measured: {len(names)} of" in (ROOT / "docs" / "models.md").read_text()
    with pytest.raises(ValueError, match="need --exports"):
        chosen(["bert-dynamo18"])


def test_no_ratio_to_peers_that_compute_something_else() -> None:
    """With weights in fewer bits than theirs; what they were told by was once on the front page."""
    for page in ("README.md", "docs/results.md"):
        lines = [line for line in (ROOT / page).read_text().splitlines() if line.startswith("|")]
        quantized = [line for line in lines if re.search("(int4|int8|f16) weights|in [48] bits", line)]
        assert quantized or page == "README.md"
        assert all(line.rstrip(" |").endswith(" -") for line in quantized), quantized


def test_pages_quote_the_results() -> None:
    done = command("pages", "--check")
    assert done.returncode == 0, done.stderr


def test_stores_are_compared(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    few = {"one by one": (stores.Call(PACKED, (3,), (9,)),) * 2, "packed": (stores.Call(PACKED, (3, 1), (9, 40)),)}
    kinds = [CacheLayout("phtd", Pages(16)), CacheLayout(quantization=KvQuantization("int8", 8))]
    contenders = {f"{layout}": (stores.Call(stores.problem(2, layout), (1,), (33,)),) for layout in kinds}
    comparisons = [stores.Comparison("rows", few, {}), stores.Comparison("stores", contenders, {})]
    monkeypatch.setattr(stores, "comparisons", lambda: comparisons)
    stores.run(threads=1, turns=1, seconds=0.001)
    assert "packed" in capsys.readouterr().out
    monkeypatch.setattr(stores, "TOLERANCE", -1.0)
    with raises("run.result_mismatch"):
        stores.run(threads=1, turns=1, seconds=0.001)


def test_reads_of_pages_are_timed(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(page_reads, "TOTAL", 1 << 20)
    monkeypatch.setattr(page_reads, "BLOCKS", {"all": 1 << 20, "rows": 512})
    page_reads.run(threads=1, turns=1, seconds=0.001)
    assert "rows" in capsys.readouterr().out
    memory = np.zeros(9 * 512, np.uint8)
    start = -memory.ctypes.data % limits.VECTOR
    blocks = memory[start : start + 8 * 512].view(np.float32).reshape(8, 128)
    blocks[:] = np.arange(8)[:, None]
    order = np.array([5, 2], np.uint64)
    totals = limits.library().read_blocks(blocks.ctypes.data, order.ctypes.data, 2, 8)
    assert totals == 8 * (5 + 2), "a lane of the eight vectors of two blocks"


def test_appends_are_timed(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(appends, "BATCHES", (3,))
    appends.run(threads=1, turns=1, seconds=0.001)
    shown = capsys.readouterr().out
    assert all(layout.split()[0] in shown for layout in ("NumPy's", *appends.STORES))
    call, moved = appends._append(appends._record(appends.STORES["float32 in pages"]), 3)
    assert moved == 2 * 3 * 2 * appends.HEADS * appends.DIM * 4
    call()


@pytest.mark.parametrize(("rows", "past", "splits"), ((1, 200, 1), (1, 2047, 8), (96, 1024, 0)))
def test_the_work_of_a_decoder_is_divided_among_threads(rows: int, past: int, splits: int) -> None:
    """At most 2 % of a step and of a prompt are serial, and eight threads have equal shares.

    A step's attention splits a cache by the lengths that a call is given: 256 keys each, for 8 heads.
    """
    config = DecoderConfig(1, 1024, 16, 8, 64, 2048, 2048)
    shares = {share.name: share for share in thread_shares.compute_shares(rows, past, config)}
    assert thread_shares.compute_serial_share(list(shares.values())) < 0.02
    assert thread_shares.compute_speedup(list(shares.values()), 8) > 7
    assert not splits or shares["attention"].tasks == 8 * splits
