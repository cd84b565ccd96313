"""The space of our kernels' tiles, as MetaSchedule sees it: one categorical sample for each field.

Evolutionary search replays and mutates traces of these samples. Samples are rounded to the legal tiles that are
nearest, so that all of them can be built; the choice that comes out is annotated to the block of the task's `main`,
and with it is in the trace that a database keeps.
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
from schedules.tiles import Value, nearest_place
from schedules.variant import Choice, Variant

from .choices import annotate
from .task import BLOCK, KERNEL, MAIN

_VARIANT = "lowering.variant"
_SAMPLE = "SampleCategorical"

# Mutations go to a neighboring value, which is alike, or anywhere.
_NEAR = 0.6


class TileSpace:
    """The variants of a task's kernel, and what their tiles can be. Texts are `Choice.to_json`."""

    kind = "tiles"

    def __init__(self, module: tvm.IRModule, target: tvm.target.Target) -> None:
        answer = schedules.variants(module[KERNEL], target)
        assert answer is not None
        self.target = target
        self.rule, self.variants = answer
        self._by_name = {variant.name: variant for variant in self.variants}
        self._known_fields: dict[str, list[tuple[str, str, tuple[Value, ...]]]] = {}
        self._known_choices: dict[tuple[str, tuple[int, ...]], Choice] = {}
        self.usual = Choice(self.variants[0].name, self.variants[0].tiles)
        self.default = self.usual.to_json()

    def fields(self, variant: str) -> list[tuple[str, str, tuple[Value, ...]]]:
        """By kernel and field, the values that are worth a try, of fields on which this function's code depends."""
        if variant not in self._known_fields:
            self._known_fields[variant] = _fields_of(self._by_name[variant])
        return self._known_fields[variant]

    def estimate(self, choice: Choice) -> float:
        """The logarithm of the time that such tiles should take, up to a constant."""
        found = self._by_name[choice.variant]
        used = {kernel for kernel, _, _ in self.fields(choice.variant)}
        return sum(choice.tiles[k].estimate(found.problem, found.machine) for k in sorted(used))

    def nearest(self, variant: str, places: Sequence[int]) -> Choice:
        """The legal choice nearest to these values of its fields. Raises ValueError where there is none."""
        key = variant, tuple(places)
        if key not in self._known_choices:
            self._known_choices[key] = self._nearest(*key)
        return self._known_choices[key]

    def read(self, text: str) -> Choice:
        """Raises ValueError for what is none of the variants."""
        return _read(self._by_name, text)

    def sample(self, schedule: Schedule) -> list[Schedule]:
        """A design for each variant: MetaSchedule's ScheduleFn."""
        designs = []
        for variant in self.variants:
            design = schedule.copy()
            block = design.get_sblock(BLOCK, MAIN)
            design.annotate(block, _VARIANT, variant.name)
            for number, (_, _, values) in enumerate(self.fields(variant.name)):
                place = design.sample_categorical(list(range(len(values))), [1 / len(values)] * len(values))
                design.annotate(block, _place(number), place)  # what nothing uses, MetaSchedule drops
            designs.append(design)
        return designs

    def trace(self, module: tvm.IRModule, choice: Choice) -> Trace:
        """One that ends with the choice: samples that lie nearest to it, and the annotation."""
        schedule = Schedule(module)
        block = schedule.get_sblock(BLOCK, MAIN)
        schedule.annotate(block, _VARIANT, choice.variant)
        for number, (kernel, field, values) in enumerate(self.fields(choice.variant)):
            near = nearest_place(values, getattr(choice.tiles[kernel], field))
            place = schedule.sample_categorical(list(range(len(values))), [1 / len(values)] * len(values), near)
            schedule.annotate(block, _place(number), place)
        schedule.enter_postproc()
        annotate(schedule, BLOCK, choice.to_json())
        return schedule.trace

    def default_trace(self, module: tvm.IRModule) -> Trace:
        return self.trace(module, self.usual)

    def generator(self) -> ms.space_generator.ScheduleFn:
        return ms.space_generator.ScheduleFn(
            self.sample, sch_rules=[], postprocs=[_Round(self)], mutator_probs={_Redraw(): 1.0}
        )

    def _nearest(self, variant: str, places: tuple[int, ...]) -> Choice:
        found = self._by_name[variant]
        drawn: dict[str, dict[str, Any]] = {kernel: {} for kernel in found.tiles}
        for (kernel, field, values), place in zip(self.fields(variant), places, strict=True):
            drawn[kernel][field] = values[place]
        tiles = {
            kernel: type(own).from_data(own.to_data() | drawn[kernel]).nearest_legal(found.problem, found.machine)
            for kernel, own in found.tiles.items()
        }
        return Choice(variant, tiles)


def _place(number: int) -> str:
    """The annotation that holds which value of a field was drawn."""
    return f"lowering.place{number}"


def _fields_of(variant: Variant) -> list[tuple[str, str, tuple[Value, ...]]]:
    """Fields that matter: a function of fixed sizes is served by one of its kernels, whose tiles alone count."""
    usual = variant.make().body
    found = []
    for kernel, tiles in variant.tiles.items():
        for field, values in tiles.space(variant.problem, variant.machine).items():
            extremes = [values[0], values[-1]] if len(values) > 1 else []
            if any(not structural_equal(_with(variant, kernel, field, v).body, usual, True) for v in extremes):
                found.append((kernel, field, values))
    return found


def _with(variant: Variant, kernel: str, field: str, value: Any) -> tirx.PrimFunc:
    """The function with another value of one field, and of others as far as that makes them illegal."""
    tiles = dataclasses.replace(variant.tiles[kernel], **{field: value})
    return variant.make(**{kernel: tiles.nearest_legal(variant.problem, variant.machine)})


def _read(variants: dict[str, Variant], text: str) -> Choice:
    for variant in variants.values():
        try:
            choice = variant.read(text)
        except ValueError:
            continue
        if choice.variant == variant.name:
            return choice
    raise ValueError(f"{text} is a choice of none of the variants {', '.join(variants)}.")


@derived_object
class _Round(ms.postproc.PyPostproc):
    """Annotates the legal choice that is nearest to what was sampled."""

    def __init__(self, space: TileSpace) -> None:
        super().__init__()
        self.space = space

    def _initialize_with_tune_context(self, context: ms.TuneContext) -> None:
        pass

    def apply(self, schedule: Schedule) -> bool:
        block = schedule.get_sblock(BLOCK, MAIN)
        annotations = schedule.get(block).annotations
        variant = str(annotations[_VARIANT])
        keys = [_place(number) for number in range(len(self.space.fields(variant)))]
        try:
            choice = self.space.nearest(variant, [int(annotations[key]) for key in keys])
        except ValueError:
            return False
        for key in keys:  # candidates of the same choice are the same
            schedule.unannotate(block, key)
        annotate(schedule, BLOCK, choice.to_json())
        return True

    def clone(self) -> _Round:
        return _Round(self.space)


@derived_object
class _Redraw(ms.mutator.PyMutator):
    """Draws one sample again, most often a neighbor; MetaSchedule has no mutator for plain categoricals."""

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
        count, place = len(sample.attrs[0]), int(trace.decisions[sample])
        if self.random.random() < _NEAR:
            place = min(max(place + self.random.choice((-1, 1)), 0), count - 1)
        else:
            place = self.random.randrange(count)
        return trace.with_decision(sample, place, remove_postproc=True)

    def clone(self) -> _Redraw:
        return _Redraw()
