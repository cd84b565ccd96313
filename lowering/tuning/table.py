"""Display of `tune`: a live table during the search, and a table of the results."""

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
from ..shortened import shorten_middle, shorten_names
from .search.session import TuningOutcome, TuningState

if TYPE_CHECKING:
    from typing import Self  # added in Python 3.11

    from .tune import Tuning

_LINE_INTERVAL = 10.0  # seconds between lines without a terminal
_COLUMNS_WIDTH, _MIN_NAME_WIDTH = (
    58,
    20,
)  # live table: characters of the other columns, and minimal characters of a kernel's name
_WIDTH = 150  # characters, without a terminal
_MAX_ROWS = 20  # kernels
_MAX_NAMES = 3  # names of untuned kernels for each reason
_MIN_TIME_LEFT = 1.0  # seconds; if more of the budget is left, the reason is printed
_MIN_SEEMING_GAIN = 1.005  # smallest gain that prints as more than 1.00x


class ProgressDisplay:
    """Displays each state that `tune` reports: a table on a terminal, and elsewhere a line from time to time."""

    def __init__(self) -> None:
        self._console = Console(stderr=True)
        self._live = Live(console=self._console, auto_refresh=False, transient=True)
        self._last_line = -_LINE_INTERVAL

    def __enter__(self) -> Self:
        if self._console.is_terminal:
            self._live.start()
        return self

    def __exit__(self, kind: type | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self._live.stop()

    def __call__(self, state: TuningState) -> None:
        if self._console.is_terminal:
            self._live.update(_format_states(state, self._console.width), refresh=True)
            return
        if time.monotonic() - self._last_line >= _LINE_INTERVAL and state.at_work is not None:
            self._last_line = time.monotonic()
            trials = sum(search.trials for search in state.searches)
            print(
                f"{_format_clock(state.left)} left, {trials} trials: {state.at_work.name}", file=sys.stderr, flush=True
            )


def _format_states(state: TuningState, console_width: int) -> Table:
    table = Table(title=f"{state.step}, {_format_clock(state.left)} left", title_justify="left")
    table.add_column("kernel", no_wrap=True)
    table.add_column("searched")
    for name in ("trials", "default", "best", "gain"):
        table.add_column(name, justify="right")
    table.add_column("failed")
    width = max(console_width - _COLUMNS_WIDTH, _MIN_NAME_WIDTH)
    for search in state.searches:
        table.add_row(
            shorten_middle(search.name, width),
            search.space.kind,
            str(search.trials),
            units.format_time(search.reference),
            units.format_time(search.best),
            f"{search.gain:.2f}x",
            format_failures(search.count_causes()),
            style="bold" if search is state.at_work else None,
        )
    return table


def print_tuning(tuning: Tuning) -> None:
    """Print the results: a summary first, then a line for each kernel."""
    width = Console().width if sys.stdout.isatty() else _WIDTH
    print("\n".join(format_report(tuning, width)))


def format_report(tuning: Tuning, width: int) -> list[str]:
    """Return the lines that `print_tuning` prints. Only sentences may be longer than the width."""
    lines = [format_summary(tuning), *_explain_outcome(tuning), f"records: {tuning.database}"]
    tuned = [outcome for outcome in tuning.outcomes if not outcome.why]
    if tuned:
        lines += ["", *_format_table(tuned[:_MAX_ROWS], width)]
    if len(tuned) > _MAX_ROWS:
        lines.append(f"and {len(tuned) - _MAX_ROWS} more, which --json lists")
    return lines + _format_untuned(tuning)


def format_summary(tuning: Tuning) -> str:
    """Return the summary line."""
    whole_gain = tuning.whole_gain
    faster_count = sum(o.gain > 1 for o in tuning.outcomes)
    ended = "interrupted after" if tuning.interrupted else "took"
    return (
        f"{faster_count} of {len(tuning.outcomes)} kernels got faster, a run {tuning.gain:.2f}x by their shares"
        + ("" if whole_gain is None else f", measured {whole_gain:.2f}x")
        + f"; {ended} {_format_clock(tuning.seconds)} of {_format_clock(tuning.budget)}"
    )


def _explain_outcome(tuning: Tuning) -> list[str]:
    """Return sentences about results that the numbers do not explain."""
    lines, has_time_left = [], tuning.budget - tuning.seconds > _MIN_TIME_LEFT
    if tuning.ended == "trials":
        lines.append("The search ended with the trials that it was given.")
    elif tuning.ended == "candidates" and has_time_left:
        lines.append("The search ended early: the last batches of all kernels had no candidate that was not tried yet.")
    elif tuning.ended == "time" and has_time_left:
        lines.append("The search ended early to leave time for the last comparisons, which took less of it.")
    seemed = [o.unconfirmed for o in tuning.outcomes if o.unconfirmed >= _MIN_SEEMING_GAIN]
    if seemed:
        kernels = "1 kernel that seemed" if len(seemed) == 1 else f"{len(seemed)} kernels that seemed"
        defaults = "its default" if len(seemed) == 1 else "their defaults"
        keep = "keeps" if len(seemed) == 1 else "keep"
        lines.append(
            f"{kernels} up to {max(seemed):.2f}x faster in the search {keep} {defaults}: the last comparisons, alone "
            "and in whole runs, did not confirm it."
        )
    return lines


def _format_table(outcomes: Sequence[TuningOutcome], width: int) -> list[str]:
    """Return a line for each outcome. In a narrow terminal, columns are omitted and names are shortened."""
    headings, cells = [*_NUMBER_COLUMNS, *_OPTIONAL_COLUMNS], [_format_cells(outcome) for outcome in outcomes]
    while True:
        columns = [[heading, *(row[heading] for row in cells)] for heading in headings]
        number_width = sum(2 + max(map(len, column)) for column in columns)
        if width - number_width >= 2 * _MIN_NAME_WIDTH or headings == list(_NUMBER_COLUMNS):
            break
        headings.pop()
    name_width = max(width - number_width - 2, _MIN_NAME_WIDTH)
    kernel_width = min(max(len(o.name) for o in outcomes), max(name_width // 2, len("kernel")))
    nodes_width = max(name_width - kernel_width, len("nodes"))
    labels = [
        ("kernel", "nodes"),
        *((shorten_middle(o.name, kernel_width), shorten_names(o.nodes, nodes_width)) for o in outcomes),
    ]
    widths = [max(map(len, column)) for column in zip(*labels)]
    lines = []
    for pair, *numbers in zip(labels, *columns):
        cells_of_line = [cell.ljust(size) for cell, size in zip(pair, widths)]
        cells_of_line += [cell.rjust(max(map(len, column))) for cell, column in zip(numbers, columns)]
        lines.append("  ".join(cells_of_line).rstrip())
    return lines


def render_html(tuning: Tuning) -> str:
    """Return the HTML for notebooks."""
    lines = [format_summary(tuning), *_explain_outcome(tuning), f"records: {tuning.database}", *_format_untuned(tuning)]
    headings = (*_NUMBER_COLUMNS, *_OPTIONAL_COLUMNS)
    rows = [
        (outcome.name, ", ".join(outcome.nodes), *(_format_cells(outcome)[heading] for heading in headings))
        for outcome in tuning.outcomes
        if not outcome.why
    ]
    return notebook.format_table("\n".join(lines), ("kernel", "nodes", *headings), rows)


_NUMBER_COLUMNS = ("share", "trials", "default", "tuned", "gain")
_OPTIONAL_COLUMNS = ("in the model", "searched", "failed")  # omitted in narrow terminals


def _format_untuned(tuning: Tuning) -> list[str]:
    """Return a line for each reason why kernels were not tuned."""
    by_reason: dict[str, dict[str, None]] = {}
    for outcome in tuning.outcomes:
        if outcome.why:
            by_reason.setdefault(outcome.why, {})[shorten_middle(outcome.name, 40)] = None
    lines = []
    for why, names in by_reason.items():
        more = f" and {len(names) - _MAX_NAMES} more" if len(names) > _MAX_NAMES else ""
        lines.append(f"not tuned: {', '.join([*names][:_MAX_NAMES])}{more}: {why}")
    return lines


def _format_cells(outcome: TuningOutcome) -> dict[str, str]:
    return {
        "share": f"{outcome.share:.1%}",
        "trials": str(outcome.trials),
        "default": units.format_time(outcome.default),
        "tuned": units.format_time(outcome.seconds),
        "gain": f"{outcome.gain:.2f}x",
        "in the model": "" if outcome.in_model is None else f"{1 / outcome.in_model:.2f}x",
        "searched": outcome.searched,
        "failed": format_failures(outcome.failures),
    }


def format_failures(counts: Mapping[str, int]) -> str:
    """Return the numbers of failed candidates by cause."""
    return ", ".join(f"{count} {cause}" for cause, count in counts.items())


def _format_clock(seconds: float) -> str:
    return f"{max(0, int(seconds)) // 60}:{max(0, int(seconds)) % 60:02}"
