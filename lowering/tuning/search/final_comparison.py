"""Final comparison of a search: winners must beat the default alone, and then in whole runs of the model.

A kernel that runs alone finds caches as it left them, and its output stays cached for it. So some kernels win alone and
lose in the model, and are not selected.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from pathlib import Path

import tvm

from ...measuring.batch import DEFAULT
from ...measuring.isolated import CandidateFailure
from ...measuring.machine import TuningMachine
from ...measuring.trial import CLEAR_WIN, LAST_PAIRS, is_win
from ...target import Target
from ...tuning_records.database import TuningDatabase
from ..local import LibraryBuilder, MeasurementSite
from .scheduler import TaskSearch
from .subject import TunedModel
from .whole_runs import WholeRunTimes

_FINALISTS = 3


class FinalComparison:
    """The last step of a session. It has the model compiled with defaults in one folder, and a folder for itself."""

    def __init__(
        self,
        searches: Sequence[TaskSearch],
        subject: TunedModel,
        model: Path,
        folder: Path,
        library_builder: LibraryBuilder,
        target: Target,
    ) -> None:
        self.searches, self.subject, self.model, self.folder = searches, subject, model, folder
        self.library_builder, self.target = library_builder, target
        self.gain: float | None = None
        """Speedup of whole runs, as a geometric mean over the sizes; None if none were measured."""
        self._count = 0

    def run(self, seconds: float, report: Callable[[TaskSearch, str], None]) -> None:
        """Compare the winners of all searches with the defaults, and file the results.

        Whole runs take about so many seconds for each of the model's sizes. report is called with each search and the
        current step.
        """
        for search in self.searches:
            report(search, "comparing the best with the defaults")
            self._compare(search)
        for site in dict.fromkeys(search.site for search in self.searches):
            winners = [s for s in self.searches if s.site is site and s.has_won]
            if winners and site.whole_runs is not None:
                report(winners[0], "comparing whole runs")
                self._drop_losers(site, winners, seconds)
        for search in self.searches:
            _file_search(search, search.site.database, self.target.tvm)

    def _compare(self, search: TaskSearch) -> None:
        """Compare the fastest candidates with the default, alone."""
        self.library_builder.folder = search.folder
        traces = search.site.database.traces(search.module)
        search.won, search.won_seconds = search.space.default, search.reference
        for choice in sorted(search.timings, key=search.timings.__getitem__)[:_FINALISTS]:
            if choice == search.space.default or search.timings[choice] * CLEAR_WIN > search.reference:
                continue
            try:
                library = self.library_builder.build_trace(search.module, traces[choice])
                measured = search.site.bench.submit(library, search.folder / DEFAULT, LAST_PAIRS, trial=False).result()
            except CandidateFailure as failed:
                search.failures[choice] = search.site.database.record_failure(search.module, choice, failed)
                continue
            if is_win(measured.ratio, measured.spread) and search.reference * measured.ratio < search.won_seconds:
                search.won, search.won_seconds = choice, search.reference * measured.ratio

    def _drop_losers(self, site: MeasurementSite, winners: Sequence[TaskSearch], seconds: float) -> None:
        """Compare whole runs, and drop losers until all remaining winners win there."""
        fastest = {s.call: s for s in sorted(winners, key=lambda s: s.won_seconds, reverse=True)}
        for search in winners:
            if search is not fastest[search.call]:  # compile selects either the tiles or the loops of a kernel
                search.reject()
        remaining = list(fastest.values())
        while remaining:
            try:
                runs = self._compare_models(site, remaining, seconds)
            except CandidateFailure as failed:
                for search in remaining:  # it is unknown which one failed
                    failure = CandidateFailure(failed.cause, f"in whole runs: {failed.text}")
                    search.failures[search.won] = search.site.database.record_failure(
                        search.module, search.won, failure
                    )
                    search.reject()
                break
            for search in remaining:
                measurements = [r.calls[search.call] for r in runs if search.call in r.calls]
                search.in_model = max(measurements, key=lambda m: m.ratio + m.spread, default=None)
            losers = [s for s in remaining if s.in_model is None or s.in_model.ratio + s.in_model.spread >= 1]
            if not losers and any(r.runs.ratio - r.runs.spread > 1 for r in runs):
                losers = [max(remaining, key=lambda s: s.in_model.ratio if s.in_model else 1.0)]
            if not losers:
                self.gain = math.exp(-sum(math.log(r.runs.ratio) for r in runs) / len(runs))
                return
            for search in losers:
                search.reject()
            remaining = [search for search in remaining if search.has_won]
        self.gain = 1.0

    def _compare_models(
        self, site: MeasurementSite, winners: Sequence[TaskSearch], seconds: float
    ) -> list[WholeRunTimes]:
        """Measure the default model and one with the winners at each of the sizes. Raises Failed."""
        assert site.whole_runs is not None
        run_folder = self.folder / str(self._count)
        self._count += 1
        database = TuningDatabase(run_folder / "records", self.target, TuningMachine(site.database.architecture.caches))
        for search in winners:
            _file_search(search, database, self.target.tvm)
        self.subject.compile_into(run_folder / "model", run_folder / "records")
        return [site.whole_runs(self.model, run_folder / "model", sizes, seconds) for sizes in self.subject.sizes]


def _file_search(search: TaskSearch, database: TuningDatabase, target: tvm.target.Target) -> None:
    """Write the default and the winner to the database."""
    if database.best_record(search.module) is None:
        database.record_best(search.module, search.space.default_trace(search.module), search.reference, target)
    if search.has_won:
        trace = search.site.database.traces(search.module)[search.won]
        database.record_best(search.module, trace, search.won_seconds, target)
