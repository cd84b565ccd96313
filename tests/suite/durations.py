"""Durations of a run: `pytest --durations-to=FILE --budget=SECONDS`.

FILE gets a line of JSON for each test, slowest first: its name, its seconds, and its CPU seconds, setup and teardown
included. The end of the run lists the slowest ones. A run fails if the CPU seconds of the SLOWEST most expensive tests
exceed the budget: on a machine that has other work they grow far less than seconds do.
"""

from __future__ import annotations

import json
import os
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import pytest

SLOWEST = 20
_PROPERTY = "cpu_seconds"


@dataclass
class Duration:
    """The seconds of a test."""

    test: str
    seconds: float = 0.0
    cpu_seconds: float = 0.0


def add_options(parser: pytest.Parser) -> None:
    parser.addoption("--durations-to", type=Path, metavar="FILE", help="write the seconds of each test there")
    parser.addoption("--budget", type=float, help=f"fail if the {SLOWEST} slowest tests take more CPU seconds")


def sum_slowest(durations: list[Duration]) -> float:
    """Return the CPU seconds of the SLOWEST most expensive tests."""
    return sum(sorted(duration.cpu_seconds for duration in durations)[-SLOWEST:])


class Durations:
    """The plugin. With several processes, each measures its tests, and the one that distributes them adds up."""

    def __init__(self, config: pytest.Config) -> None:
        self._file, self._budget = config.getoption("durations_to"), config.getoption("budget")
        self._is_controller = not hasattr(config, "workerinput")
        self._durations: dict[str, Duration] = {}
        self._begin = 0.0

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_protocol(self) -> Any:
        self._begin = _measure_cpu()
        return (yield)

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_makereport(self, item: pytest.Item, call: pytest.CallInfo[None]) -> Any:
        if call.when == "teardown":  # reports carry properties from process to process
            item.user_properties.append((_PROPERTY, _measure_cpu() - self._begin))
        return (yield)

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        test = report.nodeid.split("@")[0]
        duration = self._durations.setdefault(test, Duration(test))
        duration.seconds += report.duration
        duration.cpu_seconds = float(dict(report.user_properties).get(_PROPERTY, 0.0))

    @pytest.hookimpl(tryfirst=True)
    def pytest_sessionfinish(self, session: pytest.Session) -> None:
        if not self._is_controller:
            return
        durations = self._sort()
        if self._file is not None:
            self._file.parent.mkdir(parents=True, exist_ok=True)
            self._file.write_text("".join(f"{json.dumps(asdict(duration))}\n" for duration in durations))
        if self._budget is not None and sum_slowest(durations) > self._budget and session.exitstatus == 0:
            session.exitstatus = pytest.ExitCode.TESTS_FAILED

    def pytest_terminal_summary(self, terminalreporter: pytest.TerminalReporter) -> None:
        durations = self._sort()
        if self._file is not None:
            terminalreporter.section(f"{SLOWEST} slowest tests: seconds, CPU seconds")
            for duration in durations[:SLOWEST]:
                terminalreporter.write_line(f"{duration.seconds:8.1f} {duration.cpu_seconds:8.1f}  {duration.test}")
        if self._budget is not None:
            total = sum_slowest(durations)
            text = f"{SLOWEST} slowest tests: {total:.0f} CPU seconds, budget: {self._budget:.0f}"
            terminalreporter.write_line(text, red=total > self._budget)

    def _sort(self) -> list[Duration]:
        """Return the durations, slowest first."""
        return sorted(self._durations.values(), key=lambda duration: -duration.seconds)


def _measure_cpu(process: int | str = "self") -> float:
    """Return the CPU seconds of a process, of the children it waited for, and of its live descendants."""
    folder, ticks, children = Path("/proc") / str(process), 0, []
    with suppress(OSError):  # a child that ends meanwhile
        fields = (folder / "stat").read_text().rpartition(")")[2].split()
        ticks = sum(map(int, fields[11:15]))
        children = [child for path in folder.glob("task/*/children") for child in path.read_text().split()]
    return ticks / os.sysconf("SC_CLK_TCK") + sum(_measure_cpu(child) for child in children)
