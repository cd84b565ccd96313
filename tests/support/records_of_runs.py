"""Time-limited runs with stored results: `pytest --results=FOLDER --minutes M`.

FOLDER/results.jsonl gets a line for each test as it ends: its name, "passed", "failed" or "skipped", its seconds, the
seed of the run, and what pytest says of a failure, whose case follows from the name and the seed. The next run with the
same folder begins with what failed last, then what never ran, then what ran longest ago. No test starts after the
time; such a test leaves no line.
"""

from __future__ import annotations

import json
import os
import time
from pathlib import Path
from typing import Any

import pytest

from tests.support import seeds

FILE = "results.jsonl"


def add_options(parser: pytest.Parser) -> None:
    parser.addoption("--results", type=Path, metavar="FOLDER", help="keep results there, and begin with its failures")
    parser.addoption("--minutes", type=float, help="start no test after this time")


class Records:
    """The plugin. With several processes, the one that distributes tests stores the results."""

    def __init__(self, config: pytest.Config) -> None:
        worker_input = getattr(config, "workerinput", None)
        minutes, folder = config.getoption("minutes"), config.getoption("results")
        self._is_recorded = folder is not None
        self._path = folder / FILE if folder and worker_input is None else None
        if worker_input is None:
            self._deadline = None if minutes is None else time.time() + 60 * minutes
            self._order = read_order(folder) if folder else {}
        else:
            self._deadline, self._order = worker_input["deadline"], worker_input["order"]
        if self._path is not None:
            self._path.parent.mkdir(parents=True, exist_ok=True)

    @pytest.hookimpl(optionalhook=True)
    def pytest_configure_node(self, node: Any) -> None:
        """Tell a process of xdist what this one knows."""
        node.workerinput.update(deadline=self._deadline, order=self._order)

    @pytest.hookimpl(trylast=True)
    def pytest_collection_modifyitems(self, items: list[pytest.Item]) -> None:
        """Sort: what failed last, what never ran, what ran longest ago; among these, slow tests last."""
        if self._is_recorded:
            items.sort(key=lambda item: (self._order.get(item.nodeid.split("@")[0], 0), _is_slow(item)))

    @pytest.hookimpl(tryfirst=True)
    def pytest_runtest_setup(self) -> None:
        if self._deadline is not None and time.time() > self._deadline:
            pytest.skip("the time is up")

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if self._path is None or (report.when != "call" and report.passed) or report.when == "teardown":
            return
        text = report.longreprtext
        if report.skipped and "the time is up" in text:
            return
        line = {
            "test": report.nodeid.split("@")[0],
            "outcome": report.outcome,
            "seconds": round(report.duration, 2),
            "seed": os.environ.get(seeds.VARIABLE, ""),
            "text": "" if report.passed else text + "".join(content for _, content in report.sections)[-4000:],
        }
        with self._path.open("a") as file:
            file.write(json.dumps(line) + "\n")


def _is_slow(item: pytest.Item) -> bool:
    return item.get_closest_marker("slow") is not None


def read_order(folder: Path) -> dict[str, int]:
    """Return the position in the order of each test that ran: negative for failures; 0 is for those that never ran."""
    if not (folder / FILE).exists():
        return {}
    last: dict[str, tuple[int, str]] = {}
    for number, text in enumerate((folder / FILE).read_text().splitlines(), 1):
        line = json.loads(text)
        last[line["test"]] = number, line["outcome"]
    return {test: -1 if outcome == "failed" else number for test, (number, outcome) in last.items()}
