"""The search space of tiles for MetaSchedule: one categorical sample for each field.

Evolutionary search replays and mutates traces of these samples. Samples are rounded to the nearest legal tiles, so that
all of them can be built. The resulting choice annotates the block of the task's `main`, and is thus in the trace that a
database stores.
"""

from __future__ import annotations

import dataclasses
import random
from collections.abc import Sequence
from typing import Any

import tvm
from tvm import tirx
from tvm.ir.utils import derived_object
from tvm.s_tir import Schedule, Trace
from tvm.s_tir import meta_schedule as ms
from tvm_ffi import structural_equal

import schedules
from schedules.tiles import Value, find_nearest_index
from schedules.variant import Choice, Variant

from ...tuning_records.candidate_choices import annotate_choice
from ...tuning_records.task import BLOCK, KERNEL, MAIN

_VARIANT = "lowering.variant"
_SAMPLE = "SampleCategorical"

# Probability of a mutation to a neighboring value, which is similar; other mutations go anywhere.
_NEIGHBOR_PROBABILITY = 0.6


class TileSpace:
    """The variants of a task's kernel, and the possible values of their tiles. Choices are `Choice.to_json`."""

    kind = "tiles"

    def __init__(self, module: tvm.IRModule, target: tvm.target.Target) -> None:
        result = schedules.find_variants(module[KERNEL], target)
        assert result is not None
        self.target = target
        self.rule, self.variants = result
        self._by_name = {variant.name: variant for variant in self.variants}
        self._cached_fields: dict[str, list[tuple[str, str, tuple[Value, ...]]]] = {}
        self._cached_choices: dict[tuple[str, tuple[int, ...]], Choice] = {}
        self.default_choice = Choice(self.variants[0].name, self.variants[0].tiles)
        self.default = self.default_choice.to_json()

    def list_fields(self, variant: str) -> list[tuple[str, str, tuple[Value, ...]]]:
        """Return kernel, field and candidate values of the fields that affect this function's code."""
        if variant not in self._cached_fields:
            self._cached_fields[variant] = _find_fields(self._by_name[variant])
        return self._cached_fields[variant]

    def estimate(self, choice: Choice) -> float:
        """Return the logarithm of the estimated time for such tiles, up to a constant."""
        variant = self._by_name[choice.variant]
        kernels = {kernel for kernel, _, _ in self.list_fields(choice.variant)}
        return sum(choice.tiles[k].estimate(variant.problem, variant.machine) for k in sorted(kernels))

    def find_nearest(self, variant: str, indices: Sequence[int]) -> Choice:
        """Return the legal choice nearest to these values of its fields. Raises ValueError if there is none."""
        key = variant, tuple(indices)
        if key not in self._cached_choices:
            self._cached_choices[key] = self._find_legal(*key)
        return self._cached_choices[key]

    def read(self, text: str) -> Choice:
        """Return the choice of a text. Raises ValueError if no variant has it."""
        return _parse_choice(self._by_name, text)

    def sample(self, schedule: Schedule) -> list[Schedule]:
        """Return a design for each variant. It is MetaSchedule's ScheduleFn."""
        designs = []
        for variant in self.variants:
            design = schedule.copy()
            block = design.get_sblock(BLOCK, MAIN)
            design.annotate(block, _VARIANT, variant.name)
            for number, (_, _, values) in enumerate(self.list_fields(variant.name)):
                index = design.sample_categorical(list(range(len(values))), [1 / len(values)] * len(values))
                design.annotate(block, _name_annotation(number), index)  # MetaSchedule drops unused samples
            designs.append(design)
        return designs

    def trace(self, module: tvm.IRModule, choice: Choice) -> Trace:
        """Return a trace that ends with the choice: the nearest samples, and the annotation."""
        schedule = Schedule(module)
        block = schedule.get_sblock(BLOCK, MAIN)
        schedule.annotate(block, _VARIANT, choice.variant)
        for number, (kernel, field, values) in enumerate(self.list_fields(choice.variant)):
            nearest_index = find_nearest_index(values, getattr(choice.tiles[kernel], field))
            index = schedule.sample_categorical(
                list(range(len(values))), [1 / len(values)] * len(values), nearest_index
            )
            schedule.annotate(block, _name_annotation(number), index)
        schedule.enter_postproc()
        annotate_choice(schedule, BLOCK, choice.to_json())
        return schedule.trace

    def default_trace(self, module: tvm.IRModule) -> Trace:
        return self.trace(module, self.default_choice)

    def generator(self) -> ms.space_generator.ScheduleFn:
        return ms.space_generator.ScheduleFn(
            self.sample, sch_rules=[], postprocs=[_LegalizeChoice(self)], mutator_probs={_RedrawSample(): 1.0}
        )

    def _find_legal(self, variant: str, indices: tuple[int, ...]) -> Choice:
        chosen_variant = self._by_name[variant]
        sampled: dict[str, dict[str, Any]] = {kernel: {} for kernel in chosen_variant.tiles}
        for (kernel, field, values), index in zip(self.list_fields(variant), indices, strict=True):
            sampled[kernel][field] = values[index]
        tiles = {
            kernel: type(tiles_of_kernel)
            .from_data(tiles_of_kernel.to_data() | sampled[kernel])
            .nearest_legal(chosen_variant.problem, chosen_variant.machine)
            for kernel, tiles_of_kernel in chosen_variant.tiles.items()
        }
        return Choice(variant, tiles)


def _name_annotation(number: int) -> str:
    """Return the annotation for the sampled value index of a field."""
    return f"lowering.place{number}"


def _find_fields(variant: Variant) -> list[tuple[str, str, tuple[Value, ...]]]:
    """Return the fields with an effect: static sizes use only one of the function's kernels."""
    default_body = variant.make().body
    fields = []
    for kernel, tiles in variant.tiles.items():
        for field, values in tiles.space(variant.problem, variant.machine).items():
            extremes = [values[0], values[-1]] if len(values) > 1 else []
            if any(
                not structural_equal(_change_field(variant, kernel, field, v).body, default_body, True)
                for v in extremes
            ):
                fields.append((kernel, field, values))
    return fields


def _change_field(variant: Variant, kernel: str, field: str, value: Any) -> tirx.PrimFunc:
    """Return the function with another value of a field, and of others if they would be illegal with it."""
    tiles = dataclasses.replace(variant.tiles[kernel], **{field: value})
    return variant.make(**{kernel: tiles.nearest_legal(variant.problem, variant.machine)})


def _parse_choice(variants: dict[str, Variant], text: str) -> Choice:
    for variant in variants.values():
        try:
            choice = variant.read(text)
        except ValueError:
            continue
        if choice.variant == variant.name:
            return choice
    raise ValueError(f"{text} is not a choice of any of the variants {', '.join(variants)}.")


@derived_object
class _LegalizeChoice(ms.postproc.PyPostproc):
    """Annotates the legal choice nearest to the samples."""

    def __init__(self, space: TileSpace) -> None:
        super().__init__()
        self.space = space

    def _initialize_with_tune_context(self, context: ms.TuneContext) -> None:
        pass

    def apply(self, schedule: Schedule) -> bool:
        block = schedule.get_sblock(BLOCK, MAIN)
        annotations = schedule.get(block).annotations
        variant = str(annotations[_VARIANT])
        keys = [_name_annotation(number) for number in range(len(self.space.list_fields(variant)))]
        try:
            choice = self.space.find_nearest(variant, [int(annotations[key]) for key in keys])
        except ValueError:
            return False
        for key in keys:  # equal choices are equal candidates
            schedule.unannotate(block, key)
        annotate_choice(schedule, BLOCK, choice.to_json())
        return True

    def clone(self) -> _LegalizeChoice:
        return _LegalizeChoice(self.space)


@derived_object
class _RedrawSample(ms.mutator.PyMutator):
    """Redraws one sample, most often a neighbor. MetaSchedule lacks a mutator for plain categoricals."""

    def __init__(self) -> None:
        super().__init__()
        self.random = random.Random(0)

    def _initialize_with_tune_context(self, context: ms.TuneContext) -> None:
        self.random = random.Random(int(context.rand_state))

    def apply(self, trace: Trace, _: Any) -> Trace | None:
        samples = [inst for inst in trace.insts if inst.kind.name == _SAMPLE]
        if not samples:
            return None
        sample = self.random.choice(samples)
        count, index = len(sample.attrs[0]), int(trace.decisions[sample])
        if self.random.random() < _NEIGHBOR_PROBABILITY:
            index = min(max(index + self.random.choice((-1, 1)), 0), count - 1)
        else:
            index = self.random.randrange(count)
        return trace.with_decision(sample, index, remove_postproc=True)

    def clone(self) -> _RedrawSample:
        return _RedrawSample()
