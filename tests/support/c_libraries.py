"""Calls of libraries for C by the functions of lowering.h."""

from __future__ import annotations

import ctypes
import subprocess
from collections.abc import Callable, Mapping
from functools import cache
from pathlib import Path
from tempfile import mkdtemp

import numpy as np

from lowering.compiling.bundled_sources import FOLDER
from lowering.manifest import Manifest
from tests.support.static_objects import Error, StaticError


class Array(ctypes.Structure):
    _fields_ = (("data", ctypes.c_void_p), ("rank", ctypes.c_int32), ("shape", ctypes.POINTER(ctypes.c_int64)))


class Kernel(ctypes.Structure):
    _fields_ = (("name", ctypes.c_char_p), ("count", ctypes.c_void_p))


OBSERVE = ctypes.CFUNCTYPE(
    None, ctypes.c_void_p, ctypes.POINTER(Kernel), ctypes.c_int32, ctypes.POINTER(ctypes.c_int64)
)


class Observer(ctypes.Structure):
    _fields_ = (("owner", ctypes.c_void_p), ("observe", OBSERVE))


@cache
def load_loader() -> ctypes.CDLL:
    """lowering.c, which ends the process at undefined behavior."""
    path = Path(mkdtemp()) / "loader.so"
    flags = ["-std=c99", "-Wall", "-Wextra", "-Wpedantic", "-Wconversion", "-Werror", "-fsanitize=undefined"]
    command = ["gcc", *flags, "-fno-sanitize-recover=all", "-shared", "-fPIC", str(FOLDER / "lowering.c")]
    subprocess.run([*command, "-ldl", "-o", str(path)], check=True)
    loader = ctypes.CDLL(str(path))
    loader.lowering_get_output.restype = Array
    for name in ("lowering_unload", "lowering_unbind", "lowering_observe"):
        loader[name].restype = None
    return loader


def check(function: str, *arguments: object) -> None:
    error = Error()
    if load_loader()[f"lowering_{function}"](*arguments, ctypes.byref(error)) != 0:
        raise StaticError(error)


class CLibrary:
    """A model that `compile_library` has written."""

    def __init__(self, folder: Path, manifest: Manifest) -> None:
        self.manifest, self.model = manifest, ctypes.c_void_p()
        check("load", str(folder).encode(), ctypes.byref(self.model))

    def bind(self, inputs: Mapping[str, np.ndarray], threads: int = 0) -> BoundCall:
        return BoundCall(self, inputs, threads)

    def compute(self, inputs: Mapping[str, np.ndarray], threads: int = 0) -> dict[str, np.ndarray]:
        bound = self.bind(inputs, threads)
        outputs = bound.run()
        bound.close()
        return outputs

    def close(self) -> None:
        load_loader().lowering_unload(self.model)


class BoundCall:
    def __init__(self, library: CLibrary, inputs: Mapping[str, np.ndarray], threads: int) -> None:
        self.manifest, self.bound = library.manifest, ctypes.c_void_p()
        self.inputs = {
            spec.name: np.require(inputs[spec.name], requirements=["C", "A"]) for spec in self.manifest.inputs
        }
        arrays = (Array * max(len(self.inputs), 1))()
        shapes = [(ctypes.c_int64 * max(a.ndim, 1))(*a.shape) for a in self.inputs.values()]
        for record, array, shape in zip(arrays, self.inputs.values(), shapes):
            record.data, record.rank, record.shape = array.ctypes.data, array.ndim, shape
        check("bind", library.model, arrays, threads, ctypes.byref(self.bound))
        specs, donated = self.manifest.outputs, self.manifest.donated.values()
        self.own = [
            number
            for number, spec in enumerate(specs)
            if spec.name not in donated and all(size >= 0 for size in self.describe(number)[0])
        ]

    def describe(self, number: int) -> tuple[tuple[int, ...], int]:
        """The shape and the address of an output."""
        record = load_loader().lowering_get_output(self.bound, number)
        return tuple(record.shape[: record.rank]), record.data or 0

    def run(self) -> dict[str, np.ndarray]:
        """Outputs, in poisoned memory before; those that a run allocates are copied."""
        specs = self.manifest.outputs
        addresses = (ctypes.c_void_p * max(len(specs), 1))()
        outputs: dict[str, np.ndarray] = {}
        for number in self.own:
            spec, (shape, _) = specs[number], self.describe(number)
            dtype = np.dtype(spec.storage)
            count = int(np.prod(shape, dtype=np.int64)) * dtype.itemsize
            outputs[spec.name] = np.frombuffer(bytearray(b"\xa5" * (count + 64)), np.uint8)[:count].view(dtype)
            outputs[spec.name] = outputs[spec.name].reshape(shape)
            addresses[number] = outputs[spec.name].ctypes.data
        check("run", self.bound, addresses)
        for number, spec in enumerate(specs):
            if spec.name not in outputs:
                shape, address = self.describe(number)
                size = int(np.prod(shape, dtype=np.int64)) * np.dtype(spec.storage).itemsize
                content = ctypes.string_at(address, size)
                outputs[spec.name] = np.frombuffer(content, spec.storage).reshape(shape)
        return outputs

    def observe(self, observe: Callable[[str, bool, list[int]], None], values: int = 16) -> Observer:
        """Call a function with the name of each kernel, whether it is before it, and its first values."""

        def tell(_: int, kernel: ctypes.Array[Kernel], is_before: int, values_: ctypes.Array[ctypes.c_int64]) -> None:
            observe(kernel[0].name.decode(), bool(is_before), values_[:values])

        observer = Observer(None, OBSERVE(tell))
        load_loader().lowering_observe(self.bound, ctypes.byref(observer))
        return observer

    def close(self) -> None:
        load_loader().lowering_unbind(self.bound)
