"""Callers' arrays become tensors: checked against the model first, never copied unless they must be."""

from __future__ import annotations

import ctypes
import itertools
import sys
from collections.abc import Mapping, Sequence
from functools import cache
from typing import Any

import numpy as np
import tvm_ffi

from ..errors import InputError
from ..manifest import TensorSpec
from .elements import BYTES_ELSEWHERE, ElementType
from .gpu import CPU, CUDA
from .strings import Dictionary
from .tensors import Tensor, view_as

# Sizes of symbolic dimensions seen so far in a call, each with the array that showed it.
Sizes = dict[str, tuple[int, str]]

_capsule_is_valid = ctypes.PYFUNCTYPE(ctypes.c_int, ctypes.py_object, ctypes.c_char_p)(
    ("PyCapsule_IsValid", ctypes.pythonapi)
)
_capsule_pointer = ctypes.PYFUNCTYPE(ctypes.c_void_p, ctypes.py_object, ctypes.c_char_p)(
    ("PyCapsule_GetPointer", ctypes.pythonapi)
)


class Port:
    """The border for the arrays of one input, or of one output whose memory the caller provides.

    role is how messages call it. in_place is the reason why arrays are never copied, in words that complete a
    sentence, or None if they may be. written says that arrays must be writable. gpu is the number of a GPU whose memory
    they may be in as well.
    """

    def __init__(
        self,
        spec: TensorSpec,
        role: str,
        ranges: Mapping[str, tuple[int, int]],
        in_place: str | None = None,
        written: bool = False,
        gpu: int | None = None,
    ) -> None:
        self.spec = spec
        self.name = spec.name
        self.written = written
        self._in_place = in_place
        self.where = f"{role} '{spec.name}'"
        self._devices = {(CPU, 0)} if gpu is None else {(CPU, 0), (CUDA, gpu)}
        self.element = ElementType(spec.dtype, spec.storage)
        self._numpy = self.element.numpy
        self._plain = not (self.element.carried or self.element.text)
        self._dims = spec.dims
        self._ranges = ranges

    def accept(self, array: Any, sizes: Sizes | None, strings: Dictionary) -> Tensor:
        """The tensor of the array's memory, or of a copy where the compiled code cannot read it in place.

        sizes collects the symbolic dimensions of a call; it is None when all shapes of the call are known to be right.
        Raises InputError for everything that the model does not take, before anything is written.
        """
        if type(array) is not np.ndarray:
            if not isinstance(array, (np.ndarray, np.generic)):
                return self._accept_foreign(array, sizes, strings)
            array = plain_array(array, self.where)
        if array.dtype is not self._numpy and array.dtype != self._numpy:
            self._check_dtype(array)
        if not self._dims and array.shape == (1,):  # what stands for a number in other runtimes
            array = array.reshape(())
        if sizes is not None:
            self._check_shape(array.shape, sizes)
        if self._plain and array.flags.carray and array.size:
            return tvm_ffi.from_dlpack(array)
        return self._accept_unusual(array, strings)

    def keep(self, array: Any, sizes: Sizes, strings: Dictionary) -> Any:
        """A copy of an array that `accept` takes; of one in a GPU's memory, the tensor.

        Whatever becomes of the caller's array, `accept` takes the answer. Raises InputError as `accept` does.
        """
        if isinstance(array, (np.ndarray, np.generic)):
            self.accept(array, sizes, strings)
            return np.array(array, order="C")
        tensor = self._import_checked(array, sizes)
        if tensor.__dlpack_device__()[0] == CPU:
            return _Strided(tensor, self.element.numpy).array().copy()
        self._accept_foreign(tensor, sizes, strings)  # which checks its strides
        return tensor

    # -- checks
    # -------------------------------------------------------------------------------------------------------

    def _check_dtype(self, array: np.ndarray) -> None:
        if self.element.text and array.dtype.kind in "UT":
            return
        given = array.dtype.name if array.dtype.isnative else array.dtype.str
        wanted = "an array of str, of dtype object" if self.element.text else self.spec.dtype
        raise InputError(f"{self.where} must be {wanted}, not {given}. Convert it with astype.")

    def _check_shape(self, shape: tuple[int, ...], sizes: Sizes) -> None:
        if len(shape) != len(self._dims):
            raise InputError(
                f"{self.where} must have {len(self._dims)} dimensions, {self._shape_text()}, "
                f"not {len(shape)}: its shape is {list(shape)}."
            )
        for axis, (dim, size) in enumerate(zip(self._dims, shape)):
            if isinstance(dim, int):
                if dim != size:
                    raise InputError(
                        f"{self.where} must have size {dim} along axis {axis}, not {size}: "
                        f"it takes {self._shape_text()} and its shape is {list(shape)}."
                    )
                continue
            known = sizes.get(dim)
            if known is None:
                sizes[dim] = (size, self.where)
                low, high = self._ranges.get(dim, (0, size))
                if not low <= size <= high:
                    raise InputError(
                        f"dimension '{dim}' is {size} in {self.where} (axis {axis}); the model takes {low} to {high}."
                    )
            elif known[0] != size:
                raise InputError(
                    f"dimension '{dim}' is {size} in {self.where} (axis {axis}) but {known[0]} in {known[1]}; "
                    "sizes of one name must be equal."
                )

    def _shape_text(self) -> str:
        return f"[{', '.join(map(str, self._dims))}]"

    # -- arrays that cannot be passed as they are
    # ---------------------------------------------------------------------

    def _accept_unusual(self, array: np.ndarray, strings: Dictionary) -> Tensor:
        if self.element.text:
            self._refuse_copy("holds strings, which the compiled code sees as numbers")
            array = strings.encode(array, self.where)
        elif self.element.carried:
            array = self.element.carry(array)
        flags = array.flags
        if not (flags.c_contiguous and flags.aligned):
            self._refuse_copy("is not aligned to its elements" if flags.c_contiguous else "is not C-contiguous")
            array = array.copy()
        elif not flags.writeable and self.written:
            raise InputError(f"{self.where} is read-only, but {self._in_place}. Pass a writable array.")
        # NumPy exports read-only memory only by the newer protocol, which says that it is.
        readable = array if array.flags.writeable else array.__dlpack__(max_version=(1, 0))
        return self._as_storage(tvm_ffi.from_dlpack(readable), array.shape)

    def _refuse_copy(self, what: str) -> None:
        if self._in_place is not None:
            raise InputError(f"{self.where} {what}, but {self._in_place}.")

    def _accept_foreign(self, array: Any, sizes: Sizes | None, strings: Dictionary) -> Tensor:
        """Arrays of other libraries, through DLPack."""
        tensor = self._import_checked(array, sizes)
        shape = tensor.shape
        if self.written and _is_read_only(array):
            raise InputError(f"{self.where} is read-only, but {self._in_place}. Pass a writable array.")
        if not tensor.is_contiguous() or tensor.data_ptr() % self.element.itemsize:
            self._refuse_copy("is not C-contiguous")
            if tensor.__dlpack_device__()[0] != CPU:
                raise InputError(f"{self.where} is not C-contiguous. Make it so: only the CPU's arrays are copied.")
            return self._accept_unusual(_Strided(tensor, self.element.numpy).array().copy(), strings)
        return self._as_storage(tensor, (*shape, 2) if self.element.pair else shape)

    def _import_checked(self, array: Any, sizes: Sizes | None) -> Tensor:
        """The tensor of another library's array, of the right type and shape."""
        if not (hasattr(array, "__dlpack__") and hasattr(array, "dtype")):
            raise InputError(
                f"{self.where} is a {type(array).__name__}; pass a NumPy array, or any array with __dlpack__ and dtype."
            )
        if self.element.text:
            raise InputError(f"{self.where} must be a NumPy array of str, not a {type(array).__name__}.")
        name = _dtype_name(array.dtype)
        if name != (self.spec.storage if self.element.name in BYTES_ELSEWHERE else self.spec.dtype):
            raise InputError(f"{self.where} must be {self.spec.dtype}, not {name}.")
        tensor = self._import(self._with_its_values(array))
        if sizes is not None:
            self._check_shape(tensor.shape, sizes)
        return tensor

    def _with_its_values(self, array: Any) -> Any:
        """PyTorch's tensors may hold other values in memory than they have, which DLPack does not always tell."""
        torch = sys.modules.get("torch")
        if torch is None or not isinstance(array, torch.Tensor):
            return array
        if type(array).__torch_dispatch__ is not torch.Tensor.__torch_dispatch__:
            raise InputError(
                f"{self.where} is a {type(array).__name__}, which computes what it holds. Pass an ordinary tensor."
            )
        if array.is_neg() or array.is_conj():
            self._refuse_copy("has its negative or conjugate bit set")
            return array.resolve_conj().resolve_neg()
        return array

    def _import(self, array: Any) -> Tensor:
        try:
            try:
                tensor = tvm_ffi.from_dlpack(array)
            except BufferError:
                tensor = tvm_ffi.from_dlpack(array.__dlpack__(max_version=(1, 0)))
        except Exception as error:  # it is code of another library
            reason = next((line for line in str(error).splitlines() if line.strip()), type(error).__name__)
            raise InputError(f"{self.where} cannot be read through DLPack: {reason}") from error
        if tensor.__dlpack_device__() not in self._devices:
            place = " or ".join(
                "the CPU's memory" if kind == CPU else f"GPU {n}'s" for kind, n in sorted(self._devices)
            )
            raise InputError(f"{self.where} is not in {place}. Copy it there first.")
        if not tensor.data_ptr() and tensor.numel():
            raise InputError(f"{self.where} is a {type(array).__name__} that has no memory. Pass one with elements.")
        return tensor

    def _as_storage(self, tensor: Tensor, shape: tuple[int, ...]) -> Tensor:
        # Empty arrays may have any strides, and the compiled code looks at them.
        if self.element.carried or not tensor.numel():
            return view_as(tensor, self.element.storage, shape)
        return tensor


def check_apart(ports: Sequence[Port], tensors: Sequence[Tensor], donated: Mapping[str, str]) -> None:
    """Refuses donated inputs whose memory another input uses: it would see the update, or lose its own."""
    spans = [
        (begin, begin + tensor.numel() * port.element.itemsize, port)
        for port, tensor in zip(ports, tensors)
        if (begin := tensor.data_ptr()) and tensor.numel()
    ]
    spans.sort(key=lambda span: span[:2])
    # The farthest end so far of any input and of a donated one, with the input it belongs to.
    reach: tuple[int, Port | None] = (0, None)
    donated_reach: tuple[int, Port | None] = (0, None)
    for begin, end, port in spans:
        before, other = reach if port.written else donated_reach
        if other is not None and begin < before:
            first, second = (port, other) if port.written else (other, port)
            raise InputError(
                f"inputs '{first.name}' and '{second.name}' share memory, but '{first.name}' is donated: its "
                f"memory becomes output '{donated[first.name]}'. Pass separate arrays."
            )
        if end > reach[0]:
            reach = (end, port)
        if port.written and end > donated_reach[0]:
            donated_reach = (end, port)


def check_targets(targets: Mapping[str, Tensor], donated: Mapping[str, Tensor]) -> None:
    """Refuses arrays bound to outputs that share memory, or share that of a donated input: one result would overwrite
    another. Both by output; an output may have the array itself that becomes it."""
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
        what = f"outputs '{first}' and '{second}' are bound to arrays that share memory"
        if not (is_target and is_other_target):
            what = f"output '{first}' is bound to memory of the donated input that becomes '{second}'"
        raise InputError(f"{what}. Pass separate arrays.")


def plain_array(array: Any, where: str) -> np.ndarray:
    """What NumPy makes of `array`: of a subclass's, the array itself. Raises InputError for one that has a mask."""
    if isinstance(array, np.ma.MaskedArray):
        raise InputError(f"{where} is a masked array, and its mask would be lost. Pass array.filled(value).")
    return np.asarray(array)


class _Strided:
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

    def array(self) -> np.ndarray:
        return np.asarray(self).view(self._dtype)


@cache
def _dtype_name(dtype: Any) -> str:
    """`float32` for NumPy's and for torch's type of that name."""
    return getattr(dtype, "name", None) or str(dtype).rpartition(".")[2]


def _is_read_only(array: Any) -> bool:
    """What the array says of itself by DLPack 1; arrays that only speak older versions are taken for writable."""
    try:
        capsule = array.__dlpack__(max_version=(1, 0))
    except TypeError:
        return False
    if not _capsule_is_valid(capsule, b"dltensor_versioned"):
        return False
    # DLManagedTensorVersioned: version, manager_ctx, deleter, flags (bit 0: read-only), dl_tensor.
    address = _capsule_pointer(capsule, b"dltensor_versioned")
    return bool(ctypes.c_uint64.from_address(address + 24).value & 1)
