"""Text that docs/results.md and the README quote from the files in benchmarks/results."""

from __future__ import annotations

import re
import sys
from pathlib import Path

from .cases import all_cases
from .cases.published import GROUP
from .peers import OURS
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
_NAMES = {"torch": "PyTorch", "onnxruntime": "ONNX Runtime", "openvino": "OpenVINO", "llama_cpp": "llama.cpp"}

_ABOUT = """## {title}

{threads} of an {machine}, {dates}, float32 unless said otherwise, symbolic batch and lengths,
{tuned}. {turns}; medians in milliseconds where no unit is said. *Of the limit* is what we reach of the fastest
float32 matmul of 2048^3 (MKL, OpenBLAS), or of the fastest streaming read of the same bytes; bfloat16, whose
units are faster, goes beyond 1. *Ratio* is the best peer's time by ours, where both compute with weights of one type;
with int8 and int4 weights peers have float32, except where a case says *level 4*: theirs have as few bits. A dash is a
refusal, *wrong* an answer that differs from float64. Versions: {versions}.
"""

_SHAPES = """
The batch is 1 where none is said. Decode has 32 query heads on 8 key heads of 128.

![bar chart of all cases]({chart})
"""

# The first tokens of cases that are named by a short form.
_CODES = {
    "P1": "8 heads of 64, 1024 tokens",
    "P2": "8 heads of 128, 2048 tokens",
    "P3": "32 heads of 128 on 8, 2048 tokens",
}

# The table of the README, by case.
_SHORT = {
    "P2 full": "attention, 8 heads of 128, 2048 tokens",
    "P2 causal": "the same, causal",
    "P2 bool mask": "the same, with a mask of booleans",
    "window 256, S 4096": "a sliding window of 256 over 4096 tokens",
    "flex documents": "packed documents, by FlexAttention",
    "decode B1 kv 4096": "one new token behind 4096 in a cache",
    "decode B8 ragged": "one new token for each of 8 requests of different lengths",
    "P1 causal bf16": "causal attention in bfloat16, 8 heads of 64, 1024 tokens",
    "gradients, causal": "gradients of causal attention",
    "BERT 384 tokens": "BERT-base, 384 tokens",
    "Llama prefill 512": "a Llama, a prompt of 512 tokens",
    "Llama decode, 4096 slots": "a Llama, one token, caches of 4096",
    "MobileNetV3-Small, 224": "MobileNetV3-Small",
    "ResNet-18, first blocks, 224": "first blocks of ResNet-18",
    "bert-dynamo23-f16": "two layers of BERT in float16",
    "published-bert-dynamo23-f16-symbolic, fast": "the same by `--precision fast`, of another batch and length",
}
_SHORT_FROM = "cpu-1-thread.json"

_TURNS = "Contenders take turns in one run"
_TUNED = "tuned by `python -m benchmarks tune` in the column of that name alone"
_APART = "Contenders take turns, each in a process of its own\nthat stands still while others have theirs"


def section(folder: Path) -> str:
    """Return the text of every results file there, one thread first: cases with a bar, and a summary of all."""
    machine = read(folder / _SHORT_FROM).machine
    return "\n".join(_section(read(path), path, machine) for path in sorted(folder.glob("*.json")))


def short(folder: Path) -> str:
    """Return a few cases with plain names."""
    results = read(folder / _SHORT_FROM)
    rows_by_case, peers = {row.record.case: row for row in rows(results)}, results.peers()
    headings = ["milliseconds, one thread", OURS, *(_NAMES[peer] for peer in peers), "best of them by ours"]
    body = []
    for case, name in _SHORT.items():
        row = rows_by_case[case]
        times = [peer_cell(row.record, peer) for peer in peers]
        body.append([name, f"**{ours_cell(row)}**", *times, number(row.ratio)])
    return markdown(headings, body)


def _section(results: Results, path: Path, usual_machine: str) -> str:
    table_rows = rows(results)
    dates = sorted({row.record.date for row in table_rows})
    about = _ABOUT.format(
        title=_title(results, table_rows, usual_machine),
        threads=_threads(results),
        machine=results.machine,
        tuned=_TUNED if is_tuned(results) else "nothing tuned",
        turns=_APART if results.apart else _TURNS,
        dates=" to ".join(dict.fromkeys((dates[0], dates[-1]))),
        versions=", ".join(f"{name} {version}" for name, version in results.packages.items() if name in _NAMES),
    )
    scaling = ["scaling", "the limit scales"] if results.threads > 1 else []
    tuned, peers = ["tuned", "gain"] if is_tuned(results) else [], results.peers()
    headings = ["case", OURS, *tuned, "speed", "of the limit", *(_NAMES[peer] for peer in peers), "ratio", *scaling]
    shown = table_rows if tuned else [row for row in table_rows if _is_shown(row, results.threads)]
    body = [_cells(row, peers, bool(tuned), bool(scaling)) for row in shown]
    groups = [
        [group, str(len(ratios)), str(sum(ratio < 1 for ratio in ratios)), number(mean(ratios)), number(min(ratios))]
        for group, ratios in by_group(list(filter(_is_fair, table_rows))).items()
    ]
    limits = "; ".join(f"{name} {speed}" for name, speed in limit_speeds(results).items())
    summary = markdown(["all cases, by group", "with a peer", "slower", "geometric mean", "worst"], groups)
    if tuned:
        columns = ["tuned, by group", "gain", "least", "ratio to the best peer", "worst"]
        summary += f"\n{markdown(columns, gains(table_rows))}"
    widths = "".join(f"{text}\n" for text in [tables(table_rows)] if text)
    shapes = _SHAPES.format(chart=Path("..") / path.with_suffix(".png").relative_to(_ROOT))
    cases = f"{shapes}\n{markdown(headings, body)}" if body else ""
    ends = f"\nLimits, median and range over the cases: {limits}.\n" if limits else ""
    return f"{about}{cases}\n{widths}{summary}{ends}"


def _threads(results: Results) -> str:
    return "One thread" if results.threads == 1 else f"{results.threads} threads"


def _title(results: Results, table_rows: list[Row], usual_machine: str) -> str:
    published = all(row.record.group == GROUP for row in table_rows)
    titles = [_threads(results), "models at published widths" * published, "tuned" * is_tuned(results)]
    if results.machine != usual_machine:  # by its maker and family: Intel Xeon
        titles.append(" ".join(re.sub(r"\(R\)|\(TM\)|\(.*", "", results.machine).split()[:2]))
    return ", ".join(filter(None, titles))


def _is_shown(row: Row, threads: int) -> bool:
    """Select cases with a bar or weights of few bits; of the many exported models those that are slower; published
    widths elsewhere."""
    if row.record.group == GROUP:
        return False
    if row.record.group == "models":
        return row.ratio is not None and row.ratio < 1
    if row.record.group == "low bits":
        return True
    return all_cases()[row.record.case].bar.asks(threads)


def _is_fair(row: Row) -> bool:
    """Return whether peers compute the same model: with compressed weights it is ours alone, and theirs has float32."""
    return row.record.group != "weights"


def _cells(row: Row, peers: list[str], tuned: bool, scaling: bool) -> list[str]:
    first, _, rest = row.record.case.partition(" ")
    name = f"{_CODES[first]}, {rest}" if first in _CODES else row.record.case
    cells = [name, f"**{ours_cell(row)}**", *(tuned_cells(row) if tuned else [])]
    cells += [speed(row), number(row.share)]
    cells += [*(peer_cell(row.record, peer) for peer in peers), number(row.ratio if _is_fair(row) else None)]
    return [*cells, *scalings(row)] if scaling else cells


def update(check: bool) -> None:
    """Writes what both pages quote; with check, exits with a message where it is something else."""
    folder = _ROOT / "benchmarks" / "results"
    for path, quoted in ((_ROOT / "README.md", short(folder)), (_ROOT / "docs" / "results.md", section(folder))):
        text = path.read_text()
        before, after = text[: text.index(_BEGIN)], text[text.index(_END) :]
        new = f"{before}{_BEGIN}\n\n{quoted}\n{after}"
        if check and new != text:
            sys.exit(f"{path.name} does not quote benchmarks/results: run `python -m benchmarks pages`.")
        if not check:
            path.write_text(new)
