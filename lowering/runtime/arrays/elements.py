"""Conversions of array elements between callers and compiled code: docs/architecture/importing.md, Element types."""

from __future__ import annotations

import ml_dtypes
import numpy as np

# Types that NumPy or DLPack cannot exchange. Arrays of another type of the same size carry them, and get their storage
# type on the other side.
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

STORAGE_TYPES = {
    **{t: t for t in ("float16", "float32", "float64", "bfloat16", "bool", "int8", "int16", "int32", "int64")},
    **{t: t for t in ("uint8", "uint16", "uint32", "uint64")},
    **{name: carrier for name, carrier in _CARRIERS.items() if name != "bfloat16"},
    "string": "int32",
}
"""The storage type of elements in compiled code, by the name that users see."""

# Types that other array libraries lack: their arrays have one byte per element instead, of the storage type.
BYTE_CARRIED_TYPES = frozenset({"int2", "uint2", "int4", "uint4", "float4_e2m1fn"})


def itemsize(storage: str) -> int:
    """Return the bytes of an element of a storage type."""
    return np.dtype(_CARRIERS.get(storage, storage)).itemsize


class ElementType:
    """An element type, as users see it (`name`) and as the compiled code does (`storage`).

    numpy is the NumPy type, object for strings. carrier is the NumPy type that DLPack exchanges. itemsize is the bytes
    of an element of storage (and of carrier). is_pair says that an element of numpy is two of storage, along an
    additional last axis.
    """

    def __init__(self, name: str, storage: str) -> None:
        self.name, self.storage = name, storage
        self.is_text = name == "string"
        self.numpy = np.dtype(object if self.is_text else getattr(ml_dtypes, name, name))
        self.carrier = np.dtype("int32" if self.is_text else _CARRIERS.get(name, name))
        self.is_carried = self.carrier != self.numpy
        self.is_pair = name == "complex128"
        self.itemsize = self.carrier.itemsize

    def carry(self, array: np.ndarray) -> np.ndarray:
        """Return a view of an array of type numpy as type carrier."""
        return (array[..., None] if self.is_pair else array).view(self.carrier)

    def uncarry(self, array: np.ndarray) -> np.ndarray:
        """Return the inverse view of `carry`."""
        return array.view(self.numpy)[..., 0] if self.is_pair else array.view(self.numpy)
