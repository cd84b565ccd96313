"""`python measure.py --out DIR [--minutes N] [case or group ...]` in a bundle: everything that is not in DIR yet.

First the limits of the GPU, then every kernel against float64, several at a time; all of them under compute-sanitizer,
whole models, and a decoder's step beside torch.compile; then the cases. Each in a process of its own with a time limit.
The table comes last. What failed is tried again by the next run, after what is missing.
"""

from __future__ import annotations

import argparse
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from datetime import date
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from ..plan import Case, Plan, read
from ..report import draw, table
from ..results import Results
from ..results import read as read_results
from .isolate import Answer, isolated

RESULTS = "results.json"
_LEAST = 10  # seconds that must be left to start a job
_CHECKED_AT_ONCE = 8


class Job(NamedTuple):
    """run(limit) takes at most `limit` seconds."""

    kind: str
    name: str
    run: Callable[[float], Answer]
    limit: float


def main(folder: Path, arguments: list[str]) -> None:
    """folder is the bundle."""
    parser = argparse.ArgumentParser(prog="measure.py", description=__doc__)
    parser.add_argument("case", nargs="*", help="names, groups or patterns of cases; default: all")
    parser.add_argument("--out", type=Path, required=True, help=f"folder of {RESULTS} and its picture")
    parser.add_argument("--minutes", type=float, default=8.0, help="then no new job is started; default: %(default)s")
    parser.add_argument("--without", nargs="*", default=[], help="peers to leave out, of which flex takes longest")
    parser.add_argument("--list", action="store_true", help="print the cases and stop")
    given = parser.parse_args(arguments)
    plan = read(folder)
    try:
        cases = plan.chosen(given.case)
    except ValueError as error:
        sys.exit(str(error))
    if given.list:
        for case in cases:
            print(f"{case.group:12} {case.name}")
        return
    given.out.mkdir(parents=True, exist_ok=True)
    plan = plan.without(given.without)
    cases = [plan.cases[case.name] for case in cases]
    todo, path = jobs(folder, plan, cases, everything=not given.case), given.out / RESULTS
    measure(plan, device_here(), todo, path, given.minutes * 60)


def device_here() -> str:
    """The name of the first GPU. Exits with what is missing where there is none."""
    try:
        query = ["nvidia-smi", "--query-gpu=name", "--format=csv,noheader"]
        return subprocess.run(query, capture_output=True, text=True, check=True).stdout.splitlines()[0]
    except (OSError, subprocess.CalledProcessError, IndexError):
        sys.exit("There is no GPU here, or no driver for it: nvidia-smi names none. Take the folder to a GPU host.")


def measure(plan: Plan, device: str, todo: Callable[[Results], list[Job]], path: Path, seconds: float) -> None:
    """Does the jobs that `path` does not hold, until `seconds` have passed; prints the table, draws the picture.

    Exits where `path` holds results of other kernels or another device.
    """
    results = read_results(path) if path.exists() else Results(plan.digest, device, date.today().isoformat())
    if (results.bundle, results.device) != (plan.digest, device):
        kept, here = f"kernels {results.bundle} on {results.device}", f"kernels {plan.digest} on {device}"
        sys.exit(f"'{path}' holds results of {kept}, and these are {here}. Name another folder.")
    end = time.monotonic() + seconds
    left = [job for job in todo(results) if not results.has(job.kind, job.name)]
    left.sort(key=lambda job: job.name in results.found[job.kind])  # stable: what failed comes last
    checks = [job for job in left if job.kind == "checks"] if seconds >= _LEAST else []
    with ThreadPoolExecutor(_CHECKED_AT_ONCE) as pool:
        for job, answer in zip(checks, pool.map(lambda job: job.run(min(job.limit, seconds)), checks)):
            print(f"{job.kind}: {job.name}: {_why(answer) or 'done'}", flush=True)
            results.found[job.kind][job.name] = _entry(answer)
            results.write(path)
    left = [job for job in left if job not in checks]
    for k, job in enumerate(left, 1):
        remaining = end - time.monotonic()
        if remaining < _LEAST:
            print(f"time is up, {len(left) - k + 1} of {len(left)} jobs are left: run the same command again.")
            break
        start = time.monotonic()
        answer = job.run(min(job.limit, remaining))
        took = time.monotonic() - start
        print(f"[{k}/{len(left)}] {job.kind}: {job.name}: {_why(answer) or 'done'}, {took:.1f} s", flush=True)
        if answer.late and remaining < job.limit:
            continue  # it had less than its time
        results.found[job.kind][job.name] = _entry(answer)
        results.write(path)
    print(table(plan, results))
    draw(plan, results, path.with_suffix(".png"))


def jobs(folder: Path, plan: Plan, cases: list[Case], *, everything: bool) -> Callable[[Results], list[Job]]:
    """What there is to do for these cases, in this order; everything adds kernels of no case, and models."""
    wanted = {name: None for case in cases for name in case.kernels} | (plan.kernels if everything else {})

    def todo(results: Results) -> list[Job]:
        found = [Job("limits", "limits", partial(alone, limits), 60)]
        found += [Job("checks", name, partial(alone, check, folder, name), 60) for name in wanted]
        if everything:
            found.append(Job("sanitizer", "memcheck", partial(sanitized, folder), 180))
            found += [Job("models", name, partial(alone, model, folder, name), 60) for name in plan.models]
            found += [Job("steps", name, partial(alone, step, folder, name), 180) for name in plan.steps]
        return found + [Job("cases", case.name, partial(timed, folder, plan, case, results), 120) for case in cases]

    return todo


def alone(function: Callable[..., Any], *arguments: Any) -> Answer:
    """The last argument is the limit."""
    return isolated(function, *arguments[:-1], limit=arguments[-1], preload=("torch",))


def timed(folder: Path, plan: Plan, case: Case, results: Results, limit: float) -> Answer:
    """The case, again and again without the contender that ended the process or hung."""
    end = time.monotonic() + limit
    without: dict[str, str] = {}
    for name in case.kernels:
        if not results.has("checks", name):
            entry = results.found["checks"].get(name, {"problem": "not checked"})
            without[plan.kernels[name].contender] = entry["problem"]
    contenders = {plan.kernels[name].contender for name in case.kernels} | set(case.peers)
    while True:
        remaining = end - time.monotonic()
        answer = alone(contest, folder, case.name, without, min(remaining, limit / 2))
        if not answer.problem or answer.doing not in contenders - set(without) or remaining < limit / 4:
            return answer
        without[answer.doing] = answer.problem


def sanitized(folder: Path, limit: float) -> Answer:
    """All kernels at their smallest size under compute-sanitizer's memcheck, where the tool is."""
    tool = shutil.which("compute-sanitizer") or shutil.which("compute-sanitizer", path="/usr/local/cuda/bin")
    if tool is None:
        return Answer(result={"note": "compute-sanitizer is not installed"})
    code = "import sys; from benchmarks.gpu.host.check import smallest_of_all; smallest_of_all(sys.argv[1])"
    command = [tool, "--tool", "memcheck", "--error-exitcode", "9", sys.executable, "-c", code, str(folder)]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(entry for entry in sys.path if entry)}
    process = subprocess.Popen(
        command, env=environment, start_new_session=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    )
    try:
        said, _ = process.communicate(timeout=limit)
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)  # the tool's own process, and the one it watches
        said, _ = process.communicate()
        return Answer(problem=f"no answer in {limit:.0f} s: {said[-300:]}", late=True)
    if process.returncode != 0:
        return Answer(problem=f"exit status {process.returncode}: {said[-3000:]}")
    return Answer(result={"note": said.strip().splitlines()[-1]})


def _entry(answer: Answer) -> Any:
    return answer.result if not answer.problem else {"problem": _why(answer)}


def _why(answer: Answer) -> str:
    """What went wrong, and where; "" if nothing did."""
    return f"{answer.doing}: {answer.problem}" if answer.problem and answer.doing else answer.problem


# -- what runs in processes of its own, with imports that not everybody needs ---------------------------------------


def limits(say: Callable[[str], None]) -> dict[str, Any]:
    from .limits import limits

    return limits(say)


def check(folder: Path, name: str, say: Callable[[str], None]) -> dict[str, Any]:
    from .check import check

    return check(folder, name, say)


def contest(folder: Path, name: str, without: dict[str, str], say: Callable[[str], None]) -> dict[str, Any]:
    from .contest import contest

    return contest(folder, name, without, say)


def step(folder: Path, name: str, say: Callable[[str], None]) -> dict[str, Any]:
    """A step of a decoder for one sequence, beside torch.compile."""
    from lowering.runtime.gpu import load_device_runtime
    from lowering.runtime.library import load_runtime

    from .decoding import decoding

    load_runtime(folder)
    load_device_runtime(folder)
    return decoding(folder / "steps" / name, 1, say)


def model(folder: Path, name: str, say: Callable[[str], None]) -> dict[str, Any]:
    """A whole artifact on the GPU: its calls, one after the other, against what they should give."""
    import lowering
    from lowering.runtime.gpu import load_device_runtime
    from lowering.runtime.library import load_runtime

    load_runtime(folder)
    load_device_runtime(folder)
    say("loading")
    place = folder / "models" / name
    module, errors = lowering.load(place / "artifact"), []
    for path in sorted(place.glob("call-*.npz")):
        say(path.stem)
        arrays = dict(np.load(path))
        outputs = module.run({key[3:]: array for key, array in arrays.items() if key.startswith("in.")})
        for key, right in arrays.items():
            if key.startswith("out."):
                difference = np.abs(outputs[key[4:]].astype(np.float64) - right).max() / np.ptp(right)
                errors.append(float(difference))
    if not max(errors) <= float(arrays["tolerance"]):
        raise ValueError(f"wrong: error {max(errors):.2g}, and {float(arrays['tolerance']):.2g} is right")
    return {"error": max(errors)}
