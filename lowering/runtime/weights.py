"""Weights: read into memory of the process, shared by all calls."""

from __future__ import annotations

import mmap
from bisect import bisect_right
from contextlib import suppress

import numpy as np
import tvm_ffi

from ..errors import ArtifactError
from ..manifest import WEIGHTS, Manifest
from .checks import check_weights
from .devices import Gpu
from .files import Files
from .tensors import copy_of, view_as


class Weights:
    """The weights of a model, in the memory that `read_weights` gave, copied to a GPU if the model runs on one.

    argument is the last argument of the compiled main, () for models without weights.
    """

    def __init__(self, memory: memoryview, manifest: Manifest, gpu: Gpu | None = None) -> None:
        self.argument: tuple[tvm_ffi.Array, ...] = ()
        # Where each begins and ends, by address.
        self._begins: list[int] = []
        self._ends: list[int] = []
        if not manifest.weights:
            return
        array = np.frombuffer(memory, np.uint8)
        tensors = [
            view_as(tvm_ffi.from_dlpack(array[w.offset : w.offset + w.nbytes]), w.storage, w.dims)
            for w in manifest.weights
        ]
        if gpu is not None:
            tensors = [copy_of(tensor, gpu.device) for tensor in tensors]
            gpu.wait()
        spans = sorted((t.data_ptr(), t.data_ptr() + w.nbytes) for t, w in zip(tensors, manifest.weights))
        self._begins, self._ends = [begin for begin, _ in spans], [end for _, end in spans]
        self.argument = (tvm_ffi.convert(tensors),)

    def hold(self, address: int) -> bool:
        """Whether the address lies in the memory of a weight."""
        k = bisect_right(self._begins, address) - 1
        return k >= 0 and address < self._ends[k]


def read_weights(files: Files, manifest: Manifest, whole: bool) -> memoryview:
    """weights.bin, if there is one, in pages of its own, of 2 MiB where the machine has them.

    It is read, not mapped: a mapping, private or not, dies with SIGBUS where the file has become shorter, and shows
    what is written over it (POSIX leaves the latter open, Linux does it for pages that nobody has written to).
    Processes share it by forking after the load. whole looks at all of it, however large it is. Raises ArtifactError
    where it is not what the manifest was written with, or does not fit into memory.

    A matmul that waits for its weights takes 0.6 to 0.9 of the time that it does with pages of 4 KiB.
    """
    if WEIGHTS not in manifest.hashes:
        return memoryview(b"")
    size = files.size(WEIGHTS)
    try:
        pages = mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    except (OSError, OverflowError, ValueError) as error:
        raise ArtifactError(
            f"'{files.folder / WEIGHTS}' has {size / 2**30:.1f} GiB, which do not fit into memory."
        ) from error
    with suppress(OSError, AttributeError):  # advice, which not every kernel takes
        pages.madvise(mmap.MADV_HUGEPAGE)
    memory = memoryview(pages)
    memory = memory[: files.read_into(WEIGHTS, memory)]
    check_weights(files, manifest, len(memory), lambda at, count: memory[at : at + count], whole)
    return memory
