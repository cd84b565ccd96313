"""Weights: mapped from the artifact, shared by all calls, read at first use."""

from __future__ import annotations

import mmap
from bisect import bisect_right
from contextlib import suppress
from pathlib import Path

import numpy as np
import tvm_ffi

from ..manifest import WEIGHTS, Manifest
from .devices import Gpu
from .tensors import copy_of, view_as


class Weights:
    """The weights of an artifact, copied to a GPU if the model runs on one.

    argument is the last argument of the compiled main, () for models without weights. The file is mapped
    copy-on-write: pages are read when they are used and shared between processes, and nothing can change the file.
    """

    def __init__(self, folder: Path, manifest: Manifest, gpu: Gpu | None = None) -> None:
        self.argument: tuple[tvm_ffi.Array, ...] = ()
        # Where each begins and ends, by address.
        self._begins: list[int] = []
        self._ends: list[int] = []
        if not manifest.weights:
            return
        with (folder / WEIGHTS).open("rb") as file:
            pages = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_COPY)
        with suppress(OSError, AttributeError):  # advice, which not every kernel takes
            pages.madvise(mmap.MADV_HUGEPAGE)
        mapped = np.frombuffer(pages, np.uint8)
        tensors = [
            view_as(tvm_ffi.from_dlpack(mapped[w.offset : w.offset + w.nbytes]), w.storage, w.dims)
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
