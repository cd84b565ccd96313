"""Variants: the ways in which a rule can schedule a function, and the choice of one."""

from __future__ import annotations

import functools
import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import tvm
import tvm_ffi
from tvm import tirx

from lowering.tensorir.blocks import lower_blocks
from lowering.tensorir.expressions import Expr

from .tiles import Tiles

ByKernel = Mapping[str, Tiles]
"""Tiles of the kernels of a function, by name."""


@dataclass(frozen=True)
class Variant:
    """One way to schedule a function, for a `problem` and a `machine` that it supports.

    tiles are the untuned defaults, by kernel; emit builds the function with such tiles. Kernels that share a function,
    each for some numbers of rows, are guarded by conditions in it that depend on tile sizes.
    """

    name: str
    problem: Any
    machine: Any
    tiles: ByKernel
    emit: Callable[[Any], tirx.PrimFunc]

    def make(self, **tiles: Tiles) -> tirx.PrimFunc:
        """Build the function, with these tiles in place of its own. Raises ValueError for illegal ones."""
        for name, kernel_tiles in tiles.items():
            if not isinstance(kernel_tiles, type(self.tiles.get(name))):
                raise ValueError(f"Variant '{self.name}' has no kernel '{name}' with {type(kernel_tiles).__name__}.")
            kernel_tiles.check(self.problem, self.machine)
        return self.emit({**self.tiles, **tiles})

    def read(self, text: str) -> Choice:
        """Return the choice of this variant that `Choice.to_json` wrote. Raises ValueError for anything else."""
        data = json.loads(text)
        try:
            tiles = {name: type(self.tiles[name]).from_data(fields) for name, fields in data["tiles"].items()}
            return Choice(data["variant"], tiles)
        except (KeyError, TypeError) as error:
            raise ValueError(f"{text} is not a choice of variant '{self.name}'.") from error


@dataclass(frozen=True)
class Choice:
    """A variant by name, and the tiles of its kernels; a kernel that is not named uses its defaults.

    source is the origin of the choice, for the reader.
    """

    variant: str
    tiles: ByKernel
    source: str = ""

    def to_json(self) -> str:
        return json.dumps({"variant": self.variant, "tiles": {n: t.to_data() for n, t in self.tiles.items()}})


@dataclass(frozen=True)
class RuntimeSize:
    """A size of a function at run time: a dimension of a parameter, or with axis None the parameter, a number."""

    parameter: int
    axis: int | None

    def read(self, func: tirx.PrimFunc) -> Expr:
        parameter = func.params[self.parameter]
        return parameter if self.axis is None else parameter.shape[self.axis]


@dataclass(frozen=True)
class BySize:
    """A choice that a function makes at run time: `small` if the size is at most max_size, else `large`."""

    size: RuntimeSize
    max_size: int
    small: Choice | BySize
    large: Choice | BySize

    @property
    def source(self) -> str:
        return "; ".join(dict.fromkeys((self.small.source, self.large.source)))


@dataclass(frozen=True, eq=False)
class ExternalCode:
    """A function that was scheduled externally, for static sizes.

    at maps run-time sizes to the values for which func is valid; otherwise is the choice for other values.
    """

    func: tirx.PrimFunc
    at: Mapping[RuntimeSize, int]
    otherwise: Choice | BySize | ExternalCode | None
    source: str


Rule = Callable[[tirx.PrimFunc, tvm.target.Target], Sequence[Variant] | None]
"""Returns the variants of a function, the default first; None if the rule does not apply."""

Choose = Callable[[tirx.PrimFunc, Sequence[Variant]], Choice | BySize | ExternalCode | None]
"""Returns the choice of a function's variant, with its tiles, or external code; None selects the default. A function
that no rule accepts has an empty list of variants.
"""


def made(
    func: tirx.PrimFunc, variants: Sequence[Variant], choice: Choice | BySize | ExternalCode | None
) -> tirx.PrimFunc:
    """Build the chosen function. Raises ValueError for a choice that is not one of the variants, or is illegal."""
    if choice is None:
        return variants[0].make() if variants else func
    if isinstance(choice, BySize):
        small, large = made(func, variants, choice.small), made(func, variants, choice.large)
        condition = choice.size.read(small) <= choice.max_size
        return small.with_body(tirx.IfThenElse(condition, small.body, _with_parameters_of(small, large).body))
    if isinstance(choice, ExternalCode):
        if not choice.at:
            return choice.func
        other = lower_blocks(made(func, variants, choice.otherwise))
        condition = functools.reduce(tirx.And, [size.read(other) == value for size, value in choice.at.items()])
        external = _with_parameters_of(other, lower_blocks(choice.func))
        return other.with_body(tirx.IfThenElse(condition, external.body, other.body))
    for variant in variants:
        if variant.name == choice.variant:
            return variant.make(**choice.tiles)
    raise ValueError(f"There is no variant '{choice.variant}'; there are {', '.join(v.name for v in variants)}.")


def describe_choice(variants: Sequence[Variant], choice: Choice | BySize | ExternalCode | None) -> dict[str, Any]:
    """Return the choice that `made` builds, as data that JSON can represent.

    A variant with the tiles of its kernels is {"variant", "tiles"}; a choice by size {"most", "small", "large"}; and
    external code {"otherwise"}, the choice at other sizes, or None.
    """
    if isinstance(choice, BySize):
        sides = {"small": describe_choice(variants, choice.small), "large": describe_choice(variants, choice.large)}
        return {"most": choice.max_size, **sides}
    if isinstance(choice, ExternalCode):
        return {"otherwise": describe_choice(variants, choice.otherwise) if choice.at and variants else None}
    variant = variants[0] if choice is None else next(v for v in variants if v.name == choice.variant)
    tiles = variant.tiles if choice is None else {**variant.tiles, **choice.tiles}
    return {"variant": variant.name, "tiles": {name: kernel_tiles.to_data() for name, kernel_tiles in tiles.items()}}


def _with_parameters_of(func: tirx.PrimFunc, other: tirx.PrimFunc) -> tirx.PrimFunc:
    """Return `other`, a function of the same parameters, with those of `func`."""
    renamed: dict[tirx.Var, tirx.Var] = {}
    for parameter, replaced in zip(func.params, other.params, strict=True):
        renamed[replaced] = parameter
        if tirx.is_buffer_var(replaced):
            renamed |= {b: a for a, b in zip(parameter.shape, replaced.shape) if isinstance(b, tirx.Var)}
    return tvm_ffi.structural_map(other, (tirx.Var, lambda var: renamed.get(var, var)))
