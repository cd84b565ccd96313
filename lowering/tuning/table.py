"""What people see of `tune`: a table that lives while it works, and one of what came out."""

from __future__ import annotations

import sys
import time
from collections.abc import Mapping, Sequence
from types import TracebackType
from typing import TYPE_CHECKING

from rich.console import Console
from rich.live import Live
from rich.table import Table

from .. import notebook, units
from ..shortened import cut_middle, first_and_more
from .session import Outcome, State
from .tune import Tuning

if TYPE_CHECKING:
    from typing import Self  # of Python 3.11

_PAUSE = 10.0  # seconds between lines where there is no terminal
_FIXED, _LEAST = 58, 20  # of the live table: characters beside the names of kernels, and those of a name at least
_WIDTH = 150  # characters, where there is no terminal
_ROWS = 20  # kernels
_NAMED = 3  # kernels that were not tuned, for each reason
_EARLY = 1.0  # seconds of the budget, above which is said why they are left
_SEEMED = 1.005  # from which on a gain is more than 1.00x


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
            self._live.update(_states(state, self._console.width), refresh=True)
            return
        if time.monotonic() - self._spoke >= _PAUSE and state.at_work is not None:
            self._spoke = time.monotonic()
            trials = sum(search.trials for search in state.searches)
            print(f"{_clock(state.left)} left, {trials} trials: {state.at_work.name}", file=sys.stderr, flush=True)


def _states(state: State, console_width: int) -> Table:
    table = Table(title=f"{state.step}, {_clock(state.left)} left", title_justify="left")
    table.add_column("kernel", no_wrap=True)
    table.add_column("searched")
    for name in ("trials", "default", "best", "gain"):
        table.add_column(name, justify="right")
    table.add_column("failed")
    width = max(console_width - _FIXED, _LEAST)
    for search in state.searches:
        table.add_row(
            cut_middle(search.name, width),
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
    """Print what came out: the result first, then a line for each kernel."""
    width = Console().width if sys.stdout.isatty() else _WIDTH
    print("\n".join(report(tuning, width)))


def report(tuning: Tuning, width: int) -> list[str]:
    """Return the lines that `show` prints, of which none is longer than the width but for sentences."""
    lines = [summary(tuning), *_explanations(tuning), f"records: {tuning.database}"]
    tuned = [outcome for outcome in tuning.outcomes if not outcome.why]
    if tuned:
        lines += ["", *_table(tuned[:_ROWS], width)]
    if len(tuned) > _ROWS:
        lines.append(f"and {len(tuned) - _ROWS} more, which --json lists")
    return lines + _left_out(tuning)


def summary(tuning: Tuning) -> str:
    """One line about the whole."""
    whole = tuning.whole_gain
    kept = sum(o.gain > 1 for o in tuning.outcomes)
    ended = "interrupted after" if tuning.interrupted else "took"
    return (
        f"{kept} of {len(tuning.outcomes)} kernels got faster, a run {tuning.gain:.2f}x by their shares"
        + ("" if whole is None else f", measured {whole:.2f}x")
        + f"; {ended} {_clock(tuning.seconds)} of {_clock(tuning.budget)}"
    )


def _explanations(tuning: Tuning) -> list[str]:
    """A sentence each for what the figures do not explain themselves."""
    lines, early = [], tuning.budget - tuning.seconds > _EARLY
    if tuning.ended == "trials":
        lines.append("The search ended with the trials that it was given.")
    elif tuning.ended == "candidates" and early:
        lines.append("The search ended early: the last batches of all kernels had no candidate that was not tried yet.")
    elif tuning.ended == "time" and early:
        lines.append("The search ended early to leave time for the last comparisons, which took less of it.")
    seemed = [o.unconfirmed for o in tuning.outcomes if o.unconfirmed >= _SEEMED]
    if seemed:
        kernels = "1 kernel that seemed" if len(seemed) == 1 else f"{len(seemed)} kernels that seemed"
        defaults = "its default" if len(seemed) == 1 else "their defaults"
        keep = "keeps" if len(seemed) == 1 else "keep"
        lines.append(
            f"{kernels} up to {max(seemed):.2f}x faster in the search {keep} {defaults}: the last comparisons, alone "
            "and in whole runs, did not confirm it."
        )
    return lines


def _table(outcomes: Sequence[Outcome], width: int) -> list[str]:
    """A line for each outcome. Where there is no room columns are left out, and names are cut in the middle."""
    headings, cells = [*_NUMBERS, *_MORE], [_cells(outcome) for outcome in outcomes]
    while True:
        columns = [[heading, *(row[heading] for row in cells)] for heading in headings]
        taken = sum(2 + max(map(len, column)) for column in columns)
        if width - taken >= 2 * _LEAST or headings == list(_NUMBERS):
            break
        headings.pop()
    names = max(width - taken - 2, _LEAST)
    kernel = min(max(len(o.name) for o in outcomes), max(names // 2, len("kernel")))
    nodes = max(names - kernel, len("nodes"))
    words = [("kernel", "nodes"), *((cut_middle(o.name, kernel), first_and_more(o.nodes, nodes)) for o in outcomes)]
    widths = [max(map(len, column)) for column in zip(*words)]
    lines = []
    for pair, *numbers in zip(words, *columns):
        parts = [cell.ljust(size) for cell, size in zip(pair, widths)]
        parts += [cell.rjust(max(map(len, column))) for cell, column in zip(numbers, columns)]
        lines.append("  ".join(parts).rstrip())
    return lines


def html(tuning: Tuning) -> str:
    """For notebooks."""
    lines = [summary(tuning), *_explanations(tuning), f"records: {tuning.database}", *_left_out(tuning)]
    headings = (*_NUMBERS, *_MORE)
    rows = [
        (outcome.name, ", ".join(outcome.nodes), *(_cells(outcome)[heading] for heading in headings))
        for outcome in tuning.outcomes
        if not outcome.why
    ]
    return notebook.table("\n".join(lines), ("kernel", "nodes", *headings), rows)


_NUMBERS = ("share", "trials", "default", "tuned", "gain")
_MORE = ("in the model", "searched", "failed")  # where there is room


def _left_out(tuning: Tuning) -> list[str]:
    """A line for each reason why kernels were not tuned."""
    by_reason: dict[str, dict[str, None]] = {}
    for outcome in tuning.outcomes:
        if outcome.why:
            by_reason.setdefault(outcome.why, {})[cut_middle(outcome.name, 40)] = None
    lines = []
    for why, names in by_reason.items():
        more = f" and {len(names) - _NAMED} more" if len(names) > _NAMED else ""
        lines.append(f"not tuned: {', '.join([*names][:_NAMED])}{more}: {why}")
    return lines


def _cells(outcome: Outcome) -> dict[str, str]:
    return {
        "share": f"{outcome.share:.1%}",
        "trials": str(outcome.trials),
        "default": units.time(outcome.default),
        "tuned": units.time(outcome.seconds),
        "gain": f"{outcome.gain:.2f}x",
        "in the model": "" if outcome.in_model is None else f"{1 / outcome.in_model:.2f}x",
        "searched": outcome.searched,
        "failed": causes(outcome.failures),
    }


def causes(counts: Mapping[str, int]) -> str:
    """How many candidates failed, by why."""
    return ", ".join(f"{count} {cause}" for cause, count in counts.items())


def _clock(seconds: float) -> str:
    return f"{max(0, int(seconds)) // 60}:{max(0, int(seconds)) % 60:02}"
