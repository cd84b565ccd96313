"""Random mods: Python functions as text, and arrays of the sizes that they read, for a call of any shape."""

from __future__ import annotations

import operator
import random
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

import ml_dtypes  # noqa: F401  (makes "bfloat16" a NumPy type name)
import numpy as np

from lowering import flex

Sizes = Mapping[str, int]
"""Sizes of a call: b, h, i and j are the numbers of batches, heads, rows and keys."""

INTEGERS = ("int8", "int16", "int32", "int64", "uint8", "uint16", "uint32")
FLOATS = ("float16", "bfloat16", "float32", "float64")
LARGEST = 2**24  # bound of an integer that later operations use: additions and multiplications stay below 2^31
OPERATIONS = 8  # about as many as a mod has: kernels of long ones compile for minutes
NEAR = 1e-4  # relative difference from which rounding does not change a comparison


class Int(NamedTuple):
    """An integer expression. bounds follow from the sizes, if they do; magnitude is how large it can be."""

    text: str
    bounds: Callable[[Sizes], tuple[int, int]] | None
    magnitude: int


class Float(NamedTuple):
    """A floating-point expression, and its largest magnitude."""

    text: str
    magnitude: float


@dataclass
class Array:
    """A captured array: along each axis the bounds of its indices, as functions of the sizes."""

    dtype: str
    axes: list[list[Callable[[Sizes], tuple[int, int]]]]
    wild: bool = False  # its elements may be any number of its type: it is an index, and nothing is computed with it


class RandomMods:
    """A score_mod, a mask_mod or both, drawn from a seed."""

    def __init__(self, seed: int) -> None:
        self.rng = random.Random(seed)
        self.arrays: dict[str, Array] = {}
        self.left = OPERATIONS
        kind = self.rng.choice(["score", "mask", "mask", "both"])
        self.score_text = f"{self._score()}" if kind != "mask" else None
        self.left = OPERATIONS
        self.mask_text = self._condition(3) if kind != "score" else None

    def mods(self, less: Callable[[Any, Any], Any] = operator.lt) -> dict[str, Any]:
        """Return the functions by name; they compare floating-point numbers by `less`."""
        functions: dict[str, Any] = dict.fromkeys(("score_mod", "mask_mod"))
        for name, first, text in (("score_mod", "s, ", self.score_text), ("mask_mod", "", self.mask_text)):
            if text is not None:
                used = self._read_by(text)
                parameters = ", *, " + ", ".join(used) if used else ""
                scope = {"less": less, **{name: getattr(flex, name) for name in flex.__all__}}
                exec(f"def {name}({first}b, h, i, j{parameters}):\n    return {text}\n", scope)
                functions[name] = scope[name]
        return functions

    def _read_by(self, text: str) -> list[str]:
        return [name for name in self.arrays if re.search(rf"\b{name}\b", text)]

    def _can_continue(self, depth: int) -> bool:
        """Return whether an operation comes next."""
        self.left -= depth > 0
        return depth > 0 and self.left >= 0

    def captures(self, sizes: Sizes, rng: np.random.Generator) -> dict[str, np.ndarray]:
        """Draw arrays that are as large as they must be, or a little larger."""
        arrays = {}
        for name in self._read_by(f"{self.score_text} {self.mask_text}"):
            array, shape = self.arrays[name], []
            for reads in array.axes:
                ends = [bounds(sizes) for bounds in reads]
                size = max((max(high + 1, -low) for low, high in ends), default=1)
                shape.append(max(size, 1) + int(rng.choice([0, 0, 1, 5])))
            arrays[name] = _elements(array, shape, rng)
        return arrays

    # -- scores -------------------------------------------------------------------------------------------------------

    def _score(self) -> str:
        new = self._float(3, score=True)
        text = new.text if new.magnitude <= 30 else f"(30 * tanh(({new.text}) / {max(new.magnitude / 4, 30.0)}))"
        kind = self.rng.choice(["alone", "added", "hidden"])
        if kind == "added":
            text = f"s + {text}"
        return f"where({self._condition(1)}, {text}, -float('inf'))" if kind == "hidden" else text

    def _float(self, depth: int, score: bool = False) -> Float:
        kinds = ["number", "element", "integer", *(["s"] * 3 if score else [])]
        if self._can_continue(depth):
            kinds = ["sum", "difference", "multiply", "quotient", "function", "where", "least", "absolute", "bool"]
        kind = self.rng.choice(kinds)
        if kind == "s":
            return Float("s", 12.0)
        if kind == "number":
            value = self.rng.choice([-2.0, -0.3, 0.1, 0.5, 1.7])
            return Float(repr(value), abs(value))
        if kind == "element":
            return Float(self._element(self.rng.choice(FLOATS)), 4.0)
        if kind == "integer":
            value = self._integer(1)
            return Float(f"cast({value.text}, 'float32') * {1 / max(value.magnitude, 1)!r}", 1.0)
        if kind == "bool":
            return Float(f"cast({self._condition(1)}, 'float32')", 1.0)
        a, b = self._float(depth - 1, score), self._float(depth - 1, score)
        if kind in ("sum", "difference"):
            return Float(f"({a.text} {'+' if kind == 'sum' else '-'} {b.text})", a.magnitude + b.magnitude)
        if kind == "multiply":
            return Float(f"({a.text} * {b.text})", a.magnitude * b.magnitude)
        if kind == "quotient":
            return Float(f"({a.text} / (abs({b.text}) + 0.5))", 2 * a.magnitude)
        if kind == "absolute":
            return Float(f"abs({a.text})", a.magnitude)
        if kind == "where":
            return Float(f"where({self._condition(1)}, {a.text}, {b.text})", max(a.magnitude, b.magnitude))
        if kind == "least":
            return Float(
                f"{self.rng.choice(['minimum', 'maximum'])}({a.text}, {b.text})", max(a.magnitude, b.magnitude)
            )
        return self._function(a)

    def _function(self, x: Float) -> Float:
        kind = self.rng.choice(["tanh", "exp", "exp2", "log", "log2", "sqrt", "sigmoid", "sin", "cos", "power"])
        if kind in ("exp", "exp2"):
            return Float(f"{kind}(clip({x.text}, -3, 2))", 8.0)
        if kind in ("log", "log2"):
            return Float(f"{kind}(abs({x.text}) + 0.2)", 3.0 + x.magnitude)
        if kind == "sqrt":
            return Float(f"sqrt(abs({x.text}) + 0.1)", 1.0 + x.magnitude)
        if kind == "power":
            return Float(f"clip({x.text}, -2.0, 2.0) ** {self.rng.choice([2, 3])}", 8.0)
        if kind in ("sin", "cos") and x.magnitude > 100:
            return Float(f"{kind}(tanh({x.text}))", 1.0)
        return Float(f"{kind}({x.text})", 1.0)

    # -- conditions ---------------------------------------------------------------------------------------------------

    def _condition(self, depth: int) -> str:
        kinds = ["compare", "compare", "equal", "flag", "floats"]
        if self._can_continue(depth):
            kinds = ["and", "or", "not", "xor", "where", "named", "compare", "equal", "flag"]
        kind = self.rng.choice(kinds)
        if kind == "not":
            return self.rng.choice(["~({})", "logical_not({})"]).format(self._condition(depth - 1))
        if kind == "floats":
            return f"less({self._float(1).text}, {self._float(1).text})"
        if kind == "flag":
            return self._element("bool")
        if kind in ("compare", "equal"):
            a, b = self._integer(2), self._integer(1)
            if kind == "equal":
                a = Int(f"({a.text}) % {self.rng.choice([2, 3, 5])}", None, 5)
                b = Int(str(self.rng.randint(0, 3)), None, 3)
            signs = ["==", "!="] if kind == "equal" else ["<", "<=", ">", ">="]
            return f"({a.text} {self.rng.choice(signs)} {b.text})"
        a, b = self._condition(depth - 1), self._condition(depth - 1)
        if kind == "where":
            return f"where({self._condition(0)}, {a}, {b})"
        if kind == "named":
            return f"{self.rng.choice(['logical_and', 'logical_or'])}({a}, {b})"
        return f"({a} {'&|^'[('and', 'or', 'xor').index(kind)]} {b})"

    # -- integers -----------------------------------------------------------------------------------------------------

    def _integer(self, depth: int) -> Int:
        kinds = ["index", "index", "index", "number", "element"]
        if self._can_continue(depth):
            kinds = ["sum", "difference", "scaled", "quotient", "rest", "least", "clip", "absolute", "bits", "shift",
                     "by element", "multiply", "where", "invert", "bool", "wide", "element", "index"]  # fmt: skip
        kind = self.rng.choice(kinds)
        if kind == "index":
            name = self.rng.choice("bhiijj")
            return Int(name, lambda sizes: (0, sizes[name] - 1), 600)
        if kind == "number":
            value = self.rng.randint(-5, 20)
            return Int(f"({value})", lambda sizes: (value, value), 20)
        if kind == "element":
            return Int(self._element(self.rng.choice(INTEGERS)), None, 40)
        if kind == "bool":
            return Int(f"({self._condition(0)} + {self.rng.randint(0, 3)})", None, 4)
        a = self._integer(depth - 1)
        if kind == "wide":
            return a._replace(text=f"cast({a.text}, 'int64')")
        if kind == "invert":
            return Int(
                f"(~({a.text}))", _combine_bounds(lambda x: tuple(-end - 1 for end in reversed(x)), a), a.magnitude + 1
            )
        if kind == "absolute":
            return Int(
                f"abs({a.text})", _combine_bounds(lambda x: (max(x[0], -x[1]), max(x[1], -x[0])), a), a.magnitude
            )
        if kind == "scaled":
            factor = self.rng.choice([-2, -1, 2, 3])
            scaled = _combine_bounds(lambda x: tuple(sorted(end * factor for end in x)), a)
            return _small(Int(f"({a.text} * {factor})", scaled, a.magnitude * 3))
        if kind == "quotient":
            by = self.rng.choice([2, 3, 7, 16])
            return Int(f"({a.text} // {by})", _combine_bounds(lambda x: (x[0] // by, x[1] // by), a), a.magnitude)
        if kind == "rest":
            by = self.rng.choice([2, 3, 7, 16])
            return Int(f"({a.text} % {by})", _combine_bounds(lambda x: (0, by - 1), a), by)
        if kind == "clip":
            low, high = self.rng.randint(-3, 4), self.rng.randint(5, 40)
            inside = _combine_bounds(lambda x: tuple(max(min(end, high), low) for end in x), a)
            return Int(f"clip({a.text}, {low}, {high})", inside, 40)
        if kind == "shift":
            text = self.rng.choice(["({} >> 1)", "({} >> 3)", "({} << 2)"])
            return _small(Int(text.format(a.text), None, a.magnitude * 4))
        b = self._integer(depth - 1)
        if kind == "sum":
            return Int(
                f"({a.text} + {b.text})",
                _combine_bounds(lambda x, y: (x[0] + y[0], x[1] + y[1]), a, b),
                a.magnitude + b.magnitude,
            )
        if kind == "difference":
            return Int(
                f"({a.text} - {b.text})",
                _combine_bounds(lambda x, y: (x[0] - y[1], x[1] - y[0]), a, b),
                a.magnitude + b.magnitude,
            )
        if kind == "multiply":
            ends = None
            if _constant(a.text) is not None or _constant(b.text) is not None:
                ends = _combine_bounds(lambda x, y: (min(corners := [p * q for p in x for q in y]), max(corners)), a, b)
            return _small(Int(f"({a.text} * ({b.text}))", ends, a.magnitude * b.magnitude))
        if kind == "least":
            name = self.rng.choice(["minimum", "maximum"])
            least = min if name == "minimum" else max
            ends = _combine_bounds(lambda x, y: tuple(map(least, x, y)), a, b)
            return Int(f"{name}({a.text}, {b.text})", ends, max(a.magnitude, b.magnitude))
        if kind == "bits":
            return Int(f"(({a.text}) {self.rng.choice('&|^')} ({b.text}))", None, 2 * max(a.magnitude, b.magnitude, 1))
        if kind == "where":
            return Int(f"where({self._condition(0)}, {a.text}, {b.text})", None, max(a.magnitude, b.magnitude))
        by = self._element(self.rng.choice(INTEGERS))  # it may be 0: then the divisor is another number
        by = f"where({by} == 0, 3, {by})"
        return Int(f"({a.text} {self.rng.choice(['//', '%'])} {by})", None, max(a.magnitude, 40))

    # -- arrays -------------------------------------------------------------------------------------------------------

    def _element(self, dtype: str, depth: int = 2) -> str:
        """Draw an element of a captured array, of an existing or a new one."""
        names = [name for name, array in self.arrays.items() if array.dtype == dtype and not array.wild]
        if names and self.rng.random() < 0.6:
            name = self.rng.choice(names)
        else:
            name = f"x{len(self.arrays)}"
            self.arrays[name] = Array(dtype, [[] for _ in range(self.rng.choice([0, 1, 1, 1, 2, 2, 3, 4]))])
        axes = self.arrays[name].axes
        return self._read(name, [self._index(reads, depth - 1) for reads in axes]) if axes else name

    def _read(self, name: str, indices: list[str]) -> str:
        split = self.rng.randint(1, len(indices))
        groups = (
            [indices] if self.rng.random() < 0.7 else [group for group in (indices[:split], indices[split:]) if group]
        )
        return name + "".join(f"[{', '.join(group)}]" for group in groups)

    def _index(self, reads: list[Callable[[Sizes], tuple[int, int]]], depth: int) -> str:
        """Draw an index along an axis."""
        if self.left > 0 and self.rng.random() < 0.15:
            self.left -= 1
            name = f"x{len(self.arrays)}"
            own: list[Callable[[Sizes], tuple[int, int]]] = []
            self.arrays[name] = Array(self.rng.choice(INTEGERS), [own], wild=True)
            return f"{name}[{self._index(own, 0)}]"
        index = self._integer(self.rng.choice([0, 0, 1, 2])) if depth and self.left > 0 else self._position()
        constant = _constant(index.text)
        if constant is not None:
            reads.append(lambda sizes: (constant, constant))
        elif index.bounds is not None:
            reads.append(index.bounds)
        return index.text

    def _position(self) -> Int:
        name = self.rng.choice("bhij")
        return Int(name, lambda sizes: (0, sizes[name] - 1), 600)


def _constant(text: str) -> int | None:
    """Return the value of an expression; None for one of indices or arrays."""
    try:
        return int(eval(text, {"less": operator.lt, **{name: getattr(flex, name) for name in flex.__all__}}))
    except NameError:
        return None


def _combine_bounds(combine: Callable[..., Any], *operands: Int) -> Callable[[Sizes], tuple[int, int]] | None:
    """Return the bounds that follow from those of the operands, where all have some."""
    bounds = [operand.bounds for operand in operands if operand.bounds is not None]
    return (lambda sizes: combine(*(bound(sizes) for bound in bounds))) if len(bounds) == len(operands) else None


def _small(value: Int) -> Int:
    """Return the same value, or its remainder where it could grow large."""
    return value if value.magnitude < LARGEST else Int(f"({value.text} % 1009)", None, 1009)


def _elements(array: Array, shape: list[int], rng: np.random.Generator) -> np.ndarray:
    dtype = np.dtype(array.dtype)
    if array.dtype == "bool":
        return rng.random(shape) < rng.choice([0.1, 0.5, 0.9])
    if array.dtype in FLOATS:
        return rng.uniform(-4, 4, shape).astype(dtype)
    info = np.iinfo(dtype)
    if array.wild:
        few = rng.integers(-9, 9, shape).astype(dtype)
        return np.where(rng.random(shape) < 0.5, rng.integers(info.min, info.max, shape, dtype, endpoint=True), few)
    return rng.integers(0 if info.min == 0 else -20, 40, shape).astype(dtype)
