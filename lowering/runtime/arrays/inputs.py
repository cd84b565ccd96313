"""Convert callers' arrays to tensors: check them against the model first, and copy only if necessary."""

from __future__ import annotations

import ctypes
import itertools
import sys
from collections.abc import Mapping, Sequence
from functools import cache
from typing import Any

import numpy as np
import tvm_ffi

from ...errors import InputError
from ...manifest import TensorSpec
from ..gpu import CPU, CUDA
from .elements import BYTE_CARRIED_TYPES, ElementType
from .strings import StringTable
from .tensors import Tensor, view_as

# Sizes of the symbolic dimensions of a call so far, each with the array that it comes from.
Sizes = dict[str, tuple[int, str]]

_capsule_is_valid = ctypes.PYFUNCTYPE(ctypes.c_int, ctypes.py_object, ctypes.c_char_p)(
    ("PyCapsule_IsValid", ctypes.pythonapi)
)
_capsule_pointer = ctypes.PYFUNCTYPE(ctypes.c_void_p, ctypes.py_object, ctypes.c_char_p)(
    ("PyCapsule_GetPointer", ctypes.pythonapi)
)


class InputPort:
    """The interface for arrays of one input, or of one output that the caller provides memory for.

    role is its name in messages. no_copy_reason is a clause for messages that says why arrays are never copied, or None
    if they may be. is_written requires arrays to be writable. gpu is the number of a GPU whose memory is accepted as
    well.
    """

    def __init__(
        self,
        spec: TensorSpec,
        role: str,
        ranges: Mapping[str, tuple[int, int]],
        no_copy_reason: str | None = None,
        is_written: bool = False,
        gpu: int | None = None,
    ) -> None:
        self.spec = spec
        self.name = spec.name
        self.is_written = is_written
        self._no_copy_reason = no_copy_reason
        self.where = f"{role} '{spec.name}'"
        self._devices = {(CPU, 0)} if gpu is None else {(CPU, 0), (CUDA, gpu)}
        self.element = ElementType(spec.dtype, spec.storage)
        self._numpy = self.element.numpy
        self._is_plain = not (self.element.is_carried or self.element.is_text)
        self._dims = spec.dims
        self._is_simple = self._is_plain and bool(spec.dims)
        self._ranges = ranges

    def accept(self, array: Any, sizes: Sizes | None, strings: StringTable) -> Tensor:
        """Return the tensor of the array's memory, or of a copy that the compiled code can read.

        sizes collects the symbolic dimensions of a call. It is None if all shapes of the call were checked before.
        Raises InputError for any array that the model does not take, before anything is written.
        """
        was_checked = sizes is None and self._is_simple and type(array) is np.ndarray and array.dtype is self._numpy
        if was_checked and array.flags.carray and array.size:  # the common case, without further checks
            return tvm_ffi.from_dlpack(array)
        if type(array) is not np.ndarray:
            if not isinstance(array, (np.ndarray, np.generic)):
                return self._accept_foreign(array, sizes, strings)
            array = to_numpy_array(array, self.where)
        if array.dtype is not self._numpy and array.dtype != self._numpy:
            self._check_dtype(array)
        if not self._dims and array.shape == (1,):  # the form of a scalar in other runtimes
            array = array.reshape(())
        if sizes is not None:
            self._check_shape(array.shape, sizes)
        if self._is_plain and array.flags.carray and array.size:
            return tvm_ffi.from_dlpack(array)
        return self._convert(array, strings)

    def snapshot(self, array: Any, sizes: Sizes, strings: StringTable) -> Any:
        """Return a copy of an array that `accept` takes, or the tensor itself in a GPU's memory.

        `accept` takes the return value even if the caller's array changes. Raises InputError as `accept` does.
        """
        if isinstance(array, (np.ndarray, np.generic)):
            self.accept(array, sizes, strings)
            return np.array(array, order="C")
        tensor = self._import_checked(array, sizes)
        if tensor.__dlpack_device__()[0] == CPU:
            return _StridedView(tensor, self.element.numpy).to_array().copy()
        self._accept_foreign(tensor, sizes, strings)  # checks the strides
        return tensor

    # -- checks -------------------------------------------------------------------------------------------------------

    def _check_dtype(self, array: np.ndarray) -> None:
        if self.element.is_text and array.dtype.kind in "UT":
            return
        actual = array.dtype.name if array.dtype.isnative else array.dtype.str
        expected = "an array of str, of dtype object" if self.element.is_text else self.spec.dtype
        raise InputError(
            "input.dtype_mismatch", f"{self.where} must be {expected}, not {actual}. Convert it with astype."
        )

    def _check_shape(self, shape: tuple[int, ...], sizes: Sizes) -> None:
        if len(shape) != len(self._dims):
            raise InputError(
                "input.rank_mismatch",
                f"{self.where} must have {len(self._dims)} dimensions, {self._shape_text()}, "
                f"not {len(shape)}: its shape is {list(shape)}.",
            )
        for axis, (dim, size) in enumerate(zip(self._dims, shape)):
            if isinstance(dim, int):
                if dim != size:
                    raise InputError(
                        "input.size_mismatch",
                        f"{self.where} must have size {dim} along axis {axis}, not {size}: "
                        f"it takes {self._shape_text()} and its shape is {list(shape)}.",
                    )
                continue
            earlier = sizes.get(dim)
            if earlier is None:
                sizes[dim] = (size, self.where)
                low, high = self._ranges.get(dim, (0, size))
                if not low <= size <= high:
                    raise InputError(
                        "input.dimension_out_of_range",
                        f"dimension '{dim}' is {size} in {self.where} (axis {axis}); the model takes {low} to {high}.",
                    )
            elif earlier[0] != size:
                raise InputError(
                    "input.dimension_mismatch",
                    f"dimension '{dim}' is {size} in {self.where} (axis {axis}) but {earlier[0]} in "
                    f"{earlier[1]}; sizes of one name must be equal.",
                )

    def _shape_text(self) -> str:
        return f"[{', '.join(map(str, self._dims))}]"

    # -- arrays that need a conversion --------------------------------------------------------------------------------

    def _convert(self, array: np.ndarray, strings: StringTable) -> Tensor:
        if self.element.is_text:
            self._reject_copy("contains strings, which the compiled code reads as numbers")
            array = strings.encode(array, self.where)
        elif self.element.is_carried:
            array = self.element.carry(array)
        flags = array.flags
        if not (flags.c_contiguous and flags.aligned):
            self._reject_copy("is not aligned to its elements" if flags.c_contiguous else "is not C-contiguous")
            array = array.copy()
        elif not flags.writeable and self.is_written:
            raise InputError(
                "input.read_only", f"{self.where} is read-only, but {self._no_copy_reason}. Pass a writable array."
            )
        # NumPy exports read-only memory only by DLPack 1, which has a flag for it.
        exportable = array if array.flags.writeable else array.__dlpack__(max_version=(1, 0))
        return self._as_storage(tvm_ffi.from_dlpack(exportable), array.shape)

    def _reject_copy(self, problem: str) -> None:
        if self._no_copy_reason is not None:
            raise InputError("input.copy_required", f"{self.where} {problem}, but {self._no_copy_reason}.")

    def _accept_foreign(self, array: Any, sizes: Sizes | None, strings: StringTable) -> Tensor:
        """Return the tensor of another library's array, through DLPack."""
        tensor = self._import_checked(array, sizes)
        shape = tensor.shape
        if self.is_written and _is_read_only(array):
            raise InputError(
                "input.read_only", f"{self.where} is read-only, but {self._no_copy_reason}. Pass a writable array."
            )
        if not tensor.is_contiguous() or tensor.data_ptr() % self.element.itemsize:
            self._reject_copy("is not C-contiguous")
            if tensor.__dlpack_device__()[0] != CPU:
                raise InputError(
                    "input.not_contiguous",
                    f"{self.where} is not C-contiguous. Make it so: only the CPU's arrays are copied.",
                )
            return self._convert(_StridedView(tensor, self.element.numpy).to_array().copy(), strings)
        return self._as_storage(tensor, (*shape, 2) if self.element.is_pair else shape)

    def _import_checked(self, array: Any, sizes: Sizes | None) -> Tensor:
        """Return the tensor of another library's array, after checking type and shape."""
        if not (hasattr(array, "__dlpack__") and hasattr(array, "dtype")):
            raise InputError(
                "input.type_unsupported",
                f"{self.where} is a {type(array).__name__}; pass a NumPy array, or any array with "
                "__dlpack__ and dtype.",
            )
        if self.element.is_text:
            raise InputError(
                "input.text_array_required", f"{self.where} must be a NumPy array of str, not a {type(array).__name__}."
            )
        name = _dtype_name(array.dtype)
        if name != (self.spec.storage if self.element.name in BYTE_CARRIED_TYPES else self.spec.dtype):
            raise InputError("input.dtype_mismatch", f"{self.where} must be {self.spec.dtype}, not {name}.")
        tensor = self._import(self._resolve_views(array))
        if sizes is not None:
            self._check_shape(tensor.shape, sizes)
        return tensor

    def _resolve_views(self, array: Any) -> Any:
        """Materialize PyTorch tensors whose memory differs from their values, which DLPack may not show."""
        torch = sys.modules.get("torch")
        if torch is None or not isinstance(array, torch.Tensor):
            return array
        if type(array).__torch_dispatch__ is not torch.Tensor.__torch_dispatch__:
            raise InputError(
                "input.tensor_subclass_unsupported",
                f"{self.where} is a {type(array).__name__}, which computes its elements. Pass an ordinary tensor.",
            )
        if array.is_neg() or array.is_conj():
            self._reject_copy("has its negative or conjugate bit set")
            return array.resolve_conj().resolve_neg()
        return array

    def _import(self, array: Any) -> Tensor:
        try:
            try:
                tensor = tvm_ffi.from_dlpack(array)
            except BufferError:
                tensor = tvm_ffi.from_dlpack(array.__dlpack__(max_version=(1, 0)))
        except Exception as error:  # raised by code of another library
            reason = next((line for line in str(error).splitlines() if line.strip()), type(error).__name__)
            raise InputError("input.dlpack_failed", f"{self.where} cannot be read through DLPack: {reason}") from error
        if tensor.__dlpack_device__() not in self._devices:
            expected_memory = " or ".join(
                "the CPU's memory" if kind == CPU else f"GPU {n}'s" for kind, n in sorted(self._devices)
            )
            raise InputError("input.device_mismatch", f"{self.where} is not in {expected_memory}. Copy it there first.")
        if not tensor.data_ptr() and tensor.numel():
            raise InputError(
                "input.memory_missing",
                f"{self.where} is a {type(array).__name__} that has no memory. Pass an array with memory.",
            )
        return tensor

    def _as_storage(self, tensor: Tensor, shape: tuple[int, ...]) -> Tensor:
        # Empty arrays may have any strides, and the compiled code checks strides.
        if self.element.is_carried or not tensor.numel():
            return view_as(tensor, self.element.storage, shape)
        return tensor


def check_donated_memory(ports: Sequence[InputPort], tensors: Sequence[Tensor], donated: Mapping[str, str]) -> None:
    """Raise InputError for a donated input that shares memory with another input.

    The other input would see the update, or overwrite it.
    """
    spans = [
        (begin, begin + tensor.numel() * port.element.itemsize, port)
        for port, tensor in zip(ports, tensors)
        if (begin := tensor.data_ptr()) and tensor.numel()
    ]
    spans.sort(key=lambda span: span[:2])
    # The highest end address so far of any input and of a donated one, with the input that it belongs to.
    any_reach: tuple[int, InputPort | None] = (0, None)
    donated_reach: tuple[int, InputPort | None] = (0, None)
    for begin, end, port in spans:
        reached_end, other = any_reach if port.is_written else donated_reach
        if other is not None and begin < reached_end:
            written, reader = (port, other) if port.is_written else (other, port)
            raise InputError(
                "donate.memory_shared",
                f"inputs '{written.name}' and '{reader.name}' share memory, but '{written.name}' is donated: its "
                f"memory becomes output '{donated[written.name]}'. Pass separate arrays.",
            )
        if end > any_reach[0]:
            any_reach = (end, port)
        if port.is_written and end > donated_reach[0]:
            donated_reach = (end, port)


def check_output_memory(targets: Mapping[str, Tensor], donated: Mapping[str, Tensor]) -> None:
    """Raise InputError for arrays bound to outputs that share memory with each other or a donated input.

    One result would overwrite another. Both mappings are by output. An output may be bound to the donated array that
    becomes it.
    """
    spans = [
        (tensor.data_ptr(), tensor.data_ptr() + tensor.numel() * tensor.dtype.itemsize, name, is_target)
        for group, is_target in ((targets, True), (donated, False))
        for name, tensor in group.items()
        if tensor.numel()
    ]
    spans.sort()
    for (begin, end, name, is_target), (other_begin, other_end, other, is_other_target) in itertools.pairwise(spans):
        if other_begin >= end or not (is_target or is_other_target):
            continue
        if name == other and (begin, end) == (other_begin, other_end):
            continue
        first, second = (name, other) if is_target else (other, name)
        problem = f"outputs '{first}' and '{second}' are bound to arrays that share memory"
        if not (is_target and is_other_target):
            problem = f"output '{first}' is bound to memory of the donated input that becomes '{second}'"
        raise InputError("output.memory_shared", f"{problem}. Pass separate arrays.")


def to_numpy_array(array: Any, where: str) -> np.ndarray:
    """Return `array` as a NumPy array; of a subclass, the base array. Raises InputError for masked arrays."""
    if isinstance(array, np.ma.MaskedArray):
        raise InputError(
            "input.masked_array", f"{where} is a masked array, and its mask would be lost. Pass array.filled(value)."
        )
    return np.asarray(array)


class _StridedView:
    """A NumPy view of a tensor's memory, of any type and strides."""

    def __init__(self, tensor: Tensor, dtype: np.dtype) -> None:
        self._tensor, self._dtype = tensor, dtype
        self.__array_interface__ = {
            "version": 3,
            "data": (tensor.data_ptr(), True),
            "typestr": f"|V{dtype.itemsize}",
            "shape": tensor.shape,
            "strides": tuple(s * dtype.itemsize for s in tensor.strides),
        }

    def to_array(self) -> np.ndarray:
        return np.asarray(self).view(self._dtype)


@cache
def _dtype_name(dtype: Any) -> str:
    """Return `float32` for the type of that name, of NumPy or of PyTorch."""
    return getattr(dtype, "name", None) or str(dtype).rpartition(".")[2]


def _is_read_only(array: Any) -> bool:
    """Return whether DLPack 1 marks the array as read-only. Older versions count as writable."""
    try:
        capsule = array.__dlpack__(max_version=(1, 0))
    except TypeError:
        return False
    if not _capsule_is_valid(capsule, b"dltensor_versioned"):
        return False
    # DLManagedTensorVersioned: version, manager_ctx, deleter, flags (bit 0: read-only), dl_tensor.
    address = _capsule_pointer(capsule, b"dltensor_versioned")
    return bool(ctypes.c_uint64.from_address(address + 24).value & 1)
