"""`python -m tests.attacks.mutants [--cases N] [--seed N]`: damages models, and a table of how they ended."""

from __future__ import annotations

import argparse
import faulthandler
import json
import os
import random
import resource
import signal
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np

from ..campaign import table_text
from ..zygote import read_until, warm
from .damage import DAMAGES
from .trial import MODEL, TEMPORARY, Arrays, attempt

SAMPLES = Path(__file__).parents[2] / "exports" / "samples"
# How a mutant may end. ONNX Runtime rejects unjudged ones.
FINE = ("refused", "passed", "right", "refused at run", "unjudged")
# How it must not: `check` and `compile` disagree, files other than an artifact stay, ONNX Runtime takes the call.
FINDINGS = ("crash", "hang", "raw", "unclear", "check says ok", "check refuses", "leftover files", "stricter", "wrong")

# Seconds of `check`, and of all steps of a mutant that is compiled; bytes that it may allocate.
_SECONDS, _COMPILED_SECONDS, _MEMORY = 60, 240, 6 << 30


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.attacks.mutants", description=__doc__)
    parser.add_argument("--cases", type=int, default=1500)
    parser.add_argument("--compiled", type=int, default=10, metavar="N", help="one mutant of N is compiled, too (10)")
    parser.add_argument("--first-seed", type=int, default=0, help="where the seeds of --cases begin")
    parser.add_argument("--seed", type=int, help="one mutant, by this number, compiled")
    parser.add_argument("--keep", type=Path, help="a folder for the mutants that must not end as they do")
    options = parser.parse_args()
    warm()
    seeds = (
        [options.seed] if options.seed is not None else range(options.first_seed, options.first_seed + options.cases)
    )
    table: dict[str, Counter[str]] = {}
    for seed in seeds:
        name, sample, data = mutant(seed)
        compiles = options.seed is not None or seed // len(DAMAGES) % options.compiled == 0
        kind, detail, seconds = judged(data, _calls(sample), compiles)
        table.setdefault(name, Counter())[kind] += 1
        if kind in FINDINGS or options.seed is not None:
            print(f"{kind}: --seed {seed}, {name} of {sample.name}, {seconds:.0f} s\n    {detail[:1000]}", flush=True)
            if options.keep:
                options.keep.mkdir(parents=True, exist_ok=True)
                (options.keep / f"{seed}.onnx").write_bytes(data)
    print(table_text(table, (*FINE, *FINDINGS)))
    return int(any(row[kind] for row in table.values() for kind in FINDINGS))


def mutant(seed: int) -> tuple[str, Path, bytes]:
    """Return the damage, the folder of the sample, and the damaged model."""
    rng = random.Random(seed)
    samples, names = sorted(SAMPLES.iterdir()), sorted(DAMAGES)
    name, sample = names[seed % len(names)], rng.choice(samples)
    return name, sample, DAMAGES[name]((sample / MODEL).read_bytes(), rng)


def _calls(sample: Path) -> list[Arrays]:
    calls = []
    for path in sorted(sample.glob("*.npz")):
        with np.load(path) as arrays:
            calls.append({name: arrays[name] for name in arrays if not name.startswith("=")})
    return calls


def judged(data: bytes, calls: list[Arrays], compiles: bool) -> tuple[str, str, float]:
    """Return how a mutant ended in a child of this process: a kind, details, and seconds."""
    start = time.monotonic()
    seconds = _COMPILED_SECONDS if compiles else _SECONDS
    reading, writing = os.pipe()
    with tempfile.TemporaryDirectory(prefix="mutant-") as folder:
        process = os.fork()
        if process == 0:
            os.close(reading)
            _child(Path(folder), data, calls, compiles, seconds, writing)
        os.close(writing)
        told, _ = read_until(reading, start + seconds + 5)
        os.close(reading)
        os.kill(process, signal.SIGKILL)
        status = os.waitstatus_to_exitcode(os.waitpid(process, 0)[1])
    return (*_end(told, status), time.monotonic() - start)


def _end(told: str, status: int) -> tuple[str, str]:
    lines = [line for line in told.splitlines() if line.startswith("[")]
    stack = " ".join(line.strip() for line in told.splitlines() if not line.startswith("["))
    last: list[str] = json.loads(lines[-1]) if lines else ["nothing"]
    if len(last) == 2:
        return last[0], last[1]
    if last == ["reference"]:
        return "unjudged", "onnxruntime dies or takes too long"
    is_hang = "Timeout" in stack or status == -signal.SIGKILL
    return ("hang" if is_hang else "crash"), f"at {last[0]}, exit {status}: {stack}"


def _child(folder: Path, data: bytes, calls: list[Arrays], compiles: bool, seconds: int, report: int) -> None:
    def tell(*fields: Any) -> None:
        os.write(report, json.dumps(fields).encode() + b"\n")

    try:
        os.dup2(os.open(os.devnull, os.O_WRONLY), 2)
        faulthandler.enable(report)
        faulthandler.dump_traceback_later(seconds, exit=True, file=report)
        used = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
        resource.setrlimit(resource.RLIMIT_AS, (used + _MEMORY, used + _MEMORY))
        (folder / MODEL).write_bytes(data)
        (folder / TEMPORARY).mkdir()
        tempfile.tempdir = os.environ["TMPDIR"] = str(folder / TEMPORARY)
        tell(*attempt(folder, calls, compiles, tell))
    finally:
        os._exit(0)


if __name__ == "__main__":
    sys.exit(main())
