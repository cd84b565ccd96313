"""A run: the chosen cases one after the other, each kept as soon as it is measured, the table last."""

from __future__ import annotations

import argparse
import sys
import time

from rich.console import Console

from .cases.case import Case
from .chart import draw
from .measure import prepare
from .peers import OURS, PEERS, Peer, load
from .records import Results, here, read
from .report import summary, table


def run(cases: list[Case], arguments: argparse.Namespace) -> None:
    """The command `cpu`; see there for the arguments."""
    results = _results(arguments)
    peers = _peers([name for name in arguments.peers.split(",") if name], arguments.threads)
    for k, case in enumerate(cases, 1):
        if arguments.resume and case.name in results.records:
            continue
        start = time.perf_counter()
        print(f"[{k}/{len(cases)}] {case.name} ... ", end="", file=sys.stderr, flush=True)
        results.records[case.name] = prepare(case, peers, arguments.threads).measure(arguments.turns, arguments.seconds)
        print(f"{time.perf_counter() - start:.0f} s", file=sys.stderr, flush=True)
        if arguments.out is not None:
            results.write(arguments.out)
    if arguments.out is not None:
        draw(results, arguments.out.with_suffix(".png"))
    console = Console(width=None if sys.stdout.isatty() else 200)
    console.print(table(results, [case.name for case in cases]))
    for line in summary(results):
        print(line)


def _results(arguments: argparse.Namespace) -> Results:
    """What --out holds already, which new records replace one by one, or nothing yet."""
    fresh = here(arguments.threads)
    if arguments.out is None or not arguments.out.exists():
        return fresh
    kept = read(arguments.out)
    if (kept.machine, kept.threads) != (fresh.machine, fresh.threads):
        sys.exit(
            f"'{arguments.out}' holds results of {kept.machine} with {kept.threads} thread(s), and this is "
            f"{fresh.machine} with {fresh.threads}. Name another file."
        )
    kept.packages.update(fresh.packages)
    return kept


def _peers(names: list[str], threads: int) -> dict[str, Peer]:
    found = {OURS: load(OURS, threads)}
    for name in names:
        if name not in PEERS:
            sys.exit(f"there is no peer '{name}'. The peers are {', '.join(PEERS)}.")
        try:
            found[name] = load(name, threads)
        except ImportError as error:
            print(f"without {name}: {error}. Install it with pip install '.[peers]'.", file=sys.stderr)
    return found
