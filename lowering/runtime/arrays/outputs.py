"""Convert the tensors that a call returns to arrays of the caller's kind."""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import tvm_ffi

from ...errors import InputError
from ...manifest import TensorSpec
from ..gpu import CPU
from .elements import ElementType
from .strings import StringTable
from .tensors import Tensor, copy_to, view_as

# Creates an array of a library from any object with DLPack.
FromDLPack = Callable[[Any], Any]


def find_from_dlpack(array: Any) -> FromDLPack:
    """Return the from_dlpack function of the library that `array` belongs to.

    For tvm_ffi's own tensors it is that of tvm_ffi. Otherwise it is that of the array's array-API namespace, or of the
    top-level package of its type. Raises InputError for types without one.
    """
    if isinstance(array, Tensor):
        return tvm_ffi.from_dlpack
    if hasattr(array, "__array_namespace__"):
        return array.__array_namespace__().from_dlpack
    package = type(array).__module__.partition(".")[0]
    function = getattr(sys.modules.get(package), "from_dlpack", None)
    if function is None:
        raise InputError(
            "output.library_unsupported",
            f"the package '{package}' of {type(array).__name__} arrays has no from_dlpack: "
            "outputs cannot be returned as such arrays. Pass NumPy arrays.",
        )
    return function


def detect_array_kind(inputs: Mapping[str, Any]) -> tuple[FromDLPack, bool]:
    """Return from_dlpack of the caller's array library, and whether its arrays are in host memory.

    Raises InputError if `inputs` is not a mapping of arrays by name.
    """
    if type(inputs) is not dict and not isinstance(inputs, Mapping):
        raise InputError(
            "input.mapping_required",
            f"the inputs are a {type(inputs).__name__}; pass a dict of arrays by the names of inputs.",
        )
    for array in inputs.values():
        if type(array) is np.ndarray or isinstance(array, (np.ndarray, np.generic)):
            continue
        if hasattr(array, "__dlpack__"):
            return find_from_dlpack(array), _is_on_host(array)
    return np.from_dlpack, True


def _is_on_host(array: Any) -> bool:
    try:
        return array.__dlpack_device__()[0] == CPU
    except Exception:  # a device that DLPack does not know, which the input's port rejects
        return True


class OutputPort:
    """The interface for arrays of one output."""

    def __init__(self, spec: TensorSpec) -> None:
        self.name = spec.name
        self.element = ElementType(spec.dtype, spec.storage)
        self._is_plain = not (self.element.is_carried or self.element.is_text)

    def deliver(self, tensor: Tensor, from_dlpack: FromDLPack, strings: StringTable) -> Any:
        """Return an array over the tensor's memory.

        Strings are always returned as NumPy arrays of dtype object. Types that other libraries lack (int4, uint4,
        float4) are returned to them as one byte per element. Raises InputError for an empty array too large for NumPy.
        """
        try:
            if self._is_plain:
                return from_dlpack(tensor)
            if from_dlpack is np.from_dlpack or self.element.is_text:
                return self._to_numpy(tensor, strings)
            if self.element.numpy.kind == "c":
                return from_dlpack(self._to_numpy(tensor, strings))
            if self.element.name.startswith("float8"):
                return from_dlpack(view_as(tensor, self.element.name, tensor.shape))
            return from_dlpack(tensor)
        except ValueError as error:
            if 0 not in tensor.shape:
                raise
            # NumPy counts bytes without regard to dimensions of size 0.
            dims = ", ".join(map(str, tensor.shape))
            raise InputError(
                "output.shape_unsupported",
                f"output '{self.name}' has the shape [{dims}], which NumPy does not support: {error}",
            ) from error

    def _to_numpy(self, tensor: Tensor, strings: StringTable) -> np.ndarray:
        if self.element.is_text:
            return strings.decode(np.from_dlpack(tensor))
        if self.element.carrier != self.element.storage:
            tensor = view_as(tensor, self.element.carrier.name, tensor.shape)
        return self.element.uncarry(np.from_dlpack(tensor))


def check_output(name: str, result: Tensor, target: Tensor) -> None:
    """Raise InputError if a result does not have the shape of the array that is bound to the output."""
    if result.shape != target.shape:
        raise InputError(
            "output.shape_mismatch",
            f"output '{name}' has shape {list(result.shape)}, but the array bound to it has {list(target.shape)}.",
        )


def write_output(result: Tensor, target: Tensor) -> None:
    """Copy a result to the array that is bound to its output."""
    if result.data_ptr() != target.data_ptr():
        copy_to(result, target)
