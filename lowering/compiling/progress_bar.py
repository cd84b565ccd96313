"""The progress of a compile on a terminal."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from .progress import watched


@contextmanager
def shown() -> Iterator[None]:
    """Around compiling: a line at the bottom of the terminal, gone behind it. Where the errors of the command go to no
    terminal, nothing."""
    console = Console(stderr=True)
    if not console.is_terminal:
        yield
        return
    columns = TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn()
    with Progress(*columns, console=console, transient=True) as progress:
        task = progress.add_task("starting", total=None)

        def show(stage: str, done: int, of: int) -> None:
            progress.update(task, description=stage, completed=done, total=of or None, refresh=True)

        with watched(show):
            yield
