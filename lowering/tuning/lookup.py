"""What databases say of the functions of a model that is compiled: a `choose` for schedules.

A record applies to a function that, at the record's sizes, is the record's own. So what was tuned for one model serves
every model with the same kernel, and a function of symbolic sizes finds the records of all sizes that it was tuned
for. Between them the nearest one counts, by ratios: the function asks for its sizes when it runs.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path

import tvm
from tvm import tirx
from tvm.s_tir import meta_schedule as ms
from tvm_ffi import structural_equal

import schedules
from schedules.variant import BySize, Choice, Size, Variant

from ..target import Target
from .architecture import architecture
from .database import best
from .space import recorded
from .task import KERNEL, NotTunable, at_sizes, has_kernel, shapes_of, versions, versions_of


@dataclass(frozen=True)
class _Record:
    """What is settled for a task: the choice as JSON, and how many times faster than the default it is."""

    task: tvm.IRModule
    shapes: tuple[tuple[int, ...] | int, ...]
    choice: str
    gain: float
    source: str


class Records:
    """What is settled for an architecture. `choose` is for `schedules.apply`."""

    def __init__(self, databases: Sequence[tuple[str, Path]], target: Target) -> None:
        """databases are folders, each with how its records are called; the first that knows a function counts."""
        self._target = target.tvm
        name = architecture(target).name
        self._sources = [_settled(best(folder / name), source) for source, folder in databases]

    def choose(self, func: tirx.PrimFunc, variants: Sequence[Variant]) -> Choice | BySize | None:
        """The choice for a function's sizes, or one by size for symbolic ones; None where nothing is known."""
        for records in self._sources:
            found = [(record, choice) for record in records if (choice := self._choice(func, variants, record))]
            if found:
                free = _sizes(func)
                points = {tuple(_value(record.shapes, size) for size in free): choice for record, choice in found}
                return by_size(free, points)
        return None

    def _choice(self, func: tirx.PrimFunc, variants: Sequence[Variant], record: _Record) -> Choice | None:
        """The record's choice, if it is one of this function."""
        if not _fits(func, record.shapes):
            return None
        try:
            kernel = at_sizes(func, record.shapes)
        except (NotTunable, ValueError):
            return None
        if not structural_equal(kernel.with_attr("global_symbol", KERNEL), record.task[KERNEL], True):
            return None
        answer = schedules.variants(kernel, self._target)
        if answer is None or versions(answer[1]) != versions_of(record.task):
            return None
        for variant in variants:
            try:
                choice = variant.read(record.choice)
            except ValueError:
                continue
            if choice.variant == variant.name and all(
                tiles.is_legal(variant.problem, variant.machine) for tiles in choice.tiles.values()
            ):
                return dataclasses.replace(choice, source=f"{record.source} {record.gain:.2f}x")
        return None


def by_size(sizes: Sequence[Size], points: dict[tuple[int, ...], Choice]) -> Choice | BySize:
    """A choice for all sizes from those for some: they are parted where two that follow each other are farthest apart,
    at their geometric mean, and so on.
    """
    first = next(iter(points.values()))
    if all(choice.to_json() == first.to_json() for choice in points.values()):
        return first
    gaps = []
    for axis in range(len(sizes)):
        values = sorted({point[axis] for point in points})
        gaps += [((high + 1) / (low + 1), axis, low, high) for low, high in pairwise(values)]
    _, axis, low, high = max(gaps)
    most = max(low, math.isqrt(low * high))
    small = {point: choice for point, choice in points.items() if point[axis] <= most}
    large = {point: choice for point, choice in points.items() if point[axis] > most}
    return BySize(sizes[axis], most, by_size(sizes, small), by_size(sizes, large))


def _settled(records: Iterable[ms.database.TuningRecord], source: str) -> list[_Record]:
    """The fastest of each task; its default is the slowest, or the only one."""
    found: dict[ms.database.Workload, list[tuple[float, str]]] = {}
    for record in records:
        choice = recorded(record.trace)
        if choice is not None and record.run_secs and has_kernel(record.workload.mod):
            found.setdefault(record.workload, []).append((float(record.run_secs[0]), choice))
    settled = []
    for workload, ends in found.items():
        seconds, choice = min(ends)
        settled.append(_Record(workload.mod, shapes_of(workload.mod), choice, max(ends)[0] / seconds, source))
    return settled


def _fits(func: tirx.PrimFunc, shapes: Sequence[tuple[int, ...] | int]) -> bool:
    """Whether arguments of such shapes could be the function's: a quick look."""
    if len(func.params) != len(shapes):
        return False
    for parameter, shape in zip(func.params, shapes):
        if isinstance(shape, int) == tirx.is_buffer_var(parameter):
            return False
        if isinstance(shape, tuple) and (
            len(parameter.shape) != len(shape)
            or any(isinstance(dim, tirx.IntImm) and dim.value != n for dim, n in zip(parameter.shape, shape))
        ):
            return False
    return True


def _sizes(func: tirx.PrimFunc) -> list[Size]:
    """The sizes that only a run tells."""
    found: dict[tirx.Var, Size] = {}
    for number, parameter in enumerate(func.params):
        if not tirx.is_buffer_var(parameter):
            found.setdefault(parameter, Size(number, None))
            continue
        for axis, dim in enumerate(parameter.shape):
            if isinstance(dim, tirx.Var):
                found.setdefault(dim, Size(number, axis))
    return list(found.values())


def _value(shapes: Sequence[tuple[int, ...] | int], size: Size) -> int:
    shape = shapes[size.parameter]
    return shape if isinstance(shape, int) else shape[size.axis or 0]
