"""One attack, in a process of its own: drawn, compiled, called on guarded memory, judged.

Every step is reported on a descriptor as a line of JSON before it begins, so that a death is assigned to its step.
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
from lowering.compiling import compiler
from lowering.runtime import library
from lowering.runtime.arrays import tensors
from tests.support.pass_states import leave_out

from . import generators, plants
from .attack import Case, declare_as, describe_array, make_case
from .draw import Draw
from .guard import Guard
from .oracle import NoOracleError, Verdict, difference, judge_call, unclear

# Bytes that an attack may allocate next to the arena.
MEMORY = 3 << 30
# TVM's allocator that gives each tensor memory of its own, and the constant of vm_initialization for it.
_NAIVE = 1
# Floats of these bytes are NaN, or larger than all others; integers are -1 or enormous.
_PATTERNS = (0xFF, 0x7F)

Tell = Callable[..., None]


def attack(domain: str, op: str, seed: int, calls: int, folder: Path, report: int, plant: str | None = None) -> None:
    """Report for each call how it ended: `kind` and `detail` (pool.py lists the kinds).

    `plant` names a fault that the attack must find (plants.py).
    """

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
    verdicts = [_judge_call(case, k, tell) for k in range(len(case.calls))]
    answered = next((v.answer for v in verdicts if v.answer is not None), None)
    if answered is not None:
        declare_as(case.model, answered)
    tell(step="compile", what=str(case))
    planned = draw.chance(0.3)
    try:
        with _allocate_exactly(planned):
            compiler.compile_to(folder / "module", case.model, threads=draw.pick((1, 1, 2)))
    except Exception as error:
        # One outcome for all calls: an error is due only if none of them is legal.
        verdict = next((v for v in verdicts if v.legal), verdicts[0])
        tell(**_classify_error(error, verdict, case, "compile"), call=verdicts.index(verdict))
        _check_agrees(case, error, tell)
        return
    with mock.patch.object(library, "_POOLED", _NAIVE), guard.watching():
        model = lowering.load(folder / "module")
        _guard_weights(model)
        for k, verdict in enumerate(verdicts):
            tell(
                step="run",
                call=k,
                what=f"{case} on {', '.join(map(describe_array, case.calls[k]))}",
                reason=verdict.reason,
            )
            tell(**_call_model(guard, model, case, k, verdict), call=k)


def _judge_call(case: Case, k: int, tell: Tell) -> Verdict:
    try:
        return judge_call(case, case.calls[k])
    except NoOracleError as error:
        tell(kind="no oracle", detail=str(error), call=k)
        return Verdict(None, reason="no oracle")


@contextmanager
def _allocate_exactly(planned: bool) -> Iterator[None]:
    """Allocate exact sizes, and unless memory is planned, each tensor for itself."""
    with leave_out("size_classes", *(() if planned else ("plan_memory",))):
        yield


def _guard_weights(model: Any) -> None:
    """Copy the weights out of their file, where they are adjacent."""
    weights = model._weights
    if weights.argument:
        copies = [tensors.copy_tensor(tensor) for tensor in weights.argument[0]]
        weights.argument = (library.tvm_ffi.convert(copies),)


def _call_model(guard: Guard, model: Any, case: Case, k: int, verdict: Verdict) -> dict[str, Any]:
    feeds = {name: guard.array(a, f"input {name}") for name, a in case.feeds(case.calls[k]).items()}
    try:
        results = model.run(feeds)
    except Exception as error:
        return _classify_error(error, verdict, case, "run")
    damage = guard.damage()
    if damage is not None:
        return {"kind": "outside", "detail": damage}
    for name, original in case.feeds(case.calls[k]).items():
        if feeds[name].tobytes() != original.tobytes():
            return {"kind": "outside", "detail": f"input {name} was written to"}
    if verdict.legal is None:
        return {"kind": "unspecified", "detail": verdict.reason}
    if verdict.answer is None:
        shapes = ", ".join(f"{np.shape(r)}" for r in results.values())
        return {"kind": "accepted", "detail": f"{verdict.reason}: no error, but outputs {shapes}"}
    wrong = difference([np.asarray(results[o.name]) for o in model.outputs], verdict.answer, case.attack.close)
    return {"kind": "wrong", "detail": wrong} if wrong else {"kind": "right", "detail": ""}


def _classify_error(error: Exception, verdict: Verdict, case: Case, step: str) -> dict[str, Any]:
    message = str(error)
    if not isinstance(error, lowering.LoweringError):
        first = next((line for line in message.splitlines() if line.strip()), "")
        return {"kind": "raw", "detail": f"at {step}: {type(error).__name__}: {first[:300]}"}
    values = (name for name in (*case.names, *(output.name for output in case.model.graph.output)) if name)
    node = f".{case.attack.op}-", f"{case.attack.op} 'node'"  # with and without its version
    complaint = unclear(message, [*node, *(f"'{name}'" for name in values)])
    if complaint:
        return {"kind": "unclear", "detail": f"at {step}: {complaint}: {message[:400]}"}
    if verdict.legal:
        return {"kind": "limitation" if verdict.may_refuse(error) else "refused", "detail": f"at {step}: {message}"}
    return {"kind": f"refused at {step}", "detail": message}


def _check_agrees(case: Case, error: Exception, tell: Tell) -> None:
    """Report a model that passes `check` and cannot be compiled."""
    try:
        if lowering.check(case.model).ok and isinstance(error, lowering.LoweringError):
            tell(kind="check says ok", detail=f"but: {str(error)[:300]}", call=0)
    except lowering.LoweringError:
        pass
    except Exception as failure:
        tell(kind="raw", detail=f"at check: {type(failure).__name__}: {str(failure)[:300]}", call=0)
