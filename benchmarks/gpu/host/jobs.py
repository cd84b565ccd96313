"""The jobs of a bundle, in order: new facts come first, and repeated measurements last."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

from ..plan import LIMITS, Case, Plan, Program
from ..results import Results
from . import sanitizer
from .isolate import Answer, isolated

LAST = "prefill"
"""The group of cases that come last."""

AT_ONCE = {"checks": 8, "sanitizer": 4}
"""How many jobs of a kind may run at the same time: those that time nothing."""

_PROGRAM_KINDS = {
    **{"model": "models", "weights": "weights", "experts": "experts", "flex": "flex"},
    **{"decoder": "decoders", "batcher": "decoders"},
}


class Job(NamedTuple):
    """run(limit) takes at most `limit` seconds."""

    kind: str
    name: str
    run: Callable[[float], Answer]
    limit: float


@dataclass(frozen=True)
class Bundle:
    """A plan and its folder; everything adds kernels of no case, programs and the sanitizer to the cases."""

    folder: Path
    plan: Plan
    cases: tuple[Case, ...]
    everything: bool
    requested: tuple[str, ...] = ()
    """Optional peers that take part."""

    def jobs(self, results: Results) -> list[Job]:
        """All jobs, done or not; the results of checks decide, when a case is run, what is timed."""
        cases, timed_job = self.cases, partial(self._case_job, results)
        reads = [case for case in cases if case.group == LIMITS]
        sweeps = [case for case in cases if self.plan.has_variants(case) and case not in reads]
        last = [case for case in cases if case.group == LAST and case not in sweeps]
        rest = [case for case in cases if case not in (*reads, *sweeps, *last)]
        jobs = [
            Job("limits", "about", partial(run_isolated, about), 60),
            Job("limits", "copy", partial(run_isolated, copy), 60),
            Job("limits", "matmul", partial(run_isolated, matmul), 60),
            *self._checks(reads),
            *map(timed_job, reads),
            *self._checks(sweeps),
            *self._checks([*rest, *last]),
        ]
        if self.everything:
            jobs += self._check_jobs(self.plan.kernels)
            jobs += [*self._programs("model"), *self._steps()]
        jobs += map(timed_job, sweeps)
        if self.everything:
            jobs += [*self._programs("weights"), *self._programs("experts"), *self._programs("flex")]
            jobs += [*self._programs("decoder"), *self._programs("batcher"), *self._sanitizer()]
        jobs += [*map(timed_job, rest), *map(timed_job, last)]
        return list({(job.kind, job.name): job for job in jobs}.values())

    def _checks(self, cases: Iterable[Case]) -> list[Job]:
        return self._check_jobs(name for case in cases for name in case.kernels)

    def _check_jobs(self, names: Iterable[str]) -> list[Job]:
        return [Job("checks", name, partial(run_isolated, check, self.folder, name), 60) for name in names]

    def _case_job(self, results: Results, case: Case) -> Job:
        return Job("cases", case.name, partial(timed, self.folder, self.plan, case, results), 120)

    def _programs(self, kind: str) -> list[Job]:
        programs = [program for program in self.plan.programs.values() if program.kind == kind]
        return [
            Job(
                _PROGRAM_KINDS[kind],
                p.name,
                partial(run_isolated, measure_program, self.folder, p, "flex" in self.requested),
                90,
            )
            for p in programs
        ]

    def _steps(self) -> list[Job]:
        jobs = []
        for program in self.plan.programs.values():
            if program.kind == "step":
                facts = {
                    "tokens": compare_tokens,
                    "time": partial(time_step, "compiled" in self.requested),
                    "profile": profile_step,
                }
                program_folder = self.folder / program.folder
                jobs += [
                    Job("steps", f"{program.name} {fact}", partial(run_isolated, function, program_folder), 120)
                    for fact, function in facts.items()
                ]
        return jobs

    def _sanitizer(self) -> list[Job]:
        """None where the tool is missing, which the results say."""
        if sanitizer.find() is None:
            return []
        return [
            Job("sanitizer", f"{tool} {name}", partial(sanitizer.look, tool, self.folder, name), 90)
            for tool in sanitizer.TOOLS
            for name in self.plan.sanitized
        ]


def run_isolated(function: Callable[..., Any], *arguments: Any) -> Answer:
    """Run the function in a process of its own; the last argument is the limit."""
    return isolated(function, *arguments[:-1], limit=arguments[-1], preload=("torch",))


def timed(folder: Path, plan: Plan, case: Case, results: Results, limit: float) -> Answer:
    """Measure the case, again and again without the contender that ended the process or hung."""
    end = time.monotonic() + limit
    without: dict[str, str] = {}
    for name in case.kernels:
        if not results.has("checks", name):
            entry = results.found["checks"].get(name, {"problem": "not checked"})
            without[plan.kernels[name].contender] = entry["problem"]
    contenders = {plan.kernels[name].contender for name in case.kernels} | set(case.peers)
    while True:
        remaining = end - time.monotonic()
        answer = run_isolated(contest, folder, case.name, case.peers, without, min(remaining, limit / 2))
        if not answer.problem or answer.doing not in contenders - set(without) or remaining < limit / 4:
            return answer
        without[answer.doing] = answer.problem


# -- what runs in processes of its own, with imports that not everybody needs ---------------------------------------


def about(say: Callable[[str], None]) -> dict[str, Any]:
    from . import limits

    return limits.about(say)


def copy(say: Callable[[str], None]) -> dict[str, Any]:
    from . import limits

    return limits.copy(say)


def matmul(say: Callable[[str], None]) -> dict[str, Any]:
    from . import limits

    return limits.matmul(say)


def check(folder: Path, name: str, say: Callable[[str], None]) -> dict[str, Any]:
    from .check import check

    return check(folder, name, say)


def contest(
    folder: Path, name: str, peers: tuple[str, ...], without: dict[str, str], say: Callable[[str], None]
) -> dict[str, Any]:
    from .contest import contest

    return contest(folder, name, peers, without, say)


def measure_program(folder: Path, program: Program, compiled: bool, say: Callable[[str], None]) -> dict[str, Any]:
    """A whole artifact, as its kind says."""
    from . import programs
    from .experts import time_experts
    from .flex import time_flex

    load_runtimes(folder)
    functions = {
        "model": programs.compare_calls,
        "weights": programs.time_weights,
        "experts": time_experts,
        "flex": partial(time_flex, compiled=compiled),
        "decoder": programs.time_decoder,
        "batcher": programs.time_batcher,
    }
    return functions[program.kind](folder, program, say=say)


def compare_tokens(folder: Path, say: Callable[[str], None]) -> dict[str, Any]:
    from . import decoding

    load_runtimes(folder.parents[1])
    return decoding.compare_tokens(folder, say)


def time_step(compiled: bool, folder: Path, say: Callable[[str], None]) -> dict[str, Any]:
    from . import decoding

    load_runtimes(folder.parents[1])
    return decoding.time_step(folder, compiled, say)


def profile_step(folder: Path, say: Callable[[str], None]) -> dict[str, Any]:
    from . import decoding

    load_runtimes(folder.parents[1])
    return decoding.profile_step(folder, say)


def load_runtimes(folder: Path) -> None:
    """TVM's libraries of the bundle, before anything looks for others."""
    from lowering.runtime.gpu import load_device_runtime
    from lowering.runtime.library import load_runtime

    load_runtime(folder)
    load_device_runtime(folder)
