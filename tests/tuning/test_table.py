"""The report of `tune` at its end: the result first, short, in the width of the terminal."""

from __future__ import annotations

import dataclasses
import re
from pathlib import Path

import pytest

from lowering.shortened import shorten_middle, shorten_names
from lowering.tuning.search.session import End, TuningOutcome
from lowering.tuning.table import format_report, format_summary
from lowering.tuning.tune import Tuning

NODES = tuple(f"MatMul /model/encoder/layer.{k}/output/dense/MatMul" for k in range(12))
SLOW = TuningOutcome(
    "fused_packed_matmul_add_add_gelu_3", "tiles", NODES, 0.3, 2e-3, 2e-3, 18, {"slower": 12}, "", fastest=2e-3
)
FAST = dataclasses.replace(SLOW, name="fused_attention", seconds=1e-3, fastest=0.9e-3, in_model=0.55)
SEEMED = dataclasses.replace(SLOW, name="fused_softmax", fastest=1.6e-3)
LEFT = TuningOutcome("gather", "", ("Gather x",), 0.0, 1.0, 1.0, 0, {}, "", why="the time was over before it was begun")


def tuning(*outcomes: TuningOutcome, seconds: float = 119.5, ended: End = "time") -> Tuning:
    return Tuning(Path("tuned/here"), outcomes, seconds, 120.0, ended, 1.5)


@pytest.mark.parametrize("width", [70, 80, 100, 120, 150, 200])
@pytest.mark.parametrize("count", [1, 9, 40, 300])
def test_a_model_of_many_nodes_fits_a_terminal(width: int, count: int) -> None:
    """At any width: a line for a kernel, none longer than the terminal, the result first."""
    outcomes = [dataclasses.replace(SLOW, name=f"{SLOW.name}_{k}") for k in range(count)]
    lines = format_report(tuning(FAST, *outcomes, LEFT), width)
    assert lines[0] == format_summary(tuning(FAST, *outcomes, LEFT)) and lines[0].startswith(
        f"1 of {count + 2} kernels got"
    )
    table = lines[lines.index("") + 1 :]
    assert len(lines) < 30 and max(map(len, table)) <= width
    assert re.match(r"kernel +nodes +share +trials +default +tuned +gain", table[0])
    assert all(" and 11 more " in line for line in table[1 : 2 + min(count, 19)])
    assert ("failed" in table[0]) == (width >= 120)
    shown = {line.split()[0] for line in table[1 : 2 + min(count, 19)]}
    assert len(shown) == min(count + 1, 20)  # names that differ at their ends stay different
    assert ("which --json lists" in "\n".join(lines)) == (count + 1 > 20)


ENDS: dict[str, tuple[Tuning, list[str]]] = {
    "the time": (tuning(SLOW), []),
    "time that last comparisons did not need": (tuning(SLOW, seconds=88.0), ["ended early to leave time for the last"]),
    "trials": (tuning(SLOW, ended="trials"), ["ended with the trials that it was given"]),
    "nothing new": (tuning(SLOW, seconds=30.0, ended="candidates"), ["had no candidate that was not tried yet"]),
    "a user": (tuning(SLOW, seconds=30.0, ended="interrupt"), []),
    "a gain that was not confirmed": (
        tuning(FAST, SEEMED),
        ["^1 kernel that seemed up to 1.25x faster in the search keeps its default: .* did not confirm it"],
    ),
    "two such": (
        tuning(SEEMED, dataclasses.replace(SEEMED, fastest=1.9e-3), seconds=60.0),
        ["ended early", "^2 kernels that seemed up to 1.25x faster in the search keep their defaults"],
    ),
    "less than is shown": (tuning(dataclasses.replace(SLOW, fastest=1.995e-3)), []),
}


@pytest.mark.parametrize("case", ENDS)
def test_why_it_ended_and_what_was_not_confirmed(case: str) -> None:
    """A sentence each, after the result and before the records."""
    done, said = ENDS[case]
    lines = format_report(done, 80)
    sentences = lines[1 : lines.index("records: tuned/here")]
    assert len(sentences) == len(said)
    assert all(re.search(pattern, line) and line.endswith(".") for pattern, line in zip(said, sentences))
    assert lines[0].endswith(f"{'interrupted after' if done.interrupted else 'took'} {int(done.seconds) // 60}:"
                             f"{int(done.seconds) % 60:02} of 2:00")  # fmt: skip


def test_what_was_not_tuned_is_said_once_for_each_reason() -> None:
    names = ["gather", "add", "gather", "relu", "exp", "log"]
    left = [dataclasses.replace(LEFT, name=name) for name in names]
    failed = dataclasses.replace(LEFT, name="bad", why="its default failed: it is wrong")
    lines = format_report(tuning(*left, failed), 80)
    assert lines[-2:] == [
        "not tuned: gather, add, relu and 2 more: the time was over before it was begun",
        "not tuned: bad: its default failed: it is wrong",
    ]
    assert "kernel" not in lines[-3]  # no table of nothing


@pytest.mark.parametrize("width", [0, 1, 2, 3, 8, 21, 34, 100])
def test_names_are_cut_in_the_middle(width: int) -> None:
    text = "fused_packed_matmul_add_add_gelu_3"
    short = shorten_middle(text, width)
    assert len(short) == min(width, len(text))
    if 4 <= width < len(text):
        front, back = short.split("..")
        assert text.startswith(front) and text.endswith(back) and len(front) - len(back) in (0, 1)


def test_first_names() -> None:
    assert shorten_names([]) == "" and shorten_names(["a"]) == "a" and shorten_names(["a", "b"]) == "a and 1 more"
    assert shorten_names(["a" * 20 + "b", "c", "d"], 20) == "aaaa..aab and 2 more"[:20]
