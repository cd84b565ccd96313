"""Calls of static objects through a shared library of their object file and weights."""

from __future__ import annotations

import ctypes
import re
import subprocess
from collections.abc import Mapping
from pathlib import Path

import numpy as np

from lowering.manifest import Manifest


class Error(ctypes.Structure):
    _fields_ = (("code", ctypes.c_char * 64), ("text", ctypes.c_char * 960))


TASK = ctypes.CFUNCTYPE(None, ctypes.c_void_p, ctypes.c_int)
RUN = ctypes.CFUNCTYPE(None, ctypes.c_void_p, TASK, ctypes.c_void_p, ctypes.c_int)


class Threads(ctypes.Structure):
    _fields_ = (("pool", ctypes.c_void_p), ("count", ctypes.c_int), ("run", RUN))


class StaticError(Exception):
    def __init__(self, error: Error) -> None:
        self.code, self.text = error.code.decode(), error.text.decode()
        super().__init__(f"[{self.code}] {self.text}")


class StaticObject:
    """The functions of a folder that `compile_static` has written."""

    def __init__(self, folder: Path, manifest: Manifest, name: str = "model") -> None:
        self.folder, self.manifest, self.name = folder, manifest, name
        library = folder / "library.so"
        sources = [str(path) for path in (folder / "model.o", folder / "weights.S") if path.exists()]
        command = ["gcc", "-shared", f"-I{folder}", *sources, "-lm", "-o", str(library)]
        subprocess.run(command, check=True, cwd=folder)
        self.library = ctypes.CDLL(str(library))
        self.library[f"{name}_workspace_bytes"].restype = ctypes.c_int64
        self.fields = self._read_fields((folder / "model.h").read_text())

    def _read_fields(self, header: str) -> list[str]:
        (body,) = re.findall(rf"typedef struct \{{\n([^{{}}]*)\}} {self.name}_call;", header)
        return re.findall(r"(\w+);", re.sub(r"/\*.*?\*/", "", body))

    def tensor_fields(self) -> tuple[dict[str, str], dict[str, str]]:
        """Return the fields of inputs, and of outputs with memory of their own, by their names in the model."""
        inputs = [tensor.name for tensor in self.manifest.inputs]
        donated = self.manifest.donated.values()
        outputs = [tensor.name for tensor in self.manifest.outputs if tensor.name not in donated]
        last = self.fields.index("weights" if self.manifest.weights else "workspace")
        first = last - len(inputs) - len(outputs)
        fields = self.fields[first:last]
        return dict(zip(inputs, fields)), dict(zip(outputs, fields[len(inputs) :]))

    def make_call(self, values: Mapping[str, int]) -> ctypes.Structure:
        """Return the record of a call; values are sizes and addresses by field."""
        kinds = [(field, ctypes.c_int64) for field in self.fields]
        call = type("Call", (ctypes.Structure,), {"_fields_": kinds})()
        for field, value in values.items():
            assert field in self.fields, field
            setattr(call, field, value)
        if self.manifest.weights and "weights" not in values:
            call.weights = ctypes.addressof(ctypes.c_char.in_dll(self.library, f"{self.name}_weights"))
        return call

    def call(self, function: str, call: ctypes.Structure) -> int:
        error = Error()
        result = self.library[f"{self.name}_{function}"](ctypes.byref(call), ctypes.byref(error))
        if result < 0:
            raise StaticError(error)
        return result

    def run(
        self, sizes: Mapping[str, int], arrays: Mapping[str, np.ndarray], threads: Threads | None = None
    ) -> np.ndarray:
        """Run on arrays by field: inputs and outputs. Return the workspace, poisoned before and followed by a guard."""
        addresses = {field: array.ctypes.data for field, array in arrays.items()}
        call = self.make_call({**sizes, **addresses})
        if threads is not None:
            call.threads = ctypes.addressof(threads)
        count = self.call("workspace_bytes", call)
        memory = np.full(count + 192, 0xA5, np.uint8)
        start = -memory.ctypes.data % 64
        call.workspace = memory.ctypes.data + start
        self.call("run", call)
        assert (memory[:start] == 0xA5).all() and (memory[start + count :] == 0xA5).all()
        return memory[start : start + count]
