"""Reads records: rows of figures, the table of a run, and what pages quote."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass

from rich.table import Table

from .cases import all_cases
from .cases.case import Bar
from .peers import OURS, PEERS, TUNED
from .records import Outcome, Record, Results

# Below this share of wall time a thread alone was not alone.
_ALONE = 0.95


@dataclass(frozen=True)
class Row:
    """The figures of one case; None where there is none.

    seconds, low, high and cpu are ours; rate is work per second in 1e9, share that of the limit, ratio the best peer's
    time by ours, scaling our time on one thread by that on all. bars pairs the text of each bar with whether it is
    met.
    """

    record: Record
    seconds: float | None
    cpu: float | None
    rate: float | None
    share: float | None
    best: Outcome | None
    ratio: float | None
    scaling: float | None
    bars: list[tuple[str, bool]]


def rows(results: Results) -> list[Row]:
    """Return rows in the order of the cases; removed cases are left out."""
    cases = all_cases()
    return [_row(results.records[name], case.bar, results) for name, case in cases.items() if name in results.records]


def _row(record: Record, bar: Bar, results: Results) -> Row:
    own, limit = record.own_timing(), record.limit()
    seconds = None if own is None else own.median
    rate = record.amount / seconds / 1e9 if seconds and record.amount else None
    outcomes = [o for peer in PEERS if (o := record.best(peer)) is not None and o.timing is not None]
    best = min(outcomes, key=lambda o: o.timing.median if o.timing else math.inf, default=None)
    single = record.own_timing(1)
    row = Row(
        record=record,
        seconds=seconds,
        cpu=None if own is None else own.cpu,
        rate=rate,
        share=rate * 1e9 / limit if rate and limit else None,
        best=best,
        ratio=best.timing.median / seconds if best is not None and best.timing and seconds else None,
        scaling=single.median / seconds if single and seconds and record.threads > 1 else None,
        bars=[],
    )
    row.bars.extend(_bars(row, bar, results))
    return row


def _bars(row: Row, bar: Bar, results: Results) -> Iterable[tuple[str, bool]]:
    """Yield the bars on this number of threads; a missing figure meets nothing."""
    if row.record.threads > 1:
        if bar.scaling is not None:
            yield f"{bar.scaling:g}x one thread", (row.scaling or 0.0) >= bar.scaling
        return
    if bar.share is not None:
        yield f"{bar.share:g} of limit", (row.share or 0.0) >= bar.share
    if bar.ratio is not None:
        yield f"{bar.ratio:g}x", (row.ratio or 0.0) >= bar.ratio
    if bar.seconds is not None:
        yield f"{bar.seconds * 1e6:g} us", (row.seconds or math.inf) <= bar.seconds
    if bar.compared_to is not None:
        name, factor = bar.compared_to
        base = results.records[name].own_timing() if name in results.records else None
        met = base is not None and row.seconds is not None and base.median / row.seconds >= factor
        reached = f" ({base.median / row.seconds:.2f})" if base is not None and row.seconds else ""
        yield f"{factor:.3g}x '{name}'{reached}", met


# -- cells ------------------------------------------------------------------------------------------------------------


def milliseconds(seconds: float) -> str:
    """Return three digits; microseconds below a tenth of a millisecond."""
    if seconds < 1e-4:
        return f"{seconds * 1e6:.3g} us"
    return f"{seconds * 1e3:.3g}" if seconds < 0.1 else f"{seconds * 1e3:.0f}"


def scalings(row: Row) -> list[str]:
    """Return our scaling, and what the limit itself gains from several threads."""
    return [number(row.scaling), number(row.record.limit_scaling())]


def speed(row: Row) -> str:
    return "-" if row.rate is None else f"{row.rate:.3g} {'GF/s' if row.record.unit == 'FLOP' else 'GB/s'}"


def number(value: float | None) -> str:
    return "-" if value is None else f"{value:.2f}"


def peer_cell(record: Record, peer: str) -> str:
    """The time of the peer's best form; "wrong" where it answers and never right, a dash where it refuses."""
    best = record.best(peer)
    if best is not None and best.timing is not None:
        return milliseconds(best.timing.median)
    wrong = [o.error for o in record.outcomes if o.contender == peer and o.error is not None]
    return f"wrong ({min(wrong):.0e})" if wrong else "-"


def ours_cell(row: Row) -> str:
    return peer_cell(row.record, OURS) if row.seconds is None else milliseconds(row.seconds)


def is_tuned(results: Results) -> bool:
    """Whether ours was measured with a database of `tune`, too."""
    return any(o.contender == TUNED for record in results.records.values() for o in record.outcomes)


def tuned_cells(row: Row) -> list[str]:
    """Return our time with that database, and how many times faster it is."""
    return [peer_cell(row.record, TUNED), number(_gain(row))]


def gains(table_rows: list[Row]) -> list[list[str]]:
    """Return by group: the gain of tuning, and the best peer's time by ours when tuned; geometric means and minima."""
    cells = []
    for group in dict.fromkeys(row.record.group for row in table_rows):
        pairs = [
            (gain, row.ratio) for row in table_rows if row.record.group == group and (gain := _gain(row)) is not None
        ]
        ratios = [gain * ratio for gain, ratio in pairs if ratio is not None]
        figures = [mean([g for g, _ in pairs]), min(g for g, _ in pairs)] if pairs else [None, None]
        figures += [mean(ratios), min(ratios)] if ratios else [None, None]
        cells.append([group, *map(number, figures)])
    return cells


def _gain(row: Row) -> float | None:
    best = row.record.best(TUNED)
    return row.seconds / best.timing.median if best is not None and best.timing and row.seconds else None


def _spread(row: Row) -> str:
    own = row.record.own_timing()
    if own is None:
        return ""
    is_quiet = row.record.threads > 1 or own.cpu >= _ALONE * own.median
    return f"{milliseconds(own.low)}..{milliseconds(own.high)}{'' if is_quiet else ' noisy'}"


def _bar_cell(row: Row) -> str:
    return "; ".join(f"{text} {'met' if met else '[red]not met[/red]'}" for text, met in row.bars)


def table(results: Results, only: Iterable[str] | None = None) -> Table:
    """The records, or those of the cases named."""
    threads = f"{results.threads} thread{'s' * (results.threads > 1)}"
    shown = Table(
        title=f"milliseconds, {threads}, {results.machine}", title_justify="left", row_styles=["", "on grey11"]
    )
    scaling = ["scaling", "limit scales"] if results.threads > 1 else []
    tuned, peers = ["tuned", "gain"] if is_tuned(results) else [], results.peers()
    for heading in ("", OURS, *tuned, "spread", "CPU", "speed", "of limit", *peers, "ratio", *scaling, "bar"):
        shown.add_column(heading, justify="left" if heading in ("", "bar") else "right")
    names = None if only is None else set(only)
    for row in rows(results):
        if names is not None and row.record.case not in names:
            continue
        cells: list[str] = [row.record.case.replace("[", r"\["), ours_cell(row)]
        cells += tuned_cells(row) if tuned else []
        cells += [_spread(row)]
        cells += ["" if row.cpu is None else milliseconds(row.cpu), speed(row), number(row.share)]
        cells += [peer_cell(row.record, peer) for peer in peers]
        cells += [number(row.ratio), *(scalings(row) if scaling else []), _bar_cell(row)]
        shown.add_row(*cells)
    return shown


def summary(results: Results) -> list[str]:
    """Return geometric means of the ratio by group, slower cases, the number of bars met, and the limits' speeds."""
    table_rows = rows(results)
    lines = [
        f"{group}: {len(ratios)} cases with a peer, geometric mean {mean(ratios):.2f}x the best peer, "
        f"{sum(ratio < 1 for ratio in ratios)} behind"
        for group, ratios in by_group(table_rows).items()
    ]
    bars = [met for row in table_rows for _, met in row.bars]
    if bars:
        lines.append(f"bars met: {sum(bars)} of {len(bars)}")
    gains = [gain for row in table_rows if (gain := _gain(row)) is not None]
    if gains:
        lines.append(
            f"tuned: {len(gains)} cases, geometric mean {mean(gains):.2f}x the default, least {min(gains):.2f}x"
        )
    return lines + [f"{name}: {speed}" for name, speed in limit_speeds(results).items()]


def by_group(table_rows: list[Row]) -> dict[str, list[float]]:
    """Return the ratios of the cases that a peer can run."""
    ratios: dict[str, list[float]] = {}
    for row in table_rows:
        if row.ratio:
            ratios.setdefault(row.record.group, []).append(row.ratio)
    return ratios


def limit_speeds(results: Results) -> dict[str, str]:
    """Return the median over the cases of the speed of each limit, in GF/s or GB/s."""
    speeds: dict[str, list[float]] = {}
    for record in results.records.values():
        unit = "GF/s" if record.unit == "FLOP" else "GB/s"
        for o in record.limits:
            if o.timing is not None:
                speeds.setdefault(f"{o.form}|{unit}", []).append(record.limit_amount / o.timing.median / 1e9)
    texts: dict[str, str] = {}
    for key, values in speeds.items():
        name, unit = key.split("|")
        texts[name] = f"{sorted(values)[len(values) // 2]:.3g} {unit} ({min(values):.3g} to {max(values):.3g})"
    return texts


def markdown(headings: list[str], body: list[list[str]]) -> str:
    """A table."""
    lines = [headings, ["---"] * len(headings), *body]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines) + "\n"


def mean(ratios: list[float]) -> float:
    """Geometric."""
    return math.exp(sum(map(math.log, ratios)) / len(ratios))
