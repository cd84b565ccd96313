"""The progress of a compile on a terminal."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from rich.console import Console
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    SpinnerColumn,
    Task,
    TextColumn,
    TimeElapsedColumn,
)
from rich.text import Text

from .progress import watch_progress


class _StageBar(BarColumn):
    """A bar that is empty for stages of unspecified length."""

    def render(self, task: Task) -> Any:
        return Text("") if task.total is None else super().render(task)


class _StepCount(MofNCompleteColumn):
    """A count that is empty for stages of unspecified length."""

    def render(self, task: Task) -> Text:
        return Text("") if task.total is None else super().render(task)


@contextmanager
def show_progress_bar() -> Iterator[None]:
    """Show a progress line at the bottom of a terminal until the compile ends; without a terminal show nothing."""
    console = Console(stderr=True)
    if not console.is_terminal:
        yield
        return
    columns = SpinnerColumn(), TextColumn("{task.description}"), _StageBar(), _StepCount(), TimeElapsedColumn()
    with Progress(*columns, console=console, transient=True) as progress:
        task = progress.add_task("starting", total=None)

        def show(stage: str, done: int, total: int) -> None:
            progress.tasks[0].total = total or None  # update() would ignore None
            progress.update(task, description=stage, completed=done, refresh=True)

        with watch_progress(show):
            yield
