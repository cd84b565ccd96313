"""The actions of the command `db`."""

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
from .table import format_failures


@dataclass(frozen=True)
class CommandResult:
    """The result of an action: JSON for programs, except that paths are Path objects, and text for people."""

    document: dict[str, Any]
    text: str


def run_action(
    action: str, databases: Sequence[Path], output: Path | None, trials_per_task: int, min_gain: float
) -> CommandResult:
    """Run an action. Raises InputError for arguments that do not match it, and DatabaseError."""
    if action != "merge" and len(databases) > 1:
        raise InputError("argument.database_count_mismatch", f"db {action} takes one database, not {len(databases)}.")
    (database, *_) = databases
    if action == "show":
        summaries = upkeep.summarize_database(database)
        return CommandResult({"tasks": [asdict(summary) for summary in summaries]}, _format_table(summaries))
    if action == "prune":
        removed = upkeep.prune_database(database, trials_per_task)
        return CommandResult({"database": database, "gone": removed}, f"{removed} trials went from {database}")
    if output is None:
        raise InputError("argument.option_missing", f"db {action} needs --output.")
    if action == "pack":
        kernels = upkeep.pack_presets(database, output, min_gain)
        return CommandResult({"output": output, "kernels": kernels}, f"packed {kernels} kernels into {output}")
    if action == "merge":
        upkeep.merge_databases(databases, output)
        return CommandResult({"output": output}, f"merged into {output}")
    if action == "export":
        upkeep.export_best_records(database, output)
    else:
        from .plot import plot_database

        plot_database(database, output)
    return CommandResult({"output": output}, f"wrote {output}")


def _format_table(summaries: Sequence[upkeep.TaskSummary]) -> str:
    """Return a table for each architecture."""
    console = Console(width=None if sys.stdout.isatty() else 160)
    with console.capture() as captured:
        for name in dict.fromkeys(summary.architecture for summary in summaries):
            table = Table(title=name, title_justify="left")
            table.add_column("arguments", overflow="fold")
            for heading in ("trials", "default", "fastest", "best", "gain", "estimate"):
                table.add_column(heading, justify="right")
            table.add_column("failed")
            for summary in (summary for summary in summaries if summary.architecture == name):
                table.add_row(*_format_cells(summary))
            console.print(table)
    return captured.get().rstrip("\n")


def _format_cells(s: upkeep.TaskSummary) -> tuple[str, ...]:
    return (
        " ".join("x".join(map(str, a)) if isinstance(a, tuple) else str(a) for a in s.shapes),
        str(s.trials),
        units.format_time(s.default),
        units.format_time(s.fastest),
        "-" if s.best is None else units.format_time(s.best),
        "-" if s.best is None else f"{s.default / s.best:.2f}x",
        "-" if s.estimate is None else f"{s.estimate:.2f}",
        format_failures(s.failures),
    )
