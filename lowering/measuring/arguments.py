"""The arguments of a kernel in a file: sizes as numbers, tensors with their contents.

arguments.json lists them in the kernel's order, arguments.bin holds the contents; both lie in one folder. What a kernel
writes is there as it was before the call.
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
from ..runtime.devices import Gpu
from ..runtime.elements import itemsize
from ..runtime.tensors import Tensor, copy_to, view_as

_LIST, _CONTENTS = "arguments.json", "arguments.bin"
_ALIGNMENT = 64


@dataclass(frozen=True)
class TensorArgument:
    """A tensor: its place in the file, whether it is a weight of the model, and whether the kernel writes it."""

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
    """The list of them. A number stands for itself."""

    arguments: tuple[TensorArgument | int, ...]

    @property
    def tensors(self) -> tuple[TensorArgument, ...]:
        return tuple(a for a in self.arguments if isinstance(a, TensorArgument))

    @property
    def nbytes(self) -> int:
        """The size of arguments.bin."""
        return max((t.offset + t.nbytes for t in self.tensors), default=0)


def write(folder: Path, arguments: Sequence[tuple[str, tuple[int, ...], np.ndarray, bool, bool] | int]) -> Arguments:
    """Makes the files. A tensor is its type, its shape, its bytes, and whether it is constant and written."""
    offset = 0
    found: list[TensorArgument | int] = []
    with (folder / _CONTENTS).open("wb") as file:
        for argument in arguments:
            if isinstance(argument, int):
                found.append(argument)
                continue
            dtype, shape, contents, constant, written = argument
            file.seek(offset)
            file.write(contents.data)
            found.append(TensorArgument(dtype, shape, offset, constant, written))
            offset += -(-contents.nbytes // _ALIGNMENT) * _ALIGNMENT
        file.truncate(offset)
    listed = Arguments(tuple(found))
    (folder / _LIST).write_text(json.dumps(dataclasses.asdict(listed)))
    return listed


def read(folder: Path) -> Arguments:
    """The list. Raises ValueError for a damaged one, and OSError."""
    return decode(Arguments, json.loads((folder / _LIST).read_text()), _LIST)


def memory_of(folder: Path, listed: Arguments) -> np.ndarray:
    """A copy of the contents in memory of its own, of pages of 2 MiB as a loaded model's weights have them."""
    if listed.nbytes == 0:
        return np.empty(0, np.uint8)
    pages = mmap.mmap(-1, listed.nbytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    with suppress(OSError, AttributeError):  # advice, which not every kernel takes
        pages.madvise(mmap.MADV_HUGEPAGE)
    memory = np.frombuffer(pages, np.uint8)
    with (folder / _CONTENTS).open("rb") as file:
        if file.readinto(memory.data) < listed.nbytes:
            raise ValueError(f"'{folder / _CONTENTS}' is shorter than its list says")
    return memory


def placed(listed: Arguments, memory: np.ndarray, gpu: Gpu | None = None) -> list[Any]:
    """What a compiled kernel is called with: numbers, and tensors that lie in `memory`, or have copies on the GPU."""
    return [a if isinstance(a, int) else place(a, memory, gpu) for a in listed.arguments]


def place(tensor: TensorArgument, memory: np.ndarray, gpu: Gpu | None) -> Tensor:
    """One of these tensors."""
    part = contents(tensor, memory)
    return view_as(tvm_ffi.from_dlpack(part) if gpu is None else gpu.copy(part), tensor.dtype, tensor.shape)


def take_back(listed: Arguments, placed: Sequence[Any], memory: np.ndarray, gpu: Gpu) -> None:
    """Puts what has become of the GPU's copies into `memory`."""
    for argument, copy in zip(listed.arguments, placed, strict=True):
        if isinstance(argument, TensorArgument) and argument.nbytes:
            part = contents(argument, memory)
            copy_to(view_as(copy, "uint8", part.shape), tvm_ffi.from_dlpack(part))
    gpu.wait()


def contents(tensor: TensorArgument, memory: np.ndarray) -> np.ndarray:
    """The bytes of a tensor in `memory`."""
    return memory[tensor.offset : tensor.offset + tensor.nbytes]
