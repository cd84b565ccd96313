"""What the command `db` does."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path

from rich.console import Console
from rich.table import Table

from ..errors import InputError
from . import upkeep
from .table import causes, time_of


def act(action: str, databases: Sequence[Path], output: Path | None, keep: int, least: float) -> int:
    """Raises InputError for what does not go together, and DatabaseError."""
    if action != "merge" and len(databases) > 1:
        raise InputError(f"db {action} takes one database, not {len(databases)}.")
    if action in ("merge", "export", "pack", "plot") and output is None:
        raise InputError(f"db {action} needs --output.")
    (database, *_) = databases
    if action == "show":
        _show(database)
    elif action == "prune":
        print(f"{upkeep.prune(database, keep)} trials went from {database}")
    elif output is not None and action == "merge":
        upkeep.merge(databases, output)
        print(f"merged into {output}")
    elif output is not None and action == "export":
        upkeep.export(database, output)
        print(f"wrote {output}")
    elif output is not None and action == "pack":
        print(f"packed {upkeep.pack(database, output, least)} kernels into {output}")
    elif output is not None:
        from .plot import plot

        plot(database, output)
        print(f"wrote {output}")
    return 0


def _show(database: Path) -> None:
    console = Console(width=None if sys.stdout.isatty() else 160)
    summaries = upkeep.show(database)
    for name in dict.fromkeys(summary.architecture for summary in summaries):
        table = Table(title=name, title_justify="left")
        table.add_column("arguments", overflow="fold")
        for heading in ("trials", "default", "fastest", "settled", "gain", "estimate"):
            table.add_column(heading, justify="right")
        table.add_column("failed")
        for s in (s for s in summaries if s.architecture == name):
            settled = "-" if s.settled is None else time_of(s.settled)
            gain = "-" if s.settled is None else f"{s.default / s.settled:.2f}x"
            shapes = " ".join("x".join(map(str, a)) if isinstance(a, tuple) else str(a) for a in s.shapes)
            estimate = "-" if s.estimate is None else f"{s.estimate:.2f}"
            table.add_row(
                shapes,
                str(s.trials),
                time_of(s.default),
                time_of(s.fastest),
                settled,
                gain,
                estimate,
                causes(s.failures),
            )
        console.print(table)
