"""Tensors that a call returns become arrays of the kind that the caller passed in."""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import tvm_ffi

from ..errors import InputError
from ..manifest import TensorSpec
from .elements import ElementType
from .gpu import CPU
from .strings import Dictionary
from .tensors import Tensor, copy_to, view_as

# Makes an array of some library from anything that speaks DLPack.
FromDLPack = Callable[[Any], Any]


def from_dlpack_of(array: Any) -> FromDLPack:
    """The from_dlpack function of the library that `array` belongs to.

    It is that of tvm_ffi for its own tensors, of the array's own array-API namespace, or of the top-level package
    of its type. Raises InputError for types that have none.
    """
    if isinstance(array, Tensor):
        return tvm_ffi.from_dlpack
    if hasattr(array, "__array_namespace__"):
        return array.__array_namespace__().from_dlpack
    package = type(array).__module__.partition(".")[0]
    function = getattr(sys.modules.get(package), "from_dlpack", None)
    if function is None:
        raise InputError(
            f"the package '{package}' of {type(array).__name__} arrays has no from_dlpack: "
            "outputs could not be given back in kind. Pass NumPy arrays."
        )
    return function


def kind_of(inputs: Mapping[str, Any]) -> tuple[FromDLPack, bool]:
    """What makes the caller's kind of array, and whether that is in the host's memory. Raises InputError for what holds
    no arrays by name."""
    if not isinstance(inputs, Mapping):
        raise InputError(f"the inputs are a {type(inputs).__name__}; pass a dict of arrays by the names of inputs.")
    for array in inputs.values():
        if type(array) is np.ndarray or isinstance(array, (np.ndarray, np.generic)):
            continue
        if hasattr(array, "__dlpack__"):
            return from_dlpack_of(array), _on_host(array)
    return np.from_dlpack, True


def _on_host(array: Any) -> bool:
    try:
        return array.__dlpack_device__()[0] == CPU
    except Exception:  # of a kind that DLPack does not know, which the input's port refuses
        return True


class OutputPort:
    """The border for one output."""

    def __init__(self, spec: TensorSpec) -> None:
        self.name = spec.name
        self.element = ElementType(spec.dtype, spec.storage)
        self._plain = not (self.element.carried or self.element.text)

    def deliver(self, tensor: Tensor, from_dlpack: FromDLPack, strings: Dictionary) -> Any:
        """An array over the tensor's memory.

        Strings are always given as NumPy arrays of dtype object. Types that other libraries lack (int4, uint4,
        float4) are given to them as one byte per element. Raises InputError for an empty one too large for NumPy.
        """
        try:
            if self._plain:
                return from_dlpack(tensor)
            if from_dlpack is np.from_dlpack or self.element.text:
                return self._numpy(tensor, strings)
            if self.element.numpy.kind == "c":
                return from_dlpack(self._numpy(tensor, strings))
            if self.element.name.startswith("float8"):
                return from_dlpack(view_as(tensor, self.element.name, tensor.shape))
            return from_dlpack(tensor)
        except ValueError as error:
            if 0 not in tensor.shape:
                raise
            # NumPy counts bytes without regard to dimensions of size 0.
            dims = ", ".join(map(str, tensor.shape))
            raise InputError(
                f"output '{self.name}' has the shape [{dims}], which no array can have: {error}"
            ) from error

    def _numpy(self, tensor: Tensor, strings: Dictionary) -> np.ndarray:
        if self.element.text:
            return strings.decode(np.from_dlpack(tensor))
        if self.element.carrier != self.element.storage:
            tensor = view_as(tensor, self.element.carrier.name, tensor.shape)
        return self.element.uncarry(np.from_dlpack(tensor))


def check_output(name: str, result: Tensor, target: Tensor) -> None:
    """Raise InputError for a result that has not the shape of the array that is bound to the output."""
    if result.shape != target.shape:
        raise InputError(
            f"output '{name}' has shape {list(result.shape)}, but the array bound to it has {list(target.shape)}."
        )


def write_output(result: Tensor, target: Tensor) -> None:
    """Copy a result to the array that is bound to its output."""
    if result.data_ptr() != target.data_ptr():
        copy_to(result, target)
