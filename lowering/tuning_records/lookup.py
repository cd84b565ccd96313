"""Lookup of tuned choices during compilation: a `choose` callback for schedules.

A record applies to a function that is identical to the record's own at the record's sizes. So records of one model
serve every model with the same kernel, and a function of symbolic sizes finds the records of all tuned sizes. Between
them the nearest one by ratio applies: the function compares its sizes when it runs.
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
from schedules.variant import BySize, Choice, ExternalCode, RuntimeSize, Variant

from ..target import Target
from .architecture import detect_architecture
from .candidate_choices import DEFAULT, extract_scheduled_function, read_trace_choice
from .database import find_matching_folders, find_similar_folders, read_best_records
from .task import (
    KERNEL,
    NotTunable,
    encode_versions,
    has_kernel,
    is_loops_task_for,
    read_shapes,
    read_versions,
    specialize_sizes,
)

_MAX_DISTANCE = 1.0  # as a logarithm to base 2
_TUNED_ORIGIN, _PRESET_ORIGIN = "tuned", "preset"

PRESETS = Path(__file__).parents[1] / "presets"
"""A database that is part of the package."""


@dataclass(frozen=True)
class _TunedRecord:
    """The final record of a task: its choice, its speedup over the default, and its trace."""

    task: tvm.IRModule
    shapes: tuple[tuple[int, ...] | int, ...]
    choice: str
    gain: float
    trace: Trace
    origin: str

    @property
    def source(self) -> str:
        """The source of the choice, for people."""
        return f"{self.origin} {self.gain:.2f}x"


class TunedRecords:
    """The final records of an architecture. `choose` is a callback for `schedules.apply_schedules`."""

    def __init__(self, database: Path | None, target: Target) -> None:
        """Read the records of a folder of `tune`, or of None. Presets apply where it lacks a record."""
        self._target = target.tvm
        self._sources = [
            *(
                _select_fastest(read_best_records(folder), _TUNED_ORIGIN)
                for folder in (find_matching_folders(database, target) if database else ())
            ),
            *(_read_presets(folder) for folder in find_similar_folders(PRESETS, detect_architecture(target))),
        ]

    def choose(self, func: tirx.PrimFunc, variants: Sequence[Variant]) -> Choice | BySize | ExternalCode | None:
        """Return the choice for a function's sizes, one by size for symbolic ones, or None without a record.

        Code applies only at the sizes that it was tuned for, and only where it gains more than the tiles there. A
        function of static sizes without a record gets the tiles of the nearest record of its form.
        """
        symbolic_sizes = _find_sizes(func)
        for records in self._sources:
            applicable = [record for record in records if _can_apply(func, record.shapes)]
            # The user selects the sizes that represent all of them; a preset's sizes are arbitrary.
            if not applicable or (symbolic_sizes and applicable[0].origin == _PRESET_ORIGIN):
                continue
            choices: dict[tuple[int, ...], Choice] = {}
            code_records: dict[tuple[int, ...], _TunedRecord] = {}
            gains: dict[tuple[int, ...], float] = {}
            for record in applicable:
                point = tuple(_read_size(record.shapes, size) for size in symbolic_sizes)
                if has_kernel(record.task):
                    choice = self._read_choice(func, variants, record)
                    if choice is not None:
                        choices[point], gains[point] = choice, record.gain
                elif record.choice != DEFAULT and self._matches_function(func, record):
                    code_records[point] = record
            chosen: Choice | BySize | ExternalCode | None = choose_by_size(symbolic_sizes, choices) if choices else None
            for point, record in code_records.items():
                # Functions for GPUs are blocks until TVM lowers them, and cannot contain both tiles and code.
                if record.gain > gains.get(point, 1.0) and not (symbolic_sizes and self._target.kind.name == "cuda"):
                    chosen = ExternalCode(
                        _build_function(record), dict(zip(symbolic_sizes, point)), chosen, record.source
                    )
            if chosen is not None:
                return chosen
        return self._find_nearest(func, variants)

    def _find_nearest(self, func: tirx.PrimFunc, variants: Sequence[Variant]) -> Choice | None:
        """Return the legal tiles nearest to those of the nearest record, within a factor of two in each size."""
        if not variants or not variants[0].tiles:
            return None
        by_distance = [
            (_compute_distance(func, r), r) for records in self._sources for r in records if has_kernel(r.task)
        ]
        for _, record in sorted((item for item in by_distance if item[0] <= _MAX_DISTANCE), key=lambda item: item[0]):
            if read_versions(record.task) != encode_versions(variants):
                continue
            if record.gain <= 1:
                return None  # if the defaults are best there, they are assumed best here
            for variant in variants:
                try:
                    choice = variant.read(record.choice)
                    if choice.variant == variant.name:
                        tiles = {k: t.nearest_legal(variant.problem, variant.machine) for k, t in choice.tiles.items()}
                        return Choice(choice.variant, tiles, f"{record.origin} of nearby sizes")
                except ValueError:
                    continue
        return None

    def _matches_function(self, func: tirx.PrimFunc, record: _TunedRecord) -> bool:
        """Return whether loops were tuned for this function, against its current default."""
        try:
            main = specialize_sizes(func, record.shapes)
        except (NotTunable, ValueError):
            return False
        _, variants = schedules.find_variants(main, self._target) or ("", ())
        return is_loops_task_for(record.task, main, variants)

    def _read_choice(self, func: tirx.PrimFunc, variants: Sequence[Variant], record: _TunedRecord) -> Choice | None:
        """Return the record's choice, if the record belongs to this function."""
        try:
            kernel = specialize_sizes(func, record.shapes)
        except (NotTunable, ValueError):
            return None
        if not structural_equal(kernel.with_attr("global_symbol", KERNEL), record.task[KERNEL], True):
            return None
        result = schedules.find_variants(kernel, self._target)
        if result is None or encode_versions(result[1]) != read_versions(record.task):
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


def choose_by_size(sizes: Sequence[RuntimeSize], choices: dict[tuple[int, ...], Choice]) -> Choice | BySize:
    """Return a choice for all sizes from the choices for some.

    Sizes are split recursively between the two consecutive values with the largest ratio, at their geometric mean.
    """
    any_choice = next(iter(choices.values()))
    if all(choice.to_json() == any_choice.to_json() for choice in choices.values()):
        return any_choice
    gaps = []
    for axis in range(len(sizes)):
        values = sorted({point[axis] for point in choices})
        gaps += [((high + 1) / (low + 1), axis, low, high) for low, high in pairwise(values)]
    _, axis, low, high = max(gaps)
    split = max(low, math.isqrt(low * high))
    lower = {point: choice for point, choice in choices.items() if point[axis] <= split}
    upper = {point: choice for point, choice in choices.items() if point[axis] > split}
    return BySize(sizes[axis], split, choose_by_size(sizes, lower), choose_by_size(sizes, upper))


@functools.cache
def _read_presets(folder: Path) -> list[_TunedRecord]:
    """Return the records of a preset folder. They are cached: reading takes a fifth of a small compile."""
    return _select_fastest(read_best_records(folder), _PRESET_ORIGIN)


def _select_fastest(records: Iterable[ms.database.TuningRecord], source: str) -> list[_TunedRecord]:
    """Return the fastest record of each task. Its default is the slowest record, or the only one."""
    by_workload: dict[ms.database.Workload, list[tuple[float, str, Trace]]] = {}
    for record in records:
        choice = read_trace_choice(record.trace)
        if choice is not None and record.run_secs:
            by_workload.setdefault(record.workload, []).append((float(record.run_secs[0]), choice, record.trace))
    selected = []
    for workload, entries in by_workload.items():
        entries.sort(key=lambda item: item[:2])
        seconds, choice, trace = entries[0]
        selected.append(
            _TunedRecord(workload.mod, read_shapes(workload.mod), choice, entries[-1][0] / seconds, trace, source)
        )
    return selected


def _build_function(record: _TunedRecord) -> tirx.PrimFunc:
    """Return the function of a record of loops."""
    schedule = Schedule(record.task)
    record.trace.apply_to_schedule(schedule, remove_postproc=False)
    function = extract_scheduled_function(schedule.mod)
    assert function is not None
    return function


def _can_apply(func: tirx.PrimFunc, shapes: Sequence[tuple[int, ...] | int]) -> bool:
    """Return whether arguments of such shapes could be the function's, by a quick check."""
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


def _compute_distance(func: tirx.PrimFunc, record: _TunedRecord) -> float:
    """Return the largest ratio of a size to the record's, as a logarithm to base 2.

    It is infinite for arguments of another form, and if a size is not static.
    """
    record_params = record.task[KERNEL].params
    if len(func.params) != len(record_params):
        return math.inf
    distance = 0.0
    for own, other, argument in zip(func.params, record_params, record.shapes):
        if tirx.is_buffer_var(own) != tirx.is_buffer_var(other) or own.ty.dtype != other.ty.dtype:
            return math.inf
        if isinstance(argument, int):
            continue
        if len(own.shape) != len(argument) or not all(isinstance(size, tirx.IntImm) for size in own.shape):
            return math.inf
        ratios = [(int(a) + 1) / (b + 1) for a, b in zip(own.shape, argument)]
        distance = max(distance, *(abs(math.log2(ratio)) for ratio in ratios), 0.0)
    return distance


def _find_sizes(func: tirx.PrimFunc) -> list[RuntimeSize]:
    """Return the sizes that are determined only when the function runs."""
    sizes: dict[tirx.Var, RuntimeSize] = {}
    for number, parameter in enumerate(func.params):
        if not tirx.is_buffer_var(parameter):
            sizes.setdefault(parameter, RuntimeSize(number, None))
            continue
        for axis, dim in enumerate(parameter.shape):
            if isinstance(dim, tirx.Var):
                sizes.setdefault(dim, RuntimeSize(number, axis))
    return list(sizes.values())


def _read_size(shapes: Sequence[tuple[int, ...] | int], size: RuntimeSize) -> int:
    shape = shapes[size.parameter]
    return shape if isinstance(shape, int) else shape[size.axis or 0]
