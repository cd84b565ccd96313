"""One attack, in a process of its own: drawn, compiled, called on guarded memory, judged.

Every step is told on a descriptor as a line of JSON before it begins, so that a death can be laid to its step.
"""

from __future__ import annotations

import json
import os
import resource
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np

import lowering
from lowering.compiling import compiler, pipeline
from lowering.runtime import library, tensors

from . import generators, plants
from .attack import Case, declare_as, make_case, told
from .draw import Draw
from .guard import Guard
from .oracle import NoOracleError, Verdict, difference, unclear, verdict

# Bytes that an attack may allocate beside the arena.
MEMORY = 3 << 30
# TVM's allocator that gives each tensor memory of its own, and the constant of vm_initialization for it.
_NAIVE = 1
# Of these bytes floats are NaN, or larger than all others; integers are -1 or enormous.
_PATTERNS = (0xFF, 0x7F)

Tell = Callable[..., None]


def attack(domain: str, op: str, seed: int, calls: int, folder: Path, report: int, plant: str | None = None) -> None:
    """Tells, for each call, how it ended: `kind` and `detail` (pool.py lists the kinds). `plant` names a fault that is
    to be found (plants.py)."""

    def tell(**fields: Any) -> None:
        os.write(report, json.dumps(fields).encode() + b"\n")

    with plants.PLANTS[plant][0]() if plant else nullcontext():
        _attack(domain, op, seed, calls, folder, report, tell)


def _attack(domain: str, op: str, seed: int, calls: int, folder: Path, report: int, tell: Tell) -> None:
    draw = Draw(f"{domain}.{op}", seed)
    guard = Guard(at_end=draw.chance(0.6), pattern=draw.pick(_PATTERNS), report=report)
    used = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (used + MEMORY, used + MEMORY))
    case = make_case(draw, generators.generator(domain, op)(draw, op), calls)
    tell(step="judge", what=str(case))
    verdicts = [_judged(case, k, tell) for k in range(len(case.calls))]
    answered = next((v.answer for v in verdicts if v.answer is not None), None)
    if answered is not None:
        declare_as(case.model, answered)
    tell(step="compile", what=str(case))
    planned = draw.chance(0.3)
    try:
        with _exactly(planned):
            compiler.compile_to(folder / "module", case.model, threads=draw.pick((1, 1, 2)))
    except Exception as error:
        # One outcome for all calls: an error is due only if none of them is legal.
        wanted = next((v for v in verdicts if v.legal), verdicts[0])
        tell(**_refusal(error, wanted, case, "compile"), call=verdicts.index(wanted))
        _check_agrees(case, error, tell)
        return
    with mock.patch.object(library, "_POOLED", _NAIVE), guard.watching():
        model = lowering.load(folder / "module")
        _guard_weights(model)
        for k, wanted in enumerate(verdicts):
            tell(step="run", call=k, what=f"{case} on {', '.join(map(told, case.calls[k]))}", reason=wanted.reason)
            tell(**_called(guard, model, case, k, wanted), call=k)


def _judged(case: Case, k: int, tell: Tell) -> Verdict:
    try:
        return verdict(case, case.calls[k])
    except NoOracleError as error:
        tell(kind="no oracle", detail=str(error), call=k)
        return Verdict(None, reason="no oracle")


@contextmanager
def _exactly(planned: bool) -> Iterator[None]:
    """Storage is asked for byte by byte, and unless it is planned each tensor has its own."""
    with mock.patch.object(pipeline, "size_classes", lambda mod: mod):
        if planned:
            yield
            return
        with mock.patch.object(pipeline, "plan_memory", lambda mod: mod):
            yield


def _guard_weights(model: Any) -> None:
    """Copies the weights out of their file, where they lie side by side."""
    weights = model._weights
    if weights.argument:
        copies = [tensors.copy_tensor(tensor) for tensor in weights.argument[0]]
        weights.argument = (library.tvm_ffi.convert(copies),)


def _called(guard: Guard, model: Any, case: Case, k: int, wanted: Verdict) -> dict[str, Any]:
    feeds = {name: guard.array(a, f"input {name}") for name, a in case.feeds(case.calls[k]).items()}
    try:
        results = model.run(feeds)
    except Exception as error:
        return _refusal(error, wanted, case, "run")
    damage = guard.damage()
    if damage is not None:
        return {"kind": "outside", "detail": damage}
    for name, given in case.feeds(case.calls[k]).items():
        if feeds[name].tobytes() != given.tobytes():
            return {"kind": "outside", "detail": f"input {name} was written to"}
    if wanted.legal is None:
        return {"kind": "unspecified", "detail": wanted.reason}
    if wanted.answer is None:
        shapes = ", ".join(f"{np.shape(r)}" for r in results.values())
        return {"kind": "accepted", "detail": f"{wanted.reason}: no error, but outputs {shapes}"}
    wrong = difference([np.asarray(results[o.name]) for o in model.outputs], wanted.answer, case.attack.close)
    return {"kind": "wrong", "detail": wrong} if wrong else {"kind": "right", "detail": ""}


def _refusal(error: Exception, wanted: Verdict, case: Case, step: str) -> dict[str, Any]:
    message = str(error)
    if not isinstance(error, lowering.LoweringError):
        first = next((line for line in message.splitlines() if line.strip()), "")
        return {"kind": "raw", "detail": f"at {step}: {type(error).__name__}: {first[:300]}"}
    outputs = [output.name for output in case.model.graph.output]
    complaint = unclear(message, [f".{case.attack.op}-", *(f"'{n}'" for n in (*case.names, *outputs) if n)])
    if complaint:
        return {"kind": "unclear", "detail": f"at {step}: {complaint}: {message[:400]}"}
    if wanted.legal:
        return {"kind": "limitation" if wanted.may_refuse(error) else "refused", "detail": f"at {step}: {message}"}
    return {"kind": f"refused at {step}", "detail": message}


def _check_agrees(case: Case, error: Exception, tell: Tell) -> None:
    """What cannot be compiled must not pass `check`."""
    try:
        if lowering.check(case.model).ok and isinstance(error, lowering.LoweringError):
            tell(kind="check says ok", detail=f"but: {str(error)[:300]}", call=0)
    except lowering.LoweringError:
        pass
    except Exception as other:
        tell(kind="raw", detail=f"at check: {type(other).__name__}: {str(other)[:300]}", call=0)
