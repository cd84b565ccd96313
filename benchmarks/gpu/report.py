"""What was found, as a table and a picture."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ..bars import draw_bars
from .plan import Bar, Case, Plan
from .results import Results

_UNITS = {"FLOP": (1e12, "TFLOP/s"), "byte": (1e9, "GB/s")}


@dataclass(frozen=True)
class Row:
    """One kernel in one case; None where there is no figure. ratio is the best peer's time by ours."""

    case: Case
    contender: str
    entry: dict[str, Any]
    seconds: float | None
    rate: float | None
    share: float | None
    ratio: float | None
    bars: list[tuple[str, bool]]


def rows(plan: Plan, results: Results) -> list[Row]:
    """Of the cases that were measured, in the order of the plan."""
    found = []
    for case in plan.cases.values():
        entry = results.found["cases"].get(case.name)
        if entry is not None:
            contenders = [plan.kernels[name].contender for name in case.kernels]
            found += [_row(case, contender, entry, results) for contender in contenders]
    return found


def _row(case: Case, contender: str, entry: dict[str, Any], results: Results) -> Row:
    seconds, limit = _median(entry, contender), results.limit(case.unit)
    others = [time for peer in case.peers if (time := _median(entry, peer)) is not None]
    rate = case.amount / seconds if seconds else None
    share = rate / limit if rate and limit else None
    ratio = min(others) / seconds if seconds and others else None
    bars = [_judged(bar, case.unit, rate, share, ratio) for bar in case.bars if bar.contender == contender]
    return Row(case, contender, entry, seconds, rate, share, ratio, bars)


def _median(entry: dict[str, Any], contender: str) -> float | None:
    timing = entry.get(contender, {}).get("timing") if "problem" not in entry else None
    return None if timing is None else timing["median"]


def _judged(bar: Bar, unit: str, rate: float | None, share: float | None, ratio: float | None) -> tuple[str, bool]:
    """What is asked in words, and whether it is met; a figure that is missing meets nothing."""
    if bar.rate is not None:
        scale, name = _UNITS[unit]
        return f"{bar.rate / scale:g} {name}", (rate or 0.0) >= bar.rate
    if bar.share is not None:
        return f"{bar.share:g} of limit", (share or 0.0) >= bar.share
    return f"{bar.ratio:g}x", (ratio or 0.0) >= (bar.ratio or 0.0)


def table(plan: Plan, results: Results) -> str:
    """All rows, a part for each group of cases; then what failed, the limits and how many bars are met."""
    found, lines = rows(plan, results), []
    for group in dict.fromkeys(row.case.group for row in found):
        part = [row for row in found if row.case.group == group]
        others = list(dict.fromkeys(peer for row in part for peer in row.case.peers))
        headings = [group, "", "us", "spread", "speed", "of limit", "ratio", *others, "error", "bars"]
        lines += [*_aligned([headings, *(_cells(row, others) for row in part)]), ""]
    lines += _steps(results)
    for row in found:
        if why := row.entry.get(row.contender, {}).get("problem"):
            lines.append(f"cases: {row.case.name}: {row.contender}: {why}")
    for kind, entries in results.found.items():
        failed = {name: entry["problem"] for name, entry in entries.items() if "problem" in entry}
        lines += [f"{kind}: {name}: {problem}" for name, problem in failed.items()]
        if kind in ("checks", "models", "sanitizer"):
            lines.append(f"{kind}: {len(entries) - len(failed)} right of {len(entries)}")
    lines += [f"sanitizer: {entry['note']}" for entry in results.found["sanitizer"].values() if "note" in entry]
    limits = results.found["limits"].get("limits", {})
    if "problem" not in limits and limits:
        rates = ", ".join(f"{limits[unit] / scale:.4g} {name}" for unit, (scale, name) in _UNITS.items())
        about = ", ".join(f"{key} {limits[key]}" for key in ("torch", "cuda", "cudnn"))
        lines.append(f"limits: {rates} (bfloat16 product, copy); {results.device}, {about}; {results.date}")
    bars = [met for row in found for _, met in row.bars]
    return "\n".join([*lines, f"bars met: {sum(bars)} of {len(bars)}; kernels {plan.digest}"])


def _steps(results: Results) -> list[str]:
    """Of decoders: microseconds of a step, each contender by the ratio of its time to ours."""
    lines = []
    for name, entry in results.found["steps"].items():
        if "problem" not in entry:
            ours = entry["ours"]["timing"]["median"]
            parts = (
                f"{who} {_time(found)} us, {found['timing']['median'] / ours:.2f}x" for who, found in entry.items()
            )
            lines.append(f"step of {name}: {'; '.join(parts)}")
    return lines


def _cells(row: Row, others: list[str]) -> list[str]:
    scale, unit = _UNITS[row.case.unit]
    mine = row.entry if "problem" in row.entry else row.entry.get(row.contender, {})
    peers = [_time(row.entry.get(peer, {})) if "problem" not in row.entry else "" for peer in others]
    bars = "; ".join(f"{text} {'met' if met else 'NOT MET'}" for text, met in row.bars)
    return [
        *(row.case.name, row.contender, _time(mine), _spread(mine)),
        *("-" if row.rate is None else f"{row.rate / scale:.4g} {unit}", _number(row.share), _number(row.ratio)),
        *(*peers, f"{mine['error']:.0e}" if "error" in mine else "-", bars),
    ]


def _time(entry: dict[str, Any]) -> str:
    """Microseconds; a dash where it refused or was not there, else why there is no time."""
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
    """The picture of all kernels that were timed."""
    found = [row for row in rows(plan, results) if row.seconds is not None]
    if found:
        names = [f"{row.case.name}, {row.contender}" for row in found]
        title = f"onnx-lowering, {results.device}, {results.date}"
        draw_bars(title, names, [row.ratio or 0.0 for row in found], [row.share or 0.0 for row in found], path)
