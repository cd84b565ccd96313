"""Attacks from outside: zygotes that carry them out, and the outcome of each call."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterable, Iterator
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from . import guard

ROOT = Path(__file__).parents[2]

# How a call may end, and be in order.
FINE = ("right", "refused at compile", "refused at run", "limitation", "unspecified")
# How it must not: died, was endless, touched foreign memory, gave another answer, gave one where an error is due,
# raised something other than a LoweringError, one that says nothing to a user, or one where an answer is due; `check`
# knew nothing of what compile refuses; the attack itself knows no answer, or failed.
FINDINGS = (
    "crash", "hang", "outside", "wrong", "accepted", "raw", "unclear", "refused", "check says ok", "no oracle",
    "failed",
)  # fmt: skip

_SECONDS = 40


@dataclass(frozen=True)
class Outcome:
    """How one call of one attack ended. `what` describes the attack, `detail` the end."""

    domain: str
    op: str
    seed: int
    call: int
    kind: str
    detail: str
    what: str

    @property
    def name(self) -> str:
        return f"{self.domain}.{self.op}" if self.domain else self.op

    def __str__(self) -> str:
        return f"{self.kind}: {self.name} --seed {self.seed}, call {self.call}\n    {self.detail}\n    {self.what}"


class Zygote:
    """A process that carries out attacks, one at a time; started again when it dies."""

    def __init__(self) -> None:
        self._folder = tempfile.TemporaryDirectory(prefix="attacks-")
        self._library = guard.build(Path(self._folder.name))
        self._process = self._start()

    def _start(self) -> subprocess.Popen[str]:
        paths = [str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])]
        environment = {
            **os.environ,
            "LD_PRELOAD": str(self._library),
            "PYTHONPATH": os.pathsep.join(paths),
            "PYTHONHASHSEED": "0",
        }
        process = subprocess.Popen(
            [sys.executable, "-m", "tests.attacks.zygote"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
            cwd=ROOT,
            env=environment,
        )
        assert process.stdout is not None
        if process.stdout.readline().strip() != "ready":
            raise RuntimeError("a process for attacks did not start")
        return process

    def attack(
        self, domain: str, op: str, seed: int, calls: int = 1, plant: str | None = None, seconds: float = _SECONDS
    ) -> list[Outcome]:
        """Return how each call ended, or was prevented; after `seconds` the attack is over."""
        request = {"domain": domain, "op": op, "seed": seed, "calls": calls, "plant": plant, "seconds": seconds}
        stdin, stdout = self._process.stdin, self._process.stdout
        assert stdin is not None and stdout is not None
        stdin.write(json.dumps(request) + "\n")
        stdin.flush()
        answer = stdout.readline()
        if not answer:
            raise RuntimeError("the process for attacks died")
        return outcomes(domain, op, seed, **json.loads(answer))

    def close(self) -> None:
        assert self._process.stdin is not None
        self._process.stdin.close()
        self._process.wait(60)
        self._folder.cleanup()

    def __enter__(self) -> Zygote:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def outcomes(domain: str, op: str, seed: int, told: str, ended: int, late: bool) -> list[Outcome]:
    """Return the outcomes of an attack from the report of its process and how it ended."""
    step: dict[str, Any] = {"step": "draw", "what": ""}
    result: list[Outcome] = []

    def add(kind: str, detail: str, call: int) -> None:
        result.append(Outcome(domain, op, seed, call, kind, " ".join(detail.split()), " ".join(step["what"].split())))

    rest = []
    for line in told.splitlines():
        if not line.startswith("{"):
            rest.append(line)
            continue
        fields = json.loads(line)
        if "step" in fields:
            step = fields
        elif "kind" in fields:
            add(fields["kind"], fields["detail"], fields["call"])
        else:
            rest.append(fields["failed"])
    call = step.get("call", 0)
    end = f"at {step['step']}: {' '.join(rest)} {step.get('reason', '')}".strip()
    if late:
        add("hang", end, call)
    elif ended == guard.FAULT:
        add("outside", end, call)
    elif ended < 0:
        add("crash", f"{signal.Signals(-ended).name} {end}", call)
    elif ended:
        add("failed", end, call)
    return result


def attack_all(attacks: Iterable[tuple[str, str, int, int]], processes: int) -> Iterator[list[Outcome]]:
    """Yield the outcomes of attacks (domain, op, seed, calls) as they come, with at most `processes` under way."""
    rest = iter(attacks)
    with ExitStack() as stack, ThreadPoolExecutor(processes) as threads:
        zygotes = [stack.enter_context(Zygote()) for _ in range(processes)]
        running: dict[Future[list[Outcome]], Zygote] = {}
        while zygotes or running:
            while zygotes and (attack := next(rest, None)):
                zygote = zygotes.pop()
                running[threads.submit(zygote.attack, *attack)] = zygote
            if not running:
                return
            for future in wait(running, return_when=FIRST_COMPLETED).done:
                zygotes.append(running.pop(future))
                yield future.result()
