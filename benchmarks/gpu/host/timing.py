"""Timing: the GPU's clock around whole rotations through the input sets, contenders taking turns."""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from .card import Call, Card

SECONDS = 0.01


@dataclass(frozen=True)
class Timing:
    """Seconds per call over the turns: median, smallest, largest. graph says that a CUDA graph made the calls, so that
    kernels follow each other without the host; without one the host's part counts where it is the longer."""

    median: float
    low: float
    high: float
    graph: bool

    @staticmethod
    def over(times: Sequence[float], *, graph: bool) -> Timing:
        return Timing(statistics.median(times), min(times), max(times), graph)


def interleaved(contenders: Mapping[str, Sequence[Call]], card: Card) -> dict[str, Timing]:
    """Time every contender in every turn; a turn repeats its rotation for about SECONDS."""
    rotations = {name: card.rotation(calls) for name, calls in contenders.items()}
    repeats = {name: max(1, math.ceil(SECONDS / card.seconds(run, 1))) for name, (run, _) in rotations.items()}
    times: dict[str, list[float]] = {name: [] for name in rotations}
    for _ in range(card.turns):
        for name, (run, _) in rotations.items():
            times[name].append(card.seconds(run, repeats[name]) / len(contenders[name]))
    return {name: Timing.over(values, graph=rotations[name][1]) for name, values in times.items()}


def repeated(call: Call, card: Card) -> Timing:
    """A call that launches a graph of its own."""
    call()
    repeat = max(1, math.ceil(SECONDS / card.seconds(call, 1)))
    return Timing.over([card.seconds(call, repeat) for _ in range(card.turns)], graph=True)
