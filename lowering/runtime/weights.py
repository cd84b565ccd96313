"""Weights: mapped from the artifact, shared by all calls, read at first use."""

from __future__ import annotations

import mmap
from pathlib import Path

import numpy as np
import tvm_ffi

from ..manifest import WEIGHTS, Manifest
from .tensors import view_as


class Weights:
    """The weights of an artifact.

    argument is the last argument of the compiled main, () for models without weights. The file is mapped
    copy-on-write: pages are read when they are used and shared between processes, and nothing can change the file.
    """

    def __init__(self, folder: Path, manifest: Manifest) -> None:
        self.argument: tuple[tvm_ffi.Array, ...] = ()
        self._begin = self._end = 0
        if not manifest.weights:
            return
        with (folder / WEIGHTS).open("rb") as file:
            mapped = np.frombuffer(mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_COPY), np.uint8)
        whole = tvm_ffi.from_dlpack(mapped)
        self._begin = whole.data_ptr()
        self._end = self._begin + mapped.nbytes
        tensors = [
            view_as(tvm_ffi.from_dlpack(mapped[w.offset : w.offset + w.nbytes]), w.storage, w.dims)
            for w in manifest.weights
        ]
        self.argument = (tvm_ffi.convert(tensors),)

    def hold(self, address: int) -> bool:
        """Whether the address lies in the memory of a weight."""
        return self._begin <= address < self._end
