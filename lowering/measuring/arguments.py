"""The arguments of a kernel in files: sizes as numbers, tensors with their contents.

arguments.json lists them in the kernel's order, arguments.bin contains the tensors' data; both are in one folder.
Tensors that a kernel writes have their data from before the call.
"""

from __future__ import annotations

import dataclasses
import json
import math
import mmap
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import tvm_ffi

from ..records import decode
from ..runtime.arrays.elements import itemsize
from ..runtime.arrays.tensors import Tensor, copy_to, view_as
from ..runtime.devices import Gpu

_LIST, _CONTENTS = "arguments.json", "arguments.bin"
_ALIGNMENT = 64


@dataclass(frozen=True)
class TensorArgument:
    """A tensor: its offset in the file, whether it is a weight of the model, and whether the kernel writes it."""

    dtype: str
    shape: tuple[int, ...]
    offset: int
    constant: bool
    written: bool

    @property
    def nbytes(self) -> int:
        return math.prod(self.shape) * itemsize(self.dtype)


@dataclass(frozen=True)
class Arguments:
    """The list of arguments. An integer stands for itself."""

    arguments: tuple[TensorArgument | int, ...]

    @property
    def tensors(self) -> tuple[TensorArgument, ...]:
        return tuple(a for a in self.arguments if isinstance(a, TensorArgument))

    @property
    def nbytes(self) -> int:
        """The size of arguments.bin."""
        return max((t.offset + t.nbytes for t in self.tensors), default=0)


def write_arguments(
    folder: Path, arguments: Sequence[tuple[str, tuple[int, ...], np.ndarray, bool, bool] | int]
) -> Arguments:
    """Write the files. A tensor is its type, its shape, its bytes, and whether it is constant and written."""
    offset = 0
    entries: list[TensorArgument | int] = []
    with (folder / _CONTENTS).open("wb") as file:
        for argument in arguments:
            if isinstance(argument, int):
                entries.append(argument)
                continue
            dtype, shape, data, constant, written = argument
            file.seek(offset)
            file.write(data.data)
            entries.append(TensorArgument(dtype, shape, offset, constant, written))
            offset += -(-data.nbytes // _ALIGNMENT) * _ALIGNMENT
        file.truncate(offset)
    index = Arguments(tuple(entries))
    (folder / _LIST).write_text(json.dumps(dataclasses.asdict(index)))
    return index


def read_arguments(folder: Path) -> Arguments:
    """Read the list. Raises ValueError for a damaged one, and OSError."""
    return decode(Arguments, json.loads((folder / _LIST).read_text()), _LIST)


def load_contents(folder: Path, index: Arguments) -> np.ndarray:
    """Return a copy of the contents in memory of its own, in pages of 2 MiB like a loaded model's weights."""
    if index.nbytes == 0:
        return np.empty(0, np.uint8)
    pages = mmap.mmap(-1, index.nbytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    with suppress(OSError, AttributeError):  # only advice, which some kernels do not take
        pages.madvise(mmap.MADV_HUGEPAGE)
    memory = np.frombuffer(pages, np.uint8)
    with (folder / _CONTENTS).open("rb") as file:
        if file.readinto(memory.data) < index.nbytes:
            raise ValueError(f"'{folder / _CONTENTS}' is shorter than its list declares")
    return memory


def bind_arguments(index: Arguments, memory: np.ndarray, gpu: Gpu | None = None) -> list[Any]:
    """Return the arguments of a call: numbers, and tensors in `memory`, or copies on the GPU."""
    return [a if isinstance(a, int) else bind_tensor(a, memory, gpu) for a in index.arguments]


def bind_tensor(tensor: TensorArgument, memory: np.ndarray, gpu: Gpu | None) -> Tensor:
    """Return one of these tensors."""
    data = tensor_bytes(tensor, memory)
    return view_as(tvm_ffi.from_dlpack(data) if gpu is None else gpu.copy(data), tensor.dtype, tensor.shape)


def copy_back(index: Arguments, bound: Sequence[Any], memory: np.ndarray, gpu: Gpu) -> None:
    """Copy the GPU's tensors back into `memory`."""
    for argument, copy in zip(index.arguments, bound, strict=True):
        if isinstance(argument, TensorArgument) and argument.nbytes:
            data = tensor_bytes(argument, memory)
            copy_to(view_as(copy, "uint8", data.shape), tvm_ffi.from_dlpack(data))
    gpu.wait()


def tensor_bytes(tensor: TensorArgument, memory: np.ndarray) -> np.ndarray:
    """Return the bytes of a tensor in `memory`."""
    return memory[tensor.offset : tensor.offset + tensor.nbytes]
