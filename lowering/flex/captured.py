"""Arrays that a mod reads: inputs of the kernel, so that new values never ask for a new one."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from ..attention.expr.node import Expr
from ..errors import InputError
from . import traced as t
from .traced import Traced

_TYPES = (
    "bool", "int8", "int16", "int32", "int64", "uint8", "uint16", "uint32", "float16", "bfloat16", "float32", "float64",
)  # fmt: skip


@dataclass(frozen=True)
class ArraySpec:
    """What a kernel is made for: an element type, and how many dimensions."""

    dtype: str
    rank: int


def specs_of(captures: Mapping[str, Any]) -> dict[str, ArraySpec]:
    """The arrays, by name. Raises InputError for what no kernel reads."""
    found = {}
    for name, array in captures.items():
        if not isinstance(name, str) or not name.isidentifier():
            raise InputError(f"captures has the name {name!r}, which no parameter of a mod can have.")
        if isinstance(array, ArraySpec):
            found[name] = array
            continue
        if not hasattr(array, "dtype"):
            array = np.asarray(array)
        dtype = str(array.dtype).rpartition(".")[2]
        if dtype not in _TYPES:
            raise InputError(
                f"the captured array '{name}' has elements of type {dtype}. Use one of {', '.join(_TYPES)}."
            )
        found[name] = ArraySpec(dtype, len(array.shape))
    return found


class Captured:
    """An array of which no index was given yet, or not enough: captured[i, j] and captured[i][j] are elements.

    A negative index counts from the end, as in NumPy. Where the bounds of an index follow from sizes, each call checks
    that they lie inside; an index that is read from another array is moved to the nearest element.
    """

    def __init__(self, name: str, spec: ArraySpec, given: tuple[Traced, ...] = ()) -> None:
        self.name, self.spec, self._given = name, spec, given
        sizes = (Traced(Expr("scalar", "int64", value=f"{name}.{axis}")) for axis in range(spec.rank))
        self._sizes = tuple(sizes)

    @property
    def dtype(self) -> str:
        return self.spec.dtype

    @property
    def ndim(self) -> int:
        return self.spec.rank - len(self._given)

    @property
    def shape(self) -> tuple[Traced, ...]:
        """Sizes, known when the kernel runs."""
        return self._sizes[len(self._given) :]

    def __len__(self) -> int:
        raise InputError(f"the size of the captured array '{self.name}' is not known yet. Use {self.name}.shape[0].")

    def __getitem__(self, index: Any) -> Any:
        index = index if isinstance(index, tuple) else (index,)
        if len(index) > self.ndim:
            raise InputError(
                f"the captured array '{self.name}' has {_dimensions(self.spec.rank)}, and is read by more."
            )
        for at in index:
            if isinstance(at, (slice, type(None), type(Ellipsis))):
                raise InputError(f"the captured array '{self.name}' is read by one index for each dimension, not {at}.")
        given = (*self._given, *map(self._index, index))
        if len(given) < self.spec.rank:
            return Captured(self.name, self.spec, given)
        return element(self.name, self.spec.dtype, given)

    def _index(self, at: Any) -> Traced:
        index = t.traced(at)
        if "float" in index.dtype or index.dtype == "bool":
            raise InputError(
                f"the captured array '{self.name}' is read by an index of type {index.dtype}, no integer. Use //, or "
                "cast(x, 'int32')."
            )
        return index

    def refuse(self, *_: Any) -> Any:
        """Raises InputError: it is no number."""
        raise InputError(f"the captured array '{self.name}' takes part as a whole. Read one element: {self.name}[...].")

    __add__ = __radd__ = __sub__ = __rsub__ = __mul__ = __rmul__ = __truediv__ = __rtruediv__ = refuse
    __lt__ = __le__ = __gt__ = __ge__ = __neg__ = __bool__ = __float__ = __int__ = __index__ = refuse
    __eq__ = __ne__ = __and__ = __rand__ = __or__ = __ror__ = __iter__ = __contains__ = __array__ = refuse
    __hash__ = None  # type: ignore[assignment]


def _dimensions(rank: int) -> str:
    return "1 dimension" if rank == 1 else f"{rank} dimensions"


def parameter(name: str, spec: ArraySpec) -> Captured | Traced:
    """What a mod gets for a captured array: of one without dimensions the number."""
    return Captured(name, spec) if spec.rank else element(name, spec.dtype, (t.traced(0),))


def element(name: str, dtype: str, index: tuple[Traced, ...]) -> Traced:
    load = Traced(Expr("load", dtype, tuple(at.expr for at in index), name), index)
    return t.joined("cast", wide, load) if (wide := t.type_name(dtype)) != dtype else load
