"""What people see of `tune`: a table that lives while it works, and one of what came out."""

from __future__ import annotations

import sys
import time
from collections.abc import Mapping
from types import TracebackType
from typing import TYPE_CHECKING

from rich.console import Console
from rich.live import Live
from rich.table import Table

from .. import notebook, units
from .session import Outcome, State
from .tune import Tuning

if TYPE_CHECKING:
    from typing import Self  # of Python 3.11

_PAUSE = 10.0  # seconds between lines where there is no terminal


class Watch:
    """Shows each state that `tune` reports: a table on a terminal, now and then a line elsewhere."""

    def __init__(self) -> None:
        self._console = Console(stderr=True)
        self._live = Live(console=self._console, auto_refresh=False, transient=True)
        self._spoke = -_PAUSE

    def __enter__(self) -> Self:
        if self._console.is_terminal:
            self._live.start()
        return self

    def __exit__(self, kind: type | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self._live.stop()

    def __call__(self, state: State) -> None:
        if self._console.is_terminal:
            self._live.update(_states(state), refresh=True)
            return
        if time.monotonic() - self._spoke >= _PAUSE and state.at_work is not None:
            self._spoke = time.monotonic()
            trials = sum(search.trials for search in state.searches)
            print(f"{_clock(state.left)} left, {trials} trials: {state.at_work.name}", file=sys.stderr, flush=True)


def _states(state: State) -> Table:
    table = Table(title=f"{state.step}, {_clock(state.left)} left", title_justify="left")
    table.add_column("kernel")
    table.add_column("searched")
    for name in ("trials", "default", "best", "gain"):
        table.add_column(name, justify="right")
    table.add_column("failed")
    for search in state.searches:
        table.add_row(
            search.name,
            search.space.kind,
            str(search.trials),
            units.time(search.reference),
            units.time(search.best),
            f"{search.gain:.2f}x",
            causes(search.causes()),
            style="bold" if search is state.at_work else None,
        )
    return table


def show(tuning: Tuning) -> None:
    """Prints what came out."""
    table = Table()
    for name in _WORDS:
        table.add_column(name, overflow="fold")
    for name in _NUMBERS:
        table.add_column(name, justify="right")
    table.add_column("failed")
    for outcome in (o for o in tuning.outcomes if not o.why):
        table.add_row(*_cells(outcome))
    Console(width=None if sys.stdout.isatty() else 200).print(table)
    for line in (*_left_out(tuning), summary(tuning), f"records: {tuning.database}"):
        print(line)


def summary(tuning: Tuning) -> str:
    """One line about the whole."""
    whole = tuning.whole_gain
    kept = sum(o.gain > 1 for o in tuning.outcomes)
    ended = "interrupted after" if tuning.interrupted else "took"
    return (
        f"{ended} {_clock(tuning.seconds)}; {kept} of {len(tuning.outcomes)} kernels got faster, "
        f"a run {tuning.gain:.2f}x by their shares" + ("" if whole is None else f", measured {whole:.2f}x")
    )


def html(tuning: Tuning) -> str:
    """For notebooks."""
    lines = [summary(tuning), f"records: {tuning.database}", *_left_out(tuning)]
    rows = [_cells(outcome) for outcome in tuning.outcomes if not outcome.why]
    return notebook.table("\n".join(lines), (*_WORDS, *_NUMBERS, "failed"), rows)


_WORDS = ("kernel", "nodes", "searched")
_NUMBERS = ("share", "trials", "default", "tuned", "gain", "in the model")


def _left_out(tuning: Tuning) -> list[str]:
    return [f"not tuned: {o.name} ({', '.join(o.nodes)}): {o.why}" for o in tuning.outcomes if o.why]


def _cells(outcome: Outcome) -> tuple[str, ...]:
    return (
        outcome.name,
        ", ".join(outcome.nodes),
        outcome.searched,
        f"{outcome.share:.1%}",
        str(outcome.trials),
        units.time(outcome.default),
        units.time(outcome.seconds),
        f"{outcome.gain:.2f}x",
        "" if outcome.in_model is None else f"{1 / outcome.in_model:.2f}x",
        causes(outcome.failures),
    )


def causes(counts: Mapping[str, int]) -> str:
    """How many candidates failed, by why."""
    return ", ".join(f"{count} {cause}" for cause, count in counts.items())


def _clock(seconds: float) -> str:
    return f"{max(0, int(seconds)) // 60}:{max(0, int(seconds)) % 60:02}"
