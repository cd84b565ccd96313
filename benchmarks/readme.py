"""The README's section of results, generated from the files in benchmarks/results."""

from __future__ import annotations

import sys
from pathlib import Path

from .cases import all_cases
from .cases.published import GROUP
from .peers import OURS, PEERS
from .records import Results, read
from .report import (
    Row,
    by_group,
    gains,
    is_tuned,
    limit_speeds,
    markdown,
    mean,
    number,
    ours_cell,
    peer_cell,
    rows,
    scalings,
    speed,
    tuned_cells,
)
from .widths import tables

_ROOT = Path(__file__).parents[1]
_BEGIN, _END = "<!-- results -->", "<!-- end of results -->"
_NAMES = {"torch": "PyTorch", "onnxruntime": "ONNX Runtime", "openvino": "OpenVINO"}

_ABOUT = """{threads} of an {machine}, {dates}, float32 unless said otherwise, symbolic batch and lengths,
{tuned}. {turns}; medians in milliseconds. *Of the limit* is what we reach of the fastest
float32 matrix product of 2048^3 (MKL, OpenBLAS), or of the fastest streaming read of the same bytes; *ratio* is the
best peer's time by ours. A dash is a refusal, *wrong* an answer that differs from float64. Versions: {versions}.
"""

_SHAPES = """
P1 is B1 H8 S1024 D64, P2 B1 H8 S2048 D128, P3 B1 Hq32 Hkv8 S2048 D128; decode has Hq32 Hkv8 D128.

![bar chart of all cases]({chart})
"""

_TURNS = "Contenders take turns in one run"
_TUNED = "tuned by `python -m benchmarks tune` in the column of that name alone"
_APART = "Contenders take turns, each in a process of its own\nthat stands still while others have theirs"


def section(folder: Path) -> str:
    """For every results file there, one thread first: the cases with a bar, and a summary of all."""
    parts = [_part(read(path), path) for path in sorted(folder.glob("*.json"))]
    return f"{_BEGIN}\n\n" + "\n".join(parts) + f"\n{_END}\n"


def _part(results: Results, path: Path) -> str:
    found = rows(results)
    dates = sorted({row.record.date for row in found})
    about = _ABOUT.format(
        threads=f"{results.threads} thread{'s' * (results.threads > 1)}".capitalize().replace("1 thread", "One thread"),
        machine=results.machine,
        tuned=_TUNED if is_tuned(results) else "nothing tuned",
        turns=_APART if results.apart else _TURNS,
        dates=" to ".join(dict.fromkeys((dates[0], dates[-1]))),
        versions=", ".join(f"{name} {version}" for name, version in results.packages.items() if name in _NAMES),
    )
    scaling = ["scaling", "the limit scales"] if results.threads > 1 else []
    tuned = ["tuned", "gain"] if is_tuned(results) else []
    headings = ["case", OURS, *tuned, "speed", "of the limit", *(_NAMES[peer] for peer in PEERS), "ratio", *scaling]
    shown = found if tuned else [row for row in found if _is_shown(row, results.threads)]
    body = [_cells(row, bool(tuned), bool(scaling)) for row in shown]
    groups = [
        [group, str(len(ratios)), str(sum(ratio < 1 for ratio in ratios)), number(mean(ratios)), number(min(ratios))]
        for group, ratios in by_group(found).items()
    ]
    limits = "; ".join(f"{name} {speed}" for name, speed in limit_speeds(results).items())
    summary = markdown(["all cases, by group", "with a peer", "behind it", "geometric mean", "worst"], groups)
    if tuned:
        columns = ["tuned, by group", "gain", "least", "ratio to the best peer", "worst"]
        summary += f"\n{markdown(columns, gains(found))}"
    widths = "".join(f"{part}\n" for part in [tables(found)] if part)
    shapes = _SHAPES.format(chart=path.with_suffix(".png").relative_to(_ROOT))
    cases = f"{shapes}\n{markdown(headings, body)}" if body else ""
    ends = f"\nLimits, median and range over the cases: {limits}.\n" if limits else ""
    return f"{about}{cases}\n{widths}{summary}{ends}"


def _is_shown(row: Row, threads: int) -> bool:
    """Cases with something to reach; of the many exported models those that are behind; published widths elsewhere."""
    if row.record.group == GROUP:
        return False
    if row.record.group == "models":
        return row.ratio is not None and row.ratio < 1
    return all_cases()[row.record.case].bar.asks(threads)


def _cells(row: Row, tuned: bool, scaling: bool) -> list[str]:
    cells = [row.record.case, f"**{ours_cell(row)}**", *(tuned_cells(row) if tuned else [])]
    cells += [speed(row), number(row.share)]
    cells += [*(peer_cell(row.record, peer) for peer in PEERS), number(row.ratio)]
    return [*cells, *scalings(row)] if scaling else cells


def update(check: bool) -> None:
    """Writes the section into README.md; with check, exits with a message where it is another one."""
    path = _ROOT / "README.md"
    text = path.read_text()
    before, after = text[: text.index(_BEGIN)], text[text.index(_END) + len(_END) + 1 :]
    new = before + section(_ROOT / "benchmarks" / "results") + after
    if check and new != text:
        sys.exit("README.md does not quote benchmarks/results: run `python -m benchmarks readme`.")
    path.write_text(new)
