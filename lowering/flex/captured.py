"""Arrays that a mod reads: inputs of the kernel, so that new values never require a new kernel."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from ..attention.expr.node import Expr
from ..errors import InputError
from . import traced as t
from .traced import NotANumber, Traced

_TYPES = (
    "bool", "int8", "int16", "int32", "int64", "uint8", "uint16", "uint32", "float16", "bfloat16", "float32", "float64",
)  # fmt: skip


@dataclass(frozen=True)
class ArraySpec:
    """The element type and the number of dimensions for which a kernel is compiled."""

    dtype: str
    rank: int


def read_array_specs(captures: Mapping[str, Any]) -> dict[str, ArraySpec]:
    """Return the specs of the arrays by name. Raises InputError for an array that no kernel can read."""
    specs = {}
    for name, array in captures.items():
        if not isinstance(name, str) or not name.isidentifier():
            raise InputError(
                "flex.capture_name_invalid",
                f"captures has the name {name!r}, which cannot be a parameter of a mod. Use a Python identifier.",
            )
        if isinstance(array, ArraySpec):
            specs[name] = array
            continue
        if not hasattr(array, "dtype"):
            array = np.asarray(array)
        dtype = str(array.dtype).rpartition(".")[2]
        if dtype not in _TYPES:
            raise InputError(
                "flex.capture_dtype_unsupported",
                f"the captured array '{name}' has elements of type {dtype}. Use one of {', '.join(_TYPES)}.",
            )
        specs[name] = ArraySpec(dtype, len(array.shape))
    return specs


class Captured(NotANumber):
    """An array with no indices yet, or too few: captured[i, j] and captured[i][j] are elements.

    A negative index counts from the end, as in NumPy. If the bounds of an index follow from sizes, each call checks
    that they are inside; an index that is read from another array is moved to the nearest element.
    """

    def __init__(self, name: str, spec: ArraySpec, indices: tuple[Traced, ...] = ()) -> None:
        self.name, self.spec, self._indices = name, spec, indices
        sizes = (Traced(Expr("scalar", "int64", value=f"{name}.{axis}")) for axis in range(spec.rank))
        self._sizes = tuple(sizes)

    @property
    def dtype(self) -> str:
        return self.spec.dtype

    @property
    def ndim(self) -> int:
        return self.spec.rank - len(self._indices)

    @property
    def shape(self) -> tuple[Traced, ...]:
        """Sizes, bound when the kernel runs."""
        return self._sizes[len(self._indices) :]

    def __len__(self) -> int:
        raise InputError(
            "flex.capture_size_unknown",
            f"the size of the captured array '{self.name}' is not known while a mod is traced. Use "
            f"{self.name}.shape[0].",
        )

    def __getitem__(self, index: Any) -> Any:
        index = index if isinstance(index, tuple) else (index,)
        if len(index) > self.ndim:
            raise InputError(
                "flex.capture_index_count",
                f"the captured array '{self.name}' has {_format_rank(self.spec.rank)}, but is read by {len(index)} "
                "indices.",
            )
        for item in index:
            if isinstance(item, (slice, type(None), type(Ellipsis))):
                raise InputError(
                    "flex.capture_index_unsupported",
                    f"the captured array '{self.name}' must be read by one index for each dimension, not by {item}.",
                )
        indices = (*self._indices, *map(self._read_index, index))
        if len(indices) < self.spec.rank:
            return Captured(self.name, self.spec, indices)
        return load_element(self.name, self.spec.dtype, indices)

    def _read_index(self, item: Any) -> Traced:
        index = t.trace_value(item)
        if "float" in index.dtype or index.dtype == "bool":
            raise InputError(
                "flex.capture_index_dtype",
                f"the captured array '{self.name}' is read by an index of type {index.dtype}, which is not an "
                "integer. Use //, or cast(x, 'int32').",
            )
        return index

    def reject_whole_array(self, *_: Any) -> Any:
        """Raise InputError: the array is not a number."""
        raise InputError(
            "flex.capture_as_number",
            f"the captured array '{self.name}' is used as a number. Read one element: {self.name}[...].",
        )

    __add__ = __radd__ = __sub__ = __rsub__ = __mul__ = __rmul__ = __truediv__ = __rtruediv__ = reject_whole_array
    __lt__ = __le__ = __gt__ = __ge__ = __neg__ = __bool__ = __float__ = __int__ = __index__ = reject_whole_array
    __eq__ = __ne__ = __and__ = __rand__ = __or__ = __ror__ = __iter__ = __contains__ = __array__ = reject_whole_array
    __hash__ = None  # type: ignore[assignment]


def _format_rank(rank: int) -> str:
    return "1 dimension" if rank == 1 else f"{rank} dimensions"


def make_parameter(name: str, spec: ArraySpec) -> Captured | Traced:
    """Return the argument of a mod for a captured array: the number itself if it has no dimensions."""
    return Captured(name, spec) if spec.rank else load_element(name, spec.dtype, (t.trace_value(0),))


def load_element(name: str, dtype: str, index: tuple[Traced, ...]) -> Traced:
    load = Traced(Expr("load", dtype, tuple(position.expr for position in index), name), index)
    return t.make_operation("cast", kernel_dtype, load) if (kernel_dtype := t.promote_dtype(dtype)) != dtype else load
