"""What is kept of searches: what beats the default for a last time, alone and then in whole runs of the model.

Alone a kernel finds caches as it left them itself, and what it writes stays there for it. So some of what wins alone
loses where it is used, and is not kept.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from pathlib import Path

import tvm

from ..measuring.batch import DEFAULT
from ..measuring.isolated import Failed
from ..measuring.machine import Machine
from ..measuring.trial import CLEAR_WIN, LAST_PAIRS, wins
from ..target import Target
from .database import Database
from .local import Site, Workshop
from .scheduler import Search
from .subject import Subject
from .whole_runs import WholeRuns

_FINALISTS = 3


class FinalComparison:
    """The last step of a session, whose model lies compiled as it was in a folder, and has a folder for itself."""

    def __init__(
        self,
        searches: Sequence[Search],
        subject: Subject,
        model: Path,
        folder: Path,
        workshop: Workshop,
        target: Target,
    ) -> None:
        self.searches, self.subject, self.model, self.folder = searches, subject, model, folder
        self.workshop, self.target = workshop, target
        self.gain: float | None = None
        """How many times faster whole runs became, on geometric average over the sizes; None where none was made."""
        self._count = 0

    def run(self, seconds: float, told: Callable[[Search, str], None]) -> None:
        """Whole runs take about so many seconds for each of the model's sizes. told hears of each search, and what is
        done with it."""
        for search in self.searches:
            told(search, "comparing the best with the defaults")
            self._compare(search)
        for site in dict.fromkeys(search.site for search in self.searches):
            won = [s for s in self.searches if s.site is site and s.has_won]
            if won and site.whole_runs is not None:
                told(won[0], "comparing whole runs")
                self._drop_losers(site, won, seconds)
        for search in self.searches:
            _file(search, search.site.database, self.target.tvm)

    def _compare(self, search: Search) -> None:
        """The fastest candidates with the default, alone."""
        self.workshop.folder = search.folder
        traces = search.site.database.traces(search.module)
        search.won, search.won_seconds = search.space.default, search.reference
        for choice in sorted(search.known, key=search.known.__getitem__)[:_FINALISTS]:
            if choice == search.space.default or search.known[choice] * CLEAR_WIN > search.reference:
                continue
            try:
                library = self.workshop.build_trace(search.module, traces[choice])
                measured = search.site.bench.submit(library, search.folder / DEFAULT, LAST_PAIRS, trial=False).result()
            except Failed as failed:
                search.failed[choice] = search.site.database.fail(search.module, choice, failed)
                continue
            if wins(measured.ratio, measured.spread) and search.reference * measured.ratio < search.won_seconds:
                search.won, search.won_seconds = choice, search.reference * measured.ratio

    def _drop_losers(self, site: Site, won: Sequence[Search], seconds: float) -> None:
        """In whole runs, until nothing loses there any more."""
        fastest = {s.call: s for s in sorted(won, key=lambda s: s.won_seconds, reverse=True)}
        for search in won:
            if search is not fastest[search.call]:  # of tiles and loops of a kernel compile takes one
                search.give_up()
        left = list(fastest.values())
        while left:
            try:
                runs = self._runs(site, left, seconds)
            except Failed as failed:
                for search in left:  # nobody knows whose fault it is
                    where = Failed(failed.cause, f"in whole runs: {failed.text}")
                    search.failed[search.won] = search.site.database.fail(search.module, search.won, where)
                    search.give_up()
                break
            for search in left:
                found = [r.calls[search.call] for r in runs if search.call in r.calls]
                search.in_model = max(found, key=lambda m: m.ratio + m.spread, default=None)
            losers = [s for s in left if s.in_model is None or s.in_model.ratio + s.in_model.spread >= 1]
            if not losers and any(r.runs.ratio - r.runs.spread > 1 for r in runs):
                losers = [max(left, key=lambda s: s.in_model.ratio if s.in_model else 1.0)]
            if not losers:
                self.gain = math.exp(-sum(math.log(r.runs.ratio) for r in runs) / len(runs))
                return
            for search in losers:
                search.give_up()
            left = [search for search in left if search.has_won]
        self.gain = 1.0

    def _runs(self, site: Site, won: Sequence[Search], seconds: float) -> list[WholeRuns]:
        """At each of the sizes, of the model as it was and with what won. Raises Failed."""
        assert site.whole_runs is not None
        place = self.folder / str(self._count)
        self._count += 1
        database = Database(place / "records", self.target, Machine(site.database.architecture.caches))
        for search in won:
            _file(search, database, self.target.tvm)
        self.subject.compile_into(place / "model", place / "records")
        return [site.whole_runs(self.model, place / "model", sizes, seconds) for sizes in self.subject.sizes]


def _file(search: Search, database: Database, target: tvm.target.Target) -> None:
    """Writes down the default, and what won."""
    if database.best_record(search.module) is None:
        database.record_best(search.module, search.space.default_trace(search.module), search.reference, target)
    if search.has_won:
        trace = search.site.database.traces(search.module)[search.won]
        database.record_best(search.module, trace, search.won_seconds, target)
