"""A run: the chosen cases one after the other, each stored as soon as it is measured, the table last."""

from __future__ import annotations

import argparse
import sys
import time
from functools import partial

from rich.console import Console

from .cases.case import Case
from .cases.exported import ExportCase
from .chart import draw
from .measure import Opener, prepare
from .peers import OURS, PEERS, TUNED, Peer, load
from .records import Results, here, read
from .report import summary, table


def run(cases: list[Case], arguments: argparse.Namespace) -> None:
    """The command `cpu`; see there for the arguments."""
    results = _results(arguments)
    openers: dict[str, Opener] = {OURS: partial(load, OURS, arguments.threads, arguments.target)}
    openers |= {name: partial(load, name, arguments.threads) for name in filter(None, arguments.peers.split(","))}
    if arguments.tuned is not None:
        openers[TUNED] = partial(load, TUNED, arguments.threads, arguments.target, arguments.tuned)
    peers = _opened(openers)
    left = [case for case in _found(cases) if not (arguments.resume and case.name in results.records)]
    end = time.monotonic() + 60 * arguments.minutes
    for k, case in enumerate(left, 1):
        start = time.monotonic()
        if start > end:
            print(
                f"{arguments.minutes:g} minutes are over: {len(left) - k + 1} of {len(left)} cases were not begun. "
                f"--resume goes on with them.",
                file=sys.stderr,
            )
            break
        print(f"[{k}/{len(left)}] {case.name} ... ", end="", file=sys.stderr, flush=True)
        prepared = prepare(case, peers, openers, arguments.threads)
        results.records[case.name] = prepared.measure(arguments.turns, arguments.seconds)
        print(f"{time.monotonic() - start:.0f} s", file=sys.stderr, flush=True)
        if arguments.out is not None:
            results.write(arguments.out)
    if arguments.out is not None:
        draw(results, arguments.out.with_suffix(".png"))
    console = Console(width=None if sys.stdout.isatty() else 200)
    console.print(table(results, [case.name for case in cases]))
    for line in summary(results):
        print(line)


def _found(cases: list[Case]) -> list[Case]:
    """Those whose exports were made."""
    missing = {case.export for case in cases if isinstance(case, ExportCase) and not case.exists}
    if missing:
        print(f"left out: {len(missing)} exports that --exports lacks, '{min(missing)}' among them.", file=sys.stderr)
    return [case for case in cases if not (isinstance(case, ExportCase) and case.export in missing)]


def _results(arguments: argparse.Namespace) -> Results:
    """Return the results in --out, whose records are replaced one by one, or empty ones."""
    fresh = here(arguments.threads, arguments.target)
    if arguments.out is None or not arguments.out.exists():
        return fresh
    stored = read(arguments.out)
    if (stored.machine, stored.threads) != (fresh.machine, fresh.threads):
        sys.exit(
            f"'{arguments.out}' holds results of {stored.machine} with {stored.threads} thread(s), and this is "
            f"{fresh.machine} with {fresh.threads}. Name another file."
        )
    stored.packages.update(fresh.packages)
    if stored.apart != fresh.apart:
        sys.exit(
            f"'{arguments.out}' holds figures of contenders that shared a process, where what spins after its turn "
            f"slows others down: take them again, into another file."
        )
    return stored


def _opened(openers: dict[str, Opener]) -> dict[str, Peer]:
    """Open the installed peers."""
    peers: dict[str, Peer] = {}
    for name, opener in openers.items():
        if name not in (OURS, TUNED, *PEERS):
            sys.exit(f"there is no peer '{name}'. The peers are {', '.join(PEERS)}.")
        try:
            peers[name] = opener()
        except ImportError as error:
            print(f"without {name}: {error}. Install it with pip install '.[peers]'.", file=sys.stderr)
    return peers
