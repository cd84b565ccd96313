"""The importer's description of an ONNX value: element type, symbolic shape, and contents if they can be computed.

Shapes are tuples of Python ints and, where a size is symbolic, int64 TensorIR expressions. Integer tensors computed
from shapes have contents, an array of such sizes, so that Shape -> Gather -> Mul -> Concat -> Reshape never becomes
tensor code.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable
from dataclasses import dataclass, replace
from itertools import islice
from typing import Any, TypeAlias

import ml_dtypes
import numpy as np
from tvm import ir, relax, sym, tirx

from ..arithmetic import LARGEST_SIZE
from ..tensorir.expressions import walk

Size: TypeAlias = Any  # int | tirx expression of dtype int64 (bool for contents of boolean tensors)
Shape: TypeAlias = tuple[Size, ...]

# More bytes than any machine has.
MAX_TENSOR_BYTES = 2**46

# The limit of a dimension computed from a model's constants; TVM's 32-bit arithmetic overflows soon after it.
MAX_DIMENSION = 10**9

# Quoted text; a number as TVM prints it; the prefix of TVM's functions.
_PRINTED = re.compile(r"(?<!\w)('[^'\n]*')|T\.int64\((-?\d+)\)|\bT\.(?=[a-z])")

# Operations in the expression of a size. Models have a few tens; the time to simplify grows faster than the number.
_MAX_OPERATIONS = 32


class Symbols:
    """The symbolic sizes of one model: each is at least 0, and equal names mean equal sizes."""

    def __init__(self) -> None:
        self._analyzer = sym.Analyzer()
        self._named: dict[str, tirx.Var] = {}
        self._taken: set[str] = set()
        self._said: dict[str, str] = {}  # the model's names of sizes, by ours

    def get_named(self, name: str) -> tirx.Var:
        """Return the size that the model calls `name`; it is created at first use."""
        if name not in self._named:
            self._named[name] = self.fresh(name)
            self._said[self._named[name].name] = name
        return self._named[name]

    def is_declared(self, size: Size | str) -> bool:
        """Return whether inputs declare that size, or one of that name."""
        return size in self._named if isinstance(size, str) else isinstance(size, tirx.Var) and size.name in self._said

    def fresh(self, hint: str, signed: bool = False) -> tirx.Var:
        """Return a new size without facts other than that it is not negative; a signed one may be."""
        stem = "".join(c if c.isalnum() and c.isascii() else "_" for c in hint) or "n"
        stem = stem if not stem[0].isdigit() else f"n_{stem}"
        name, k = stem, 1
        while name in self._taken:
            name, k = f"{stem}_{k}", k + 1
        self._taken.add(name)
        var = tirx.Var(name, "int64")
        if not signed:
            self._analyzer.bind(var, ir.Range(0, LARGEST_SIZE))
        return var

    def to_dim(self, size: Size) -> int | str:
        """Return a size for the manifest: a number, the model's name, or a readable expression of names."""
        if isinstance(size, int):
            return size
        if isinstance(size, tirx.Var):  # TVM prints some variables under other names
            return self._said.get(size.name, size.name)
        return re.sub(r"[A-Za-z_]\w*", self._said_of, format_size(size))

    def _said_of(self, match: re.Match[str]) -> str:
        return self._said.get(match[0], match[0])

    def simplify(self, size: Size) -> Size:
        """Return the simplest equal size: a Python int (or bool) if it is constant."""
        if isinstance(size, (bool, np.bool_)):
            return bool(size)
        if isinstance(size, (int, np.integer)):
            return int(size)
        size = self._analyzer.simplify(size)
        if isinstance(size, tirx.IntImm):
            return bool(size.value) if str(size.ty.dtype) == "bool" else int(size.value)
        return size

    def equal(self, a: Size, b: Size) -> bool:
        """Return whether the two sizes are provably equal."""
        if isinstance(a, int) and isinstance(b, int):
            return a == b
        return bool(self._analyzer.can_prove_equal(a, b))

    def prove(self, condition: Size) -> bool:
        """Return whether the boolean expression provably holds."""
        return bool(condition) if isinstance(condition, (bool, np.bool_)) else bool(self._analyzer.can_prove(condition))


def static(size: Size) -> int | None:
    """Return the size if it is a number, else None."""
    return size if isinstance(size, int) else None


def is_one(size: Size) -> bool:
    """Return whether a size is statically 1."""
    return isinstance(size, (int, tirx.IntImm)) and int(size) == 1


def format_size(size: Size) -> str:
    """Return a size as readable text."""
    return strip_types(str(size))


def strip_types(text: str) -> str:
    """Return a text with sizes printed by TVM in readable form. Quoted text is the user's, and stays."""
    return _PRINTED.sub(lambda match: match[1] or match[2] or "", text)


def is_long(size: Size) -> bool:
    """Return whether an expression is too long to compute with further (`FunctionTensors.shorten`)."""
    return (
        not isinstance(size, (int, tirx.Var))
        and sum(1 for _ in islice(walk(size), _MAX_OPERATIONS + 1)) > _MAX_OPERATIONS
    )


@dataclass(frozen=True, eq=False)
class Value:
    """An ONNX value: a tensor in the Relax function (`expr`), contents, or both.

    dtype is NumPy's or ml_dtypes' name of the ONNX element type, or "string"; the Relax tensor has
    `storage_dtype(dtype)`. contents is an array of `shape`: of numbers for a constant, of objects (ints and TensorIR
    expressions) for integers and booleans computed from sizes. channels_last replaces an `expr` that is not needed yet:
    it is the tensor with its second axis moved to the end (ops/helpers/channels.py).
    """

    dtype: str
    shape: Shape
    expr: relax.Expr | None = None
    contents: np.ndarray | None = None
    channels_last: relax.Expr | None = None

    @property
    def rank(self) -> int:
        return len(self.shape)

    @property
    def static(self) -> bool:
        """Whether every dimension is a number."""
        return all(isinstance(d, int) for d in self.shape)

    @property
    def constant(self) -> np.ndarray | None:
        """The contents if they are numbers only, else None."""
        if self.contents is None or self.contents.dtype != object or self.dtype == "string":
            return self.contents
        if all(isinstance(c, (int, bool)) for c in self.contents.flat):
            return self.contents.astype(self.dtype)
        return None

    def sizes(self) -> list[Size]:
        """Return the contents as a flat list of sizes; only for values with integer contents."""
        assert self.contents is not None
        return [int(c) if isinstance(c, (int, np.integer, np.bool_)) else c for c in self.contents.flat]


@dataclass(frozen=True, eq=False)
class SequenceValue(Value):
    """A sequence of tensors of type `dtype` and static length. Only its items have tensors.

    Its shape is ().
    """

    items: tuple[Value, ...] = ()


@dataclass(frozen=True, eq=False)
class AbsentValue(SequenceValue):
    """An optional value without an element: no tensors. Nodes that read it see an omitted input."""


ABSENT = AbsentValue("float32", ())


def describe_type(value: Value) -> str:
    """Return the description of a value's type in errors."""
    if isinstance(value, AbsentValue):
        return "an optional value without an element"
    if isinstance(value, SequenceValue):
        return f"a sequence of {len(value.items)} tensors of {value.dtype}"
    return f"{value.dtype} of rank {value.rank}"


def flatten_values(values: Iterable[Value]) -> list[Value]:
    """Return the tensors of values, those of sequences one after the other."""
    return [item for value in values for item in (value.items if isinstance(value, SequenceValue) else (value,))]


def unflatten_values(tensors: Iterable[Value], like: Iterable[Value]) -> list[Value]:
    """Return values of the kinds of `like`; the inverse of `flatten_values`."""
    rest = iter(tensors)
    return [
        replace(value, items=tuple(islice(rest, len(value.items)))) if isinstance(value, SequenceValue) else next(rest)
        for value in like
    ]


def numpy_dtype(dtype: str) -> np.dtype:
    """Return NumPy's or ml_dtypes' type of that name."""
    return np.dtype(getattr(ml_dtypes, dtype, dtype))


_STORAGE = {
    "int2": "int8",
    "uint2": "uint8",
    "int4": "int8",
    "uint4": "uint8",
    "float4_e2m1fn": "uint8",
    "float8_e4m3fn": "uint8",
    "float8_e4m3fnuz": "uint8",
    "float8_e5m2": "uint8",
    "float8_e5m2fnuz": "uint8",
    "float8_e8m0fnu": "uint8",
    "complex64": "uint64",
    "complex128": "uint64",
    "string": "int32",
}


def channels_second_axes(rank: int) -> list[int]:
    """Return the permutation from [N, D1, ..., C] to [N, C, D1, ...]."""
    return [0, rank - 1, *range(1, rank - 1)]


def storage_dtype(dtype: str) -> str:
    """Return the Relax element type that stores ONNX elements of `dtype` (docs/architecture/importing.md)."""
    return _STORAGE.get(dtype, dtype)


def storage_shape(dtype: str, shape: Shape) -> Shape:
    """Return the Relax shape that stores an ONNX tensor of `shape`."""
    return (*shape, 2) if dtype == "complex128" else shape


def storage_array(array: np.ndarray) -> np.ndarray:
    """Return the same bytes in the storage type of the compiled code (all types but strings)."""
    dtype = array.dtype.name
    if dtype not in _STORAGE:
        return array
    array = np.asarray(array, order="C")
    if dtype == "complex128":
        return array.view("uint64").reshape(*array.shape, 2)
    return array.view(_STORAGE[dtype])


def is_empty(shape: Shape) -> bool:
    """Return whether a tensor of this shape is statically empty."""
    return any(isinstance(d, int) and d == 0 for d in shape)


def prod(sizes: Iterable[Size]) -> Size:
    """Return the product of sizes, 1 for none."""
    return math.prod(sizes)
