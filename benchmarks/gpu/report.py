"""Results as a table and a picture."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ..bars import draw_bars
from .plan import LIMITS, Bar, Case, Kernel, Plan
from .results import Results

_UNITS = {"FLOP": (1e12, "TFLOP/s"), "read": (1e9, "GB/s"), "copy": (1e9, "GB/s")}
_LONGEST = 12  # kernels of a profile that are shown


@dataclass(frozen=True)
class Row:
    """One kernel in one case; figures may be None. ratio is the best peer's time by ours, and gain the time
    with default tiles by that with these."""

    case: Case
    contender: str
    entry: dict[str, Any]
    seconds: float | None
    rate: float | None
    share: float | None
    ratio: float | None
    gain: float | None
    bars: list[tuple[str, bool]]


def rows(plan: Plan, results: Results) -> list[Row]:
    """Return the rows of the measured cases, in the order of the plan; variants of a kernel by their time."""
    limits = limits_of(plan, results)
    table_rows = []
    for case in plan.cases.values():
        entry = results.found["cases"].get(case.name)
        if entry is None:
            continue
        kernels = [plan.kernels[name] for name in case.kernels]
        of_case = [_row(case, kernel, kernels, entry, limits) for kernel in kernels]
        if plan.has_variants(case):
            of_case.sort(key=lambda row: row.seconds or float("inf"))
        table_rows += of_case
    return table_rows


def limits_of(plan: Plan, results: Results) -> dict[str, float]:
    """Return the work in a second that the GPU could do, by unit, as far as it was measured."""
    entries = results.found["limits"]
    names = {"FLOP": "matmul", "copy": "copy"}
    limits = {unit: entries[name]["rate"] for unit, name in names.items() if "rate" in entries.get(name, {})}
    reads = [rate for of_case in read_rates(plan, results).values() for rate in of_case.values()]
    return limits | ({"read": max(reads)} if reads else {})


def read_rates(plan: Plan, results: Results) -> dict[str, dict[str, float]]:
    """Return bytes in a second by case that only reads, and contender."""
    rates: dict[str, dict[str, float]] = {}
    for case in plan.cases.values():
        entry = results.found["cases"].get(case.name, {})
        if case.group == LIMITS and entry:
            medians = {plan.kernels[k].contender: _median(entry, plan.kernels[k].contender) for k in case.kernels}
            rates[case.name] = {name: case.amount / median for name, median in medians.items() if median}
    return rates


def _row(case: Case, kernel: Kernel, kernels: list[Kernel], entry: dict[str, Any], limits: dict[str, float]) -> Row:
    contender = kernel.contender
    seconds, limit = _median(entry, contender), limits.get(case.unit)
    peer_times = [time for peer in case.peers if (time := _median(entry, peer)) is not None]
    rate = case.amount / seconds if seconds else None
    share = rate / limit if rate and limit else None
    ratio = min(peer_times) / seconds if seconds and peer_times else None
    default = next((k for k in kernels if k.variant == kernel.variant and not k.tiles), None)
    untuned = _median(entry, default.contender) if default is not None and kernel.tiles else None
    gain = untuned / seconds if untuned and seconds else None
    bars = [_judged(bar, case.unit, rate, share, ratio) for bar in case.bars if bar.contender == contender]
    return Row(case, contender, entry, seconds, rate, share, ratio, gain, bars)


def _median(entry: dict[str, Any], contender: str) -> float | None:
    timing = entry.get(contender, {}).get("timing") if "problem" not in entry else None
    return None if timing is None else timing["median"]


def _judged(bar: Bar, unit: str, rate: float | None, share: float | None, ratio: float | None) -> tuple[str, bool]:
    """Return the text of a bar, and whether it is met; a missing figure meets nothing."""
    if bar.rate is not None:
        scale, name = _UNITS[unit]
        return f"{bar.rate / scale:g} {name}", (rate or 0.0) >= bar.rate
    if bar.share is not None:
        return f"{bar.share:g} of limit", (share or 0.0) >= bar.share
    return f"{bar.ratio:g}x", (ratio or 0.0) >= (bar.ratio or 0.0)


def table(plan: Plan, results: Results) -> str:
    """Return all rows, a table for each group of cases, and programs; then failures, missing facts, and the limits."""
    table_rows, lines = rows(plan, results), []
    for group in dict.fromkeys(row.case.group for row in table_rows):
        members = [row for row in table_rows if row.case.group == group]
        peers = list(dict.fromkeys(peer for row in members for peer in row.case.peers))
        has_variants = any(row.gain is not None for row in members)
        headings = [group, "", "us", "spread", "speed", "of limit", "ratio", "of default" if has_variants else ""]
        headings += [*peers, "error", "bars"]
        lines += [*_aligned([headings, *(_cells(row, peers) for row in members)]), ""]
    lines += [*_best(plan, results, table_rows), *_steps(results), *_programs(plan, results)]
    lines += _failures(table_rows, results)
    lines += [f"missing: {what}: {entry['note']}" for what, entry in results.found["missing"].items()]
    lines += _limits(plan, results)
    bars = [met for row in table_rows for _, met in row.bars]
    return "\n".join([*lines, f"bars met: {sum(bars)} of {len(bars)}; kernels {plan.digest}"])


def _best(plan: Plan, results: Results, table_rows: list[Row]) -> list[str]:
    """Return, for each case whose kernels differ in their tiles, the fastest tiles compared with the default."""
    lines = []
    for case in {row.case.name: row.case for row in table_rows if plan.has_variants(row.case)}.values():
        timed = [row for row in table_rows if row.case is case and row.seconds is not None]
        defaults = [row for row in timed if not _tiles(plan, row)]
        if not timed or not defaults:
            continue
        best, default = timed[0], defaults[0]
        assert best.seconds is not None and default.seconds is not None
        lines.append(
            f"best of {case.name}: {best.contender} {best.seconds * 1e6:.4g} us, default {default.contender} "
            f"{default.seconds * 1e6:.4g} us, {default.seconds / best.seconds:.3f}x"
        )
    return lines


def _tiles(plan: Plan, row: Row) -> Any:
    return next(plan.kernels[k].tiles for k in row.case.kernels if plan.kernels[k].contender == row.contender)


def _failures(table_rows: list[Row], results: Results) -> list[str]:
    """Return the failures of each kind, and how many jobs of it did not fail."""
    lines = []
    for row in table_rows:
        if why := row.entry.get(row.contender, {}).get("problem"):
            lines.append(f"cases: {row.case.name}: {row.contender}: {why}")
    for kind, entries in results.found.items():
        failed = {name: entry["problem"] for name, entry in entries.items() if "problem" in entry}
        lines += [f"{kind}: {name}: {problem}" for name, problem in failed.items()]
        if entries and kind not in ("limits", "missing", "cases"):
            lines.append(f"{kind}: {len(entries) - len(failed)} right of {len(entries)}")
    notes = [entry["note"] for entry in results.found["sanitizer"].values() if "note" in entry]
    return lines + [f"sanitizer: {notes.count(note)} times: {note}" for note in dict.fromkeys(notes)]


def _limits(plan: Plan, results: Results) -> list[str]:
    limits, about = limits_of(plan, results), results.found["limits"].get("about", {})
    lines = []
    for case, by_contender in read_rates(plan, results).items():
        said = ", ".join(f"{name} {rate / 1e9:.4g}" for name, rate in by_contender.items())
        lines.append(f"limits: {case}: {said or '-'} GB/s")
    if limits:
        rates = ", ".join(f"{unit} {rate / _UNITS[unit][0]:.4g} {_UNITS[unit][1]}" for unit, rate in limits.items())
        versions = ", ".join(f"{key} {about.get(key, '-')}" for key in ("torch", "cuda", "cudnn"))
        lines.append(f"limits: {rates}; {results.device}, {versions}; {results.date}")
    return lines


def _steps(results: Results) -> list[str]:
    """Return a line for each fact of a decoder's step."""
    lines = []
    for name, entry in results.found["steps"].items():
        if "rounds" in entry:
            rounds = ", ".join(f"{error:.2g}" for error in entry["rounds"])
            lines.append(f"step of {name}: {entry['tokens']} tokens, largest errors of the rounds {rounds}")
        elif "kernels" in entry:
            lines += _profile(name, entry)
        elif "ours" in entry:
            own = entry["ours"]["timing"]["median"]
            times = (f"{who} {_time(e)} us, {e['timing']['median'] / own:.2f}x" for who, e in entry.items())
            lines.append(f"step of {name}: {'; '.join(times)}")
    return lines


def _profile(name: str, entry: dict[str, Any]) -> list[str]:
    lines = [
        f"step of {name}: {entry['span'] * 1e6:.4g} us from first to last, kernels {entry['busy'] * 1e6:.4g} us, "
        f"{sum(kernel['launches'] for kernel in entry['kernels'].values()):.4g} launches"
    ]
    cells = [["us a step", "launches", "us each", "kernel"]]
    for kernel, figures in list(entry["kernels"].items())[:_LONGEST]:
        times = f"{figures['seconds'] * 1e6:.4g}", f"{figures['launches']:.4g}", f"{figures['median'] * 1e6:.4g}"
        cells.append([*times, kernel[:60]])
    return [*lines, *_aligned(cells), ""]


def _programs(plan: Plan, results: Results) -> list[str]:
    """Return microseconds of whole artifacts, a table for each kind: programs by what was timed."""
    lines = []
    for kind in ("weights", "experts", "flex", "decoders"):
        entries = {name: entry for name, entry in results.found[kind].items() if "times" in entry}
        labels = list(dict.fromkeys(label for entry in entries.values() for label in entry["times"]))
        if entries:
            cells = [[kind, *(f"{label}, us" for label in labels), "error"]]
            for name, entry in entries.items():
                times = (_time({"timing": entry["times"].get(label)}) for label in labels)
                cells.append([name, *times, f"{entry['error']:.0e}"])
            lines += [*_aligned(cells), ""]
    return lines


def _cells(row: Row, peers: list[str]) -> list[str]:
    scale, unit = _UNITS[row.case.unit]
    own = row.entry if "problem" in row.entry else row.entry.get(row.contender, {})
    times = [_time(row.entry.get(peer, {})) if "problem" not in row.entry else "" for peer in peers]
    bars = "; ".join(f"{text} {'met' if met else 'NOT MET'}" for text, met in row.bars)
    return [
        *(row.case.name, row.contender, _time(own), _spread(own)),
        *("-" if row.rate is None else f"{row.rate / scale:.4g} {unit}", _number(row.share), _number(row.ratio)),
        "" if row.gain is None else f"{row.gain:.3f}",
        *(*times, f"{own['error']:.0e}" if "error" in own else "-", bars),
    ]


def _time(entry: dict[str, Any]) -> str:
    """Return microseconds; a dash where it refused or was missing, else the reason for the missing time."""
    timing = entry.get("timing")
    if timing is None:
        return "wrong" if "error" in entry else "-"
    return f"{timing['median'] * 1e6:.4g}"


def _spread(entry: dict[str, Any]) -> str:
    timing = entry.get("timing")
    if timing is None:
        return "-"
    return f"{timing['low'] * 1e6:.4g}..{timing['high'] * 1e6:.4g}{'' if timing['graph'] else ' no graph'}"


def _number(value: float | None) -> str:
    return "-" if value is None else f"{value:.2f}"


def _aligned(lines: list[list[str]]) -> list[str]:
    widths = [max(map(len, column)) for column in zip(*lines)]
    return ["  ".join(cell.ljust(width) for cell, width in zip(line, widths)).rstrip() for line in lines]


def draw(plan: Plan, results: Results, path: Path) -> None:
    """Draw the picture of all kernels that were timed."""
    timed = [row for row in rows(plan, results) if row.seconds is not None]
    if timed:
        names = [f"{row.case.name}, {row.contender}" for row in timed]
        title = f"onnx-lowering, {results.device}, {results.date}"
        draw_bars(title, names, [row.ratio or 0.0 for row in timed], [row.share or 0.0 for row in timed], path)
