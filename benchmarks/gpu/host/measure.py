"""`python measure.py --out DIR [--minutes N] [case or group ...]` in a bundle: all jobs that DIR has no result of.

Each job runs in a process of its own with a time limit, and its result is written at once: a hang or a crash costs
one fact. `jobs` has the order. What failed is tried again by the next run, after what is missing. Results of each GPU
have a file of their own. The table comes last.
"""

from __future__ import annotations

import argparse
import itertools
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor, as_completed
from pathlib import Path
from typing import Any

from ..plan import OPTIONAL_PEERS, Plan, read
from ..report import draw, table
from ..results import Results, Store
from . import sanitizer
from .isolate import Answer
from .jobs import AT_ONCE, Bundle, Job

_LEAST = 10  # seconds that must be left to start a job
_REHEARSAL = "ONNX_LOWERING_REHEARSAL"


def main(folder: Path, arguments: list[str]) -> None:
    """folder is the bundle."""
    parser = argparse.ArgumentParser(prog="measure.py", description=__doc__)
    parser.add_argument("case", nargs="*", help="names, groups or patterns of cases; default: all")
    parser.add_argument("--out", type=Path, required=True, help="folder of the results and their picture")
    parser.add_argument("--copy", type=Path, help="a second folder that gets the results at once, too")
    parser.add_argument("--minutes", type=float, default=8.0, help="then no new job is started; default: %(default)s")
    parser.add_argument("--limit", type=float, default=float("inf"), help="the most seconds of a job")
    parser.add_argument("--with", nargs="*", default=[], dest="requested", help=f"peers that compile: {OPTIONAL_PEERS}")
    parser.add_argument("--without", nargs="*", default=[], help="peers to leave out")
    parser.add_argument("--list", action="store_true", help="print the cases and stop")
    parser.add_argument(
        "--rehearse", action="store_true", help="PyTorch stays on the CPU and times mean nothing: tries every job"
    )
    options = parser.parse_args(arguments)
    plan = read(folder)
    try:
        plan = plan.with_peers(options.requested, options.without)
        cases = plan.chosen(options.case)
    except ValueError as error:
        sys.exit(str(error))
    if options.list:
        for case in cases:
            print(f"{case.group:12} {case.name}")
        return
    if options.rehearse:
        os.environ[_REHEARSAL] = "1"  # inherited by the processes of jobs
    store = Store([options.out, *([options.copy] if options.copy else [])], plan.digest, device_here(options.rehearse))
    bundle = Bundle(folder, plan, tuple(cases), everything=not options.case, requested=tuple(options.requested))
    store.results.found["missing"].clear()
    for what, why in missing_here(plan).items():
        store.add("missing", what, {"note": why})
    measure(plan, bundle.jobs, store, options.minutes * 60, options.limit)


def device_here(rehearsal: bool) -> str:
    """Return the name of the first GPU. Without one, exit with what is missing."""
    if rehearsal:
        return "rehearsal"
    try:
        query = ["nvidia-smi", "--query-gpu=name", "--format=csv,noheader"]
        return subprocess.run(query, capture_output=True, text=True, check=True).stdout.splitlines()[0]
    except (OSError, subprocess.CalledProcessError, IndexError):
        sys.exit("There is no GPU here, or no driver for it: nvidia-smi names none. Take the folder to a GPU host.")


def missing_here(plan: Plan) -> dict[str, str]:
    """Return the parts that are missing, here or in the whole bundle, and why."""
    reasons = dict(plan.missing)
    peers = {peer for case in plan.cases.values() for peer in case.peers}
    reasons |= {peer: "it compiles first: ask for it by --with" for peer in OPTIONAL_PEERS if peer not in peers}
    if sanitizer.find() is None:
        reasons[sanitizer.PROGRAM] = "it is not installed on this host"
    return reasons


def measure(plan: Plan, todo: Callable[[Results], list[Job]], store: Store, seconds: float, limit: float) -> None:
    """Run the jobs without results in the store, until `seconds` have passed, each at most `limit` seconds; print the
    table, draw the picture."""
    results = store.results
    end = time.monotonic() + seconds
    left = [job for job in todo(results) if not results.has(job.kind, job.name)]
    left = [job._replace(limit=min(job.limit, limit)) for job in left]
    left.sort(key=lambda job: job.name in results.found[job.kind])  # stable: what failed comes last
    number = 0
    for kind, group in itertools.groupby(left, key=lambda job: job.kind):
        for job, answer, took, limited in _answers(list(group), AT_ONCE.get(kind, 1), end):
            number += 1
            print(f"[{number}/{len(left)}] {kind}: {job.name}: {_why(answer) or 'done'}, {took:.1f} s", flush=True)
            if not (answer.late and limited):  # it had its time
                store.add(kind, job.name, _entry(answer))
    if number < len(left):
        print(f"time is up, {len(left) - number} of {len(left)} jobs are left: run the same command again.")
    print(table(plan, results))
    draw(plan, results, store.path.with_suffix(".png"))


def _answers(jobs: list[Job], at_once: int, end: float) -> Iterator[tuple[Job, Answer, float, bool]]:
    """Yield the answers of the jobs when they come, so many at a time; jobs that would begin too late are left out.

    Each comes with its seconds, and whether it had less than its limit.
    """

    def run(job: Job) -> tuple[Job, Answer, float, bool] | None:
        start = time.monotonic()
        remaining = end - start
        if remaining < _LEAST:
            return None
        answer = job.run(min(job.limit, remaining))
        return job, answer, time.monotonic() - start, remaining < job.limit

    if at_once == 1:  # not in a thread, so that an interrupt ends the run at once
        yield from filter(None, map(run, jobs))
        return
    with ThreadPoolExecutor(at_once) as pool:
        for future in as_completed([pool.submit(run, job) for job in jobs]):
            outcome = future.result()
            if outcome is not None:
                yield outcome


def _entry(answer: Answer) -> Any:
    return answer.result if not answer.problem else {"problem": _why(answer)}


def _why(answer: Answer) -> str:
    """Return the problem and where it was; "" if there is none."""
    return f"{answer.doing}: {answer.problem}" if answer.problem and answer.doing else answer.problem
