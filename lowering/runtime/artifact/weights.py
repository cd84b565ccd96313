"""Weights, read into memory of the process and shared by all calls."""

from __future__ import annotations

import mmap
from bisect import bisect_right
from contextlib import suppress

import numpy as np
import tvm_ffi

from ...errors import ArtifactError
from ...manifest import WEIGHTS, Manifest
from ..arrays.tensors import copy_tensor, view_as
from ..devices import Gpu
from .checks import check_weights
from .files import ArtifactFiles


class ModelWeights:
    """The weights of a model in the memory that `read_weights` returned, or copied to the model's GPU.

    argument is the last argument of the compiled main; it is () for models without weights.
    """

    def __init__(self, memory: memoryview, manifest: Manifest, gpu: Gpu | None = None) -> None:
        self.argument: tuple[tvm_ffi.Array, ...] = ()
        # Sorted first and end addresses of the weights.
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
            tensors = [copy_tensor(tensor, gpu.device) for tensor in tensors]
            gpu.wait()
        spans = sorted((t.data_ptr(), t.data_ptr() + w.nbytes) for t, w in zip(tensors, manifest.weights))
        self._begins, self._ends = [begin for begin, _ in spans], [end for _, end in spans]
        self.argument = (tvm_ffi.convert(tensors),)

    def contains(self, address: int) -> bool:
        """Return whether the address is in the memory of a weight."""
        k = bisect_right(self._begins, address) - 1
        return k >= 0 and address < self._ends[k]


def read_weights(files: ArtifactFiles, manifest: Manifest, is_full_check: bool) -> memoryview:
    """Return weights.bin, if it exists, in anonymous pages, of 2 MiB if the machine has them.

    The file is read and not mapped: a mapping, private or not, raises SIGBUS if the file becomes shorter. It also shows
    later writes to the file: POSIX leaves that open, and Linux does it for unmodified pages. Processes share the memory
    by forking after the load. is_full_check checks all weights, whatever their size. Raises ArtifactError if they do
    not match the manifest, or do not fit into memory.

    A matmul bound by weight bandwidth takes 0.6 to 0.9 of its time with pages of 4 KiB.
    """
    if WEIGHTS not in manifest.hashes:
        return memoryview(b"")
    size = files.size(WEIGHTS)
    try:
        pages = mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    except (OSError, OverflowError, ValueError) as error:
        raise ArtifactError(
            "weights.out_of_memory",
            f"'{files.folder / WEIGHTS}' has {size / 2**30:.1f} GiB, which do not fit into memory.",
        ) from error
    with suppress(OSError, AttributeError):  # advice that not every kernel supports
        pages.madvise(mmap.MADV_HUGEPAGE)
    memory = memoryview(pages)
    memory = memory[: files.read_into(WEIGHTS, memory)]
    check_weights(files, manifest, len(memory), lambda begin, count: memory[begin : begin + count], is_full_check)
    return memory
