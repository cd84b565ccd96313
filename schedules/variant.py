"""Variants: the ways in which a rule can make a function fast, and the choice of one."""

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
"""Tiles of the kernels that a function consists of."""


@dataclass(frozen=True)
class Variant:
    """One way to run a function, for which `problem` and `machine` have been found fit.

    tiles are those that serve untuned, by kernel; emit makes the function with such tiles. Kernels that share a
    function, each for some numbers of rows, are guarded by conditions in it, in which sizes of the tiles stand.
    """

    name: str
    problem: Any
    machine: Any
    tiles: ByKernel
    emit: Callable[[Any], tirx.PrimFunc]

    def make(self, **tiles: Tiles) -> tirx.PrimFunc:
        """The function, with these tiles in place of its own. Raises ValueError for illegal ones."""
        for name, own in tiles.items():
            if not isinstance(own, type(self.tiles.get(name))):
                raise ValueError(f"Variant '{self.name}' has no kernel '{name}' with {type(own).__name__}.")
            own.check(self.problem, self.machine)
        return self.emit({**self.tiles, **tiles})

    def read(self, text: str) -> Choice:
        """The choice of this variant that `Choice.to_json` wrote. Raises ValueError for anything else."""
        data = json.loads(text)
        try:
            tiles = {name: type(self.tiles[name]).from_data(fields) for name, fields in data["tiles"].items()}
            return Choice(data["variant"], tiles)
        except (KeyError, TypeError) as error:
            raise ValueError(f"{text} is no choice of variant '{self.name}'.") from error


@dataclass(frozen=True)
class Choice:
    """A variant by name, and the tiles of its kernels; a kernel that is not named has its own.

    source is where the choice comes from, for the reader.
    """

    variant: str
    tiles: ByKernel
    source: str = ""

    def to_json(self) -> str:
        return json.dumps({"variant": self.variant, "tiles": {n: t.to_data() for n, t in self.tiles.items()}})


@dataclass(frozen=True)
class RuntimeSize:
    """A size that a function has at run time: a dimension of a parameter, or with axis None the parameter, a number."""

    parameter: int
    axis: int | None

    def read(self, func: tirx.PrimFunc) -> Expr:
        parameter = func.params[self.parameter]
        return parameter if self.axis is None else parameter.shape[self.axis]


@dataclass(frozen=True)
class BySize:
    """A choice that a function makes at run time: one where the size is at most so large, the other above."""

    size: RuntimeSize
    max_size: int
    small: Choice | BySize
    large: Choice | BySize

    @property
    def source(self) -> str:
        return "; ".join(dict.fromkeys((self.small.source, self.large.source)))


@dataclass(frozen=True, eq=False)
class ExternalCode:
    """A function that was scheduled elsewhere, for sizes that are all fixed; at tells which of the sizes that are known
    at run time must be what, and otherwise what runs where they are not.
    """

    func: tirx.PrimFunc
    at: Mapping[RuntimeSize, int]
    otherwise: Choice | BySize | ExternalCode | None
    source: str


Rule = Callable[[tirx.PrimFunc, tvm.target.Target], Sequence[Variant] | None]
"""How a function can run, the default first; None for "not mine"."""

Choose = Callable[[tirx.PrimFunc, Sequence[Variant]], Choice | BySize | ExternalCode | None]
"""Which of a function's variants is to run, with which tiles, or other code; None leaves it to the default. A function
that no rule takes has no variants."""


def made(
    func: tirx.PrimFunc, variants: Sequence[Variant], choice: Choice | BySize | ExternalCode | None
) -> tirx.PrimFunc:
    """What was chosen for a function. Raises ValueError for a choice that is none of the variants, or illegal."""
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
        own = _with_parameters_of(other, lower_blocks(choice.func))
        return other.with_body(tirx.IfThenElse(condition, own.body, other.body))
    for variant in variants:
        if variant.name == choice.variant:
            return variant.make(**choice.tiles)
    raise ValueError(f"There is no variant '{choice.variant}'; there are {', '.join(v.name for v in variants)}.")


def describe_choice(variants: Sequence[Variant], choice: Choice | BySize | ExternalCode | None) -> dict[str, Any]:
    """What `made` makes, as JSON can hold it: a variant with the tiles of its kernels, {"variant", "tiles"}; by size
    {"most", "small", "large"}; and for code of others {"otherwise"}, what runs at other sizes, or None."""
    if isinstance(choice, BySize):
        sides = {"small": describe_choice(variants, choice.small), "large": describe_choice(variants, choice.large)}
        return {"most": choice.max_size, **sides}
    if isinstance(choice, ExternalCode):
        return {"otherwise": describe_choice(variants, choice.otherwise) if choice.at and variants else None}
    found = variants[0] if choice is None else next(v for v in variants if v.name == choice.variant)
    tiles = found.tiles if choice is None else {**found.tiles, **choice.tiles}
    return {"variant": found.name, "tiles": {name: each.to_data() for name, each in tiles.items()}}


def _with_parameters_of(func: tirx.PrimFunc, other: tirx.PrimFunc) -> tirx.PrimFunc:
    """`other`, a function of the same parameters, with those of `func`."""
    renamed: dict[tirx.Var, tirx.Var] = {}
    for mine, its in zip(func.params, other.params, strict=True):
        renamed[its] = mine
        if tirx.is_buffer_var(its):
            renamed |= {b: a for a, b in zip(mine.shape, its.shape) if isinstance(b, tirx.Var)}
    return tvm_ffi.structural_map(other, (tirx.Var, lambda var: renamed.get(var, var)))
