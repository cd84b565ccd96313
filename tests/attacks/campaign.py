"""Attacks on many operators, round by round, and a table of how they ended."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Sequence

from .pool import FINDINGS, FINE, Outcome, attack_all

Table = dict[str, Counter[str]]


def name_of(domain: str, op: str) -> str:
    return f"{domain}.{op}" if domain else op


def campaign(
    operators: Sequence[tuple[str, str]], cases: int, calls: int, first_seed: int = 0, processes: int = 2
) -> Iterator[Outcome]:
    """Yield `cases` outcomes of attacks on each operator in turn, with seeds from `first_seed` on.

    An attack makes up to `calls` calls of one compiled model.
    """
    seen = 0

    def plan() -> Iterable[tuple[str, str, int, int]]:
        seed = first_seed
        while True:
            for domain, op in operators:
                if seen >= cases:
                    return
                yield domain, op, seed, calls
            seed += 1

    for outcomes in attack_all(plan(), processes):
        seen += len(outcomes)
        yield from outcomes


def tabulated(outcomes: Iterable[Outcome]) -> Table:
    table: Table = {}
    for outcome in outcomes:
        table.setdefault(name_of(outcome.domain, outcome.op), Counter())[outcome.kind] += 1
    return table


def text(table: Table) -> str:
    """Return operators by how their calls ended; columns of findings come last."""
    return table_text(table, (*FINE, *FINDINGS))


def table_text(table: Table, columns: Sequence[str]) -> str:
    """Return rows by name, and their totals, in the columns that are not empty."""
    kinds = [k for k in columns if any(row[k] for row in table.values())]
    width = max(map(len, table), default=0)
    lines = ["  ".join([" " * width, *kinds])]
    for name, row in [*sorted(table.items()), ("in all", sum(table.values(), Counter()))]:
        lines.append("  ".join([name.ljust(width), *(str(row[k] or "").rjust(len(k)) for k in kinds)]))
    return "\n".join(lines)
