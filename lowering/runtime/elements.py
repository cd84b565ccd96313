"""How elements of each type cross the border: docs/architecture.md, Element types."""

from __future__ import annotations

import ml_dtypes
import numpy as np

# Neither NumPy nor DLPack passes these arrays on as what they are. They travel as arrays of another type of the same
# bytes, and get their storage type on the other side.
_CARRIERS = {
    "bfloat16": "uint16",
    "float8_e4m3fn": "uint8",
    "float8_e4m3fnuz": "uint8",
    "float8_e5m2": "uint8",
    "float8_e5m2fnuz": "uint8",
    "float8_e8m0fnu": "uint8",
    "int2": "int8",
    "uint2": "uint8",
    "int4": "int8",
    "uint4": "uint8",
    "float4_e2m1fn": "uint8",
    "complex64": "uint64",
    "complex128": "uint64",
}

STORAGE = {
    **{t: t for t in ("float16", "float32", "float64", "bfloat16", "bool", "int8", "int16", "int32", "int64")},
    **{t: t for t in ("uint8", "uint16", "uint32", "uint64")},
    **{name: carrier for name, carrier in _CARRIERS.items() if name != "bfloat16"},
    "string": "int32",
}
"""The type in which the compiled code sees elements, by the name that users see."""

# Types that other array libraries lack: their arrays hold one byte per element instead, of the storage type.
BYTES_ELSEWHERE = frozenset({"int2", "uint2", "int4", "uint4", "float4_e2m1fn"})


def itemsize(storage: str) -> int:
    """Bytes of an element of a storage type."""
    return np.dtype(_CARRIERS.get(storage, storage)).itemsize


class ElementType:
    """One element type, as users see it (`name`) and as the compiled code does (`storage`).

    numpy is the NumPy type, object for strings; carrier is the NumPy type that DLPack carries; itemsize is the bytes
    of an element of storage (and of carrier); pair says that an element of numpy is two of storage, in a last axis of
    their own.
    """

    def __init__(self, name: str, storage: str) -> None:
        self.name, self.storage = name, storage
        self.text = name == "string"
        self.numpy = np.dtype(object if self.text else getattr(ml_dtypes, name, name))
        self.carrier = np.dtype("int32" if self.text else _CARRIERS.get(name, name))
        self.carried = self.carrier != self.numpy
        self.pair = name == "complex128"
        self.itemsize = self.carrier.itemsize

    def carry(self, array: np.ndarray) -> np.ndarray:
        """A view of an array of type numpy as type carrier."""
        return (array[..., None] if self.pair else array).view(self.carrier)

    def uncarry(self, array: np.ndarray) -> np.ndarray:
        """The inverse of `carry`."""
        return array.view(self.numpy)[..., 0] if self.pair else array.view(self.numpy)
