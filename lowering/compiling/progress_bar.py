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

from .progress import watched


class _Bar(BarColumn):
    """Nothing for stages of which nobody knows how much is done."""

    def render(self, task: Task) -> Any:
        return Text("") if task.total is None else super().render(task)


class _Count(MofNCompleteColumn):
    """Likewise."""

    def render(self, task: Task) -> Text:
        return Text("") if task.total is None else super().render(task)


@contextmanager
def shown() -> Iterator[None]:
    """Around compiling: a line at the bottom of the terminal, gone when it ends. Where the errors of the command go to
    no terminal, nothing."""
    console = Console(stderr=True)
    if not console.is_terminal:
        yield
        return
    columns = SpinnerColumn(), TextColumn("{task.description}"), _Bar(), _Count(), TimeElapsedColumn()
    with Progress(*columns, console=console, transient=True) as progress:
        task = progress.add_task("starting", total=None)

        def show(stage: str, done: int, of: int) -> None:
            progress.tasks[0].total = of or None  # which update() leaves as it was where it is None
            progress.update(task, description=stage, completed=done, refresh=True)

        with watched(show):
            yield
