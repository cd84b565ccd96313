"""What the command `db` does."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from .. import units
from ..errors import InputError
from . import upkeep
from .table import causes


@dataclass(frozen=True)
class Done:
    """What was done: for programs, as JSON has it but for paths, and for people."""

    document: dict[str, Any]
    text: str


def act(action: str, databases: Sequence[Path], output: Path | None, keep: int, least: float) -> Done:
    """Raises InputError for what does not go together, and DatabaseError."""
    if action != "merge" and len(databases) > 1:
        raise InputError(f"db {action} takes one database, not {len(databases)}.")
    (database, *_) = databases
    if action == "show":
        summaries = upkeep.show(database)
        return Done({"tasks": [asdict(summary) for summary in summaries]}, _table(summaries))
    if action == "prune":
        gone = upkeep.prune(database, keep)
        return Done({"database": database, "gone": gone}, f"{gone} trials went from {database}")
    if output is None:
        raise InputError(f"db {action} needs --output.")
    if action == "pack":
        kernels = upkeep.pack(database, output, least)
        return Done({"output": output, "kernels": kernels}, f"packed {kernels} kernels into {output}")
    if action == "merge":
        upkeep.merge(databases, output)
        return Done({"output": output}, f"merged into {output}")
    if action == "export":
        upkeep.export(database, output)
    else:
        from .plot import plot

        plot(database, output)
    return Done({"output": output}, f"wrote {output}")


def _table(summaries: Sequence[upkeep.Summary]) -> str:
    """A table for each architecture."""
    console = Console(width=None if sys.stdout.isatty() else 160)
    with console.capture() as captured:
        for name in dict.fromkeys(summary.architecture for summary in summaries):
            table = Table(title=name, title_justify="left")
            table.add_column("arguments", overflow="fold")
            for heading in ("trials", "default", "fastest", "best", "gain", "estimate"):
                table.add_column(heading, justify="right")
            table.add_column("failed")
            for summary in (summary for summary in summaries if summary.architecture == name):
                table.add_row(*_cells(summary))
            console.print(table)
    return captured.get().rstrip("\n")


def _cells(s: upkeep.Summary) -> tuple[str, ...]:
    return (
        " ".join("x".join(map(str, a)) if isinstance(a, tuple) else str(a) for a in s.shapes),
        str(s.trials),
        units.time(s.default),
        units.time(s.fastest),
        "-" if s.best is None else units.time(s.best),
        "-" if s.best is None else f"{s.default / s.best:.2f}x",
        "-" if s.estimate is None else f"{s.estimate:.2f}",
        causes(s.failures),
    )
