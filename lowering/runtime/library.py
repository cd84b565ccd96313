"""The TVM runtime library and compiled code (model.so), loaded without the compiler."""

from __future__ import annotations

import ctypes
import os
from collections.abc import Callable
from pathlib import Path

import tvm_ffi

from ..errors import ArtifactError
from ..machine import find_first_file, list_runtime_folders
from .gpu import CPU, CUDA

_RUNTIME = "libtvm_runtime.so"
# A function that loading the runtime registers.
_LOADER = "ffi.Module.load_from_bytes.relax.VMExecutable"
# vm_initialization takes device type, device number and allocator for each device: where the model runs, and the host.
_POOLED = 2

# Called before and after each function that a virtual machine calls. The arguments are the function, its name, whether
# it is before the call, the result (after the call), and the arguments of the function. Returning 0 lets the machine
# continue.
Instrument = Callable[..., int]


def load_runtime(folder: Path | None = None) -> None:
    """Load the TVM runtime into the process.

    It is searched in `folder`, then where the wheels of onnx-lowering-runtime and apache-tvm install it. It is never
    taken from an artifact, which could contain code that no digest covers. apache-tvm is neither imported nor found
    through the import system: that would load the compiler, or fail if it is blocked. Raises ArtifactError.
    """
    if tvm_ffi.get_global_func(_LOADER, allow_missing=True) is not None:
        return
    folders = [*([] if folder is None else [folder]), *list_runtime_folders()]
    path = find_first_file(folders, _RUNTIME)
    if path is None:
        raise ArtifactError(
            "run.runtime_missing",
            f"no installed apache-tvm has the TVM runtime library {_RUNTIME}. Install apache-tvm, or put the library "
            "into the subfolder tvm/lib of a folder on PYTHONPATH.",
        )
    try:
        # Code that TVM generates resolves the runtime's functions as global symbols.
        ctypes.CDLL(str(path.absolute()), ctypes.RTLD_GLOBAL)
    except OSError as error:
        raise ArtifactError(
            "run.runtime_unloadable", f"the TVM runtime library '{path}' cannot be loaded: {error}."
        ) from error


def _create_unique_path(descriptor: int) -> str:
    """Return a path of an open descriptor that no loaded library has had.

    The linker treats a path that it has seen as the library loaded from it, and descriptor numbers are reused. Inode
    numbers are not reused while in use: the bits of the number, lowest first as in host.hpp, select between two
    spellings of the same folder.
    """
    spelled = "".join("//." if bit == "1" else "/." for bit in f"{os.fstat(descriptor).st_ino:b}"[::-1])
    return f"/proc/self/fd{spelled}/{descriptor}"


class ModelLibrary:
    """A loaded model.so with the bytes `code`. Messages name it by `path`.

    Code and constants exist once. Each virtual machine runs one call at a time, on the CPU or on a GPU. The bytes are
    loaded from an anonymous memory file: the checked bytes are the ones that run, and later writes to a file cannot
    change running code.
    """

    def __init__(self, code: bytes, path: Path, gpu: int | None = None) -> None:
        self.gpu = gpu
        self._devices = (CPU, 0, _POOLED) if gpu is None else (CUDA, gpu, _POOLED)
        try:
            with os.fdopen(os.memfd_create(path.name, os.MFD_CLOEXEC), "wb") as file:
                file.write(code)
                file.flush()
                load = tvm_ffi.get_global_func("ffi.Module.load_from_file.so")
                # It stays loaded as long as its functions and virtual machines; results are memory of the runtime.
                self._executable = load(_create_unique_path(file.fileno()), "so")
            self.set_threads = self._executable.get_function("lowering_set_threads", query_imports=True)
            self._load = self._executable.get_function("vm_load_executable")
        except (RuntimeError, ValueError, AttributeError, OSError) as error:
            reason = next((line for line in str(error).splitlines() if line.strip()), type(error).__name__)
            raise ArtifactError(
                "artifact.code_unloadable", f"'{path}' cannot be loaded as a compiled model: {reason}"
            ) from error

    def new_machine(self, instrument: Instrument | None = None) -> Machine:
        machine = self._load()
        machine["vm_initialization"](*self._devices, CPU, 0, _POOLED)
        if instrument is not None:
            machine["set_instrument"](tvm_ffi.convert(instrument))
        return Machine(machine)

    def new_replay(self) -> tvm_ffi.Function:
        """Return `replay` (passes/memory/replay.py) of a new virtual machine. Raises ArtifactError if the code has
        none."""
        machine = self._load()
        machine["vm_initialization"](*self._devices, CPU, 0, _POOLED)
        try:
            return machine["replay"]
        except AttributeError as error:
            raise ArtifactError(
                "artifact.graph_unsupported",
                "the artifact was compiled by a version without CUDA graphs: compile the model again.",
            ) from error

    def function(self, name: str) -> tvm_ffi.Function:
        """Return a compiled function by name."""
        return self._executable.get_function(name, query_imports=True)


class Machine:
    """A virtual machine: main(*inputs[, weights]) returns an array of outputs, and release() frees the last one."""

    __slots__ = ("main", "release")

    def __init__(self, machine: tvm_ffi.Module) -> None:
        self.main = machine["main"]
        self.release = machine["release"]
