"""One case at its full size: every contender is checked against float64, then those that are right take turns."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

from ..plan import Kernel, read
from .card import Card, card
from .check import OPERATIONS, function_of
from .memory import Torch
from .peers import Peer, makers_of
from .timing import interleaved

Arrays = dict[str, Any]

_SETS = 3  # of inputs at least, and so many that ...
_CACHES = 4  # ... all of them are so many times the second-level cache


def contest(
    folder: Path, name: str, peers: tuple[str, ...], without: Mapping[str, str], say: Callable[[str], None]
) -> dict[str, Any]:
    """{contender: {"error", and "timing" or "problem"}}, tells `say` whose turn it is.

    without names contenders to leave out, and why; peers are those that take part.
    """
    plan = read(folder)
    case = replace(plan.cases[name], peers=peers)
    kernels = [plan.kernels[kernel] for kernel in case.kernels]
    gpu = card()
    problem, operation, memory = kernels[0].record, OPERATIONS[kernels[0].operation], gpu.memory(seed=0)
    sets = [operation.draw(problem, case.sizes, memory, poison=False)]
    makers: dict[str, Peer] = {kernel.contender: partial(_ours, folder, kernel, memory) for kernel in kernels}
    makers |= makers_of(case.peers, problem, memory, {peer: folder / path for peer, path in plan.peers.items()})
    results: dict[str, Any] = {contender: {"problem": why} for contender, why in without.items()}
    right = operation.expected(problem, sets[0], memory)
    result = kernels[0].result
    untouched = memory.copy(sets[0][result])
    calls: dict[str, list[Callable[[], object]]] = {}
    for contender, make in makers.items():
        if contender in without:
            continue
        say(contender)
        sets[0][result][...] = untouched
        try:
            call: Callable[[], Any] = make(sets[0])
            error = operation.error(call(), right, memory)
            gpu.synchronize()
        except Exception as refusal:  # libraries refuse in every way there is
            if contender not in case.peers or "CUDA error" in str(refusal):
                raise  # what comes later in this process cannot be trusted
            results[contender] = {"problem": _first_line(refusal)}
            continue
        results[contender] = {"error": error}
        if error <= kernels[0].tolerance:
            calls[contender] = [call]
        else:
            results[contender]["problem"] = "wrong"
    del right, untouched
    sets += [operation.draw(problem, case.sizes, memory, poison=False) for _ in range(_count(sets[0], gpu) - 1)]
    for contender in calls:
        say(contender)
        calls[contender] += [makers[contender](arrays) for arrays in sets[1:]]
        for warm_up in calls[contender][1:]:
            warm_up()
        gpu.synchronize()
    say("timing")
    for contender, timing in interleaved(calls, gpu).items():
        results[contender]["timing"] = dataclasses.asdict(timing)
    return results


def _ours(folder: Path, kernel: Kernel, memory: Torch, arrays: Arrays) -> Callable[[], Any]:
    bound = memory.bound(function_of(folder, kernel), [arrays[name] for name in kernel.parameters])

    def call() -> Any:
        bound()
        return arrays[kernel.result]

    return call


def _count(arrays: Arrays, gpu: Card) -> int:
    """How many input sets to rotate through."""
    size = sum(array.nbytes for array in arrays.values())
    return max(_SETS, math.ceil(_CACHES * gpu.l2 / size))


def _first_line(error: Exception) -> str:
    lines = str(error).strip().splitlines() or [""]
    return f"{type(error).__name__}: {lines[0][:200]}"
