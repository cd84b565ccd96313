"""The quality of a search without hints: compared with a sweep of the tiles."""

from __future__ import annotations

import dataclasses
import time
from pathlib import Path

import pytest

from benchmarks.cases import all_cases
from benchmarks.tune import sizes
from lowering.compiling.options import CompileOptions
from lowering.measuring.batch import DEFAULT
from lowering.measuring.trial import LAST_PAIRS
from lowering.target import resolve
from lowering.tuning.local import LibraryBuilder, LocalBench, MeasurementSite
from lowering.tuning.search.session import TuningSession
from lowering.tuning.search.subject import TunedModel
from lowering.tuning.search.tile_space import TileSpace
from lowering.tuning_records.database import TuningDatabase
from schedules.variant import Choice

KERNEL, SECONDS = "prefill", 300


def sweep(space: TileSpace) -> list[Choice]:
    """Return all blocks of rows and keys with the other default tiles, and each value of those with its blocks."""
    (variant,) = space.variants
    usual = variant.tiles[KERNEL]
    values = {field: v for kernel, field, v in space.list_fields(variant.name) if kernel == KERNEL}
    changes = [{"q": q, "kv": kv} for q in values["q"] for kv in values["kv"]]
    changes += [{field: v} for field, options in values.items() if field not in ("q", "kv") for v in options]
    tiles = {dataclasses.replace(usual, **change) for change in changes}
    legal = sorted((t for t in tiles if t.is_legal(variant.problem, variant.machine)), key=str)
    return [Choice(variant.name, {**variant.tiles, KERNEL: t}) for t in legal]


@pytest.mark.slow
@pytest.mark.timeout(3600)
def test_random_tiles_become_as_good_as_a_sweep(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Tune P1 in full, without the estimate, where the default is not a candidate.

    The best of five minutes is at least 0.97 as fast as the best of the sweep, side by side."""
    monkeypatch.setattr(TileSpace, "estimate", lambda self, choice: 0.0)
    (target,) = resolve("cpu")
    bench, workshop = LocalBench(1, gpu=False), LibraryBuilder("cpu", None, 0, 1)
    (tmp_path / "tasks").mkdir()
    database = TuningDatabase(tmp_path / "database", target)
    try:
        case = all_cases()["P1 full"]
        model = case.model()
        subject = TunedModel(model, [sizes(model, case.own_feeds())], CompileOptions(threads=1))
        session = TuningSession(
            tmp_path / "tasks", subject, [MeasurementSite(bench, database)], target, workshop, "full", seed=0
        )
        session.extract(tmp_path / "model")
        session.search(time.monotonic() + SECONDS, None, lambda state: None)
        (search,) = session.searches
        space = search.space
        assert isinstance(space, TileSpace)
        random = {text: s for text, s in search.timings.items() if text != space.default}
        traces = {choice.to_json(): space.trace(search.module, choice) for choice in sweep(space)}
        workshop.folder = search.folder
        seconds = {}
        for text, trace in traces.items():
            library = workshop.build_trace(search.module, trace)
            seconds[text] = bench.submit(library, search.folder / DEFAULT, 12, trial=True).result().ratio
        fastest, best = min(random, key=random.__getitem__), min(seconds, key=seconds.__getitem__)
        tuned = workshop.build_trace(search.module, database.traces(search.module)[fastest])
        swept = workshop.build_trace(search.module, traces[best])
        ratio = bench.submit(tuned, swept, LAST_PAIRS, trial=False).result().ratio
        print(f"{len(random)} random tiles, {len(seconds)} swept; of the sweep's best {1 / ratio:.3f}")
        print(f"found {fastest}\nswept {best}, {1 / seconds[best]:.3f} of the default")
        assert ratio <= 1 / 0.97
    finally:
        bench.close()
        workshop.close()
