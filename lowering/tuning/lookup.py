"""What databases say of the functions of a model that is compiled: a `choose` for schedules.

A record applies to a function that, at the record's sizes, is the record's own. So what was tuned for one model serves
every model with the same kernel, and a function of symbolic sizes finds the records of all sizes that it was tuned
for. Between them the nearest one counts, by ratios: the function asks for its sizes when it runs.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path

import tvm
from tvm import tirx
from tvm.s_tir import Schedule, Trace
from tvm.s_tir import meta_schedule as ms
from tvm_ffi import structural_equal

import schedules
from schedules.variant import BySize, Choice, Code, Size, Variant

from ..target import Target
from .architecture import architecture
from .choices import DEFAULT, recorded
from .database import best, parts_for, parts_like
from .loop_space import code
from .task import KERNEL, NotTunable, at_sizes, has_kernel, is_loops_task_of, shapes_of, versions, versions_of

_FARTHEST = 1.0  # of logarithms to base 2
_TUNED, _PRESET = "tuned", "preset"

PRESETS = Path(__file__).parents[1] / "presets"
"""A database that comes with the package."""


@dataclass(frozen=True)
class _Record:
    """What is settled for a task: the choice as text, how many times faster than the default it is, and its trace."""

    task: tvm.IRModule
    shapes: tuple[tuple[int, ...] | int, ...]
    choice: str
    gain: float
    trace: Trace
    origin: str

    @property
    def source(self) -> str:
        """For the reader."""
        return f"{self.origin} {self.gain:.2f}x"


class Records:
    """What is settled for an architecture. `choose` is for `schedules.apply`."""

    def __init__(self, database: Path | None, target: Target) -> None:
        """database is a folder of `tune`, or None. What it does not know, presets may."""
        self._target = target.tvm
        self._sources = [
            *(_best_records(best(part), _TUNED) for part in (parts_for(database, target) if database else ())),
            *(_presets(part) for part in parts_like(PRESETS, architecture(target))),
        ]

    def choose(self, func: tirx.PrimFunc, variants: Sequence[Variant]) -> Choice | BySize | Code | None:
        """The choice for a function's sizes, or one by size for symbolic ones; None where nothing is known. Code runs
        at just the sizes that it was tuned for, and where it beats what tiles were found to gain. A function of fixed
        sizes that nobody tuned takes the tiles of the nearest one of its form.
        """
        free = _sizes(func)
        for records in self._sources:
            fitting = [record for record in records if _fits(func, record.shapes)]
            # The user knows which sizes are to count for all of them; a preset's is one of many.
            if not fitting or (free and fitting[0].origin == _PRESET):
                continue
            points: dict[tuple[int, ...], Choice] = {}
            codes: dict[tuple[int, ...], _Record] = {}
            gains: dict[tuple[int, ...], float] = {}
            for record in fitting:
                point = tuple(_value(record.shapes, size) for size in free)
                if has_kernel(record.task):
                    choice = self._choice(func, variants, record)
                    if choice is not None:
                        points[point], gains[point] = choice, record.gain
                elif record.choice != DEFAULT and self._is_of(func, record):
                    codes[point] = record
            chosen: Choice | BySize | Code | None = by_size(free, points) if points else None
            for point, record in codes.items():
                # A GPU's functions are blocks until TVM lowers them, and cannot hold both.
                if record.gain > gains.get(point, 1.0) and not (free and self._target.kind.name == "cuda"):
                    chosen = Code(_code(record), dict(zip(free, point)), chosen, record.source)
            if chosen is not None:
                return chosen
        return self._nearest(func, variants)

    def _nearest(self, func: tirx.PrimFunc, variants: Sequence[Variant]) -> Choice | None:
        """The tiles of the record whose sizes are nearest, none of them farther than a factor of two, made legal."""
        if not variants or not variants[0].tiles:
            return None
        all_tiles = [(_distance(func, r), r) for records in self._sources for r in records if has_kernel(r.task)]
        for _, record in sorted((each for each in all_tiles if each[0] <= _FARTHEST), key=lambda each: each[0]):
            if versions_of(record.task) != versions(variants):
                continue
            if record.gain <= 1:
                return None  # where defaults are best, so will they be here
            for variant in variants:
                try:
                    choice = variant.read(record.choice)
                    if choice.variant == variant.name:
                        tiles = {k: t.nearest_legal(variant.problem, variant.machine) for k, t in choice.tiles.items()}
                        return Choice(choice.variant, tiles, f"{record.origin} of nearby sizes")
                except ValueError:
                    continue
        return None

    def _is_of(self, func: tirx.PrimFunc, record: _Record) -> bool:
        """Whether loops were tuned of this function, compared with what it is by default today."""
        try:
            main = at_sizes(func, record.shapes)
        except (NotTunable, ValueError):
            return False
        _, variants = schedules.variants(main, self._target) or ("", ())
        return is_loops_task_of(record.task, main, variants)

    def _choice(self, func: tirx.PrimFunc, variants: Sequence[Variant], record: _Record) -> Choice | None:
        """The record's choice, if it is one of this function."""
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
                return dataclasses.replace(choice, source=record.source)
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


@functools.cache
def _presets(part: Path) -> list[_Record]:
    """Those of a folder of the package, whose files stay as they are: reading them takes a fifth of a small compile."""
    return _best_records(best(part), _PRESET)


def _best_records(records: Iterable[ms.database.TuningRecord], source: str) -> list[_Record]:
    """The fastest of each task; its default is the slowest, or the only one."""
    found: dict[ms.database.Workload, list[tuple[float, str, Trace]]] = {}
    for record in records:
        choice = recorded(record.trace)
        if choice is not None and record.run_secs:
            found.setdefault(record.workload, []).append((float(record.run_secs[0]), choice, record.trace))
    settled = []
    for workload, ends in found.items():
        ends.sort(key=lambda end: end[:2])
        seconds, choice, trace = ends[0]
        settled.append(_Record(workload.mod, shapes_of(workload.mod), choice, ends[-1][0] / seconds, trace, source))
    return settled


def _code(record: _Record) -> tirx.PrimFunc:
    """The function of a record of loops."""
    schedule = Schedule(record.task)
    record.trace.apply_to_schedule(schedule, remove_postproc=False)
    found = code(schedule.mod)
    assert found is not None
    return found


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


def _distance(func: tirx.PrimFunc, record: _Record) -> float:
    """The logarithm to base 2 of the largest ratio of a size to the record's; infinite for another form of arguments,
    and where a size is not fixed.
    """
    its = record.task[KERNEL].params
    if len(func.params) != len(its):
        return math.inf
    farthest = 0.0
    for mine, other, argument in zip(func.params, its, record.shapes):
        if tirx.is_buffer_var(mine) != tirx.is_buffer_var(other) or mine.ty.dtype != other.ty.dtype:
            return math.inf
        if isinstance(argument, int):
            continue
        if len(mine.shape) != len(argument) or not all(isinstance(size, tirx.IntImm) for size in mine.shape):
            return math.inf
        ratios = [(int(a) + 1) / (b + 1) for a, b in zip(mine.shape, argument)]
        farthest = max(farthest, *(abs(math.log2(ratio)) for ratio in ratios), 0.0)
    return farthest


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
