"""The TVM runtime library and one model.so, loaded without the compiler."""

from __future__ import annotations

import ctypes
import os
from collections.abc import Callable
from pathlib import Path

import tvm_ffi

from ..errors import ArtifactError
from ..machine import first_file, runtime_folders
from .gpu import CPU, CUDA

_RUNTIME = "libtvm_runtime.so"
# What loading the runtime registers.
_LOADER = "ffi.Module.load_from_bytes.relax.VMExecutable"
# vm_initialization takes device type, device number and allocator for each device: where the model runs, and the host.
_POOLED = 2

# Called before and after each function that a virtual machine calls: with the function, its name, whether it is before,
# the result if it is not, and the arguments. 0 lets the machine go on.
Instrument = Callable[..., int]


def load_runtime(beside: Path | None = None) -> None:
    """Makes the TVM runtime available to the process.

    It is looked for in the folder `beside`, then where the wheels of onnx-lowering-runtime and apache-tvm put it; never
    in an artifact, which would bring code that no digest covers. apache-tvm is not imported, nor asked of the import
    system: that would load the compiler, or fail where it is barred. Raises ArtifactError.
    """
    if tvm_ffi.get_global_func(_LOADER, allow_missing=True) is not None:
        return
    places = [*([] if beside is None else [beside]), *runtime_folders()]
    found = first_file(places, _RUNTIME)
    if found is None:
        raise ArtifactError(
            f"the TVM runtime library {_RUNTIME} is in no installed apache-tvm. Install apache-tvm, or put the library "
            "into the folder tvm/lib of a place on PYTHONPATH."
        )
    try:
        # Code that TVM generates finds the runtime's functions among the global symbols.
        ctypes.CDLL(str(found.absolute()), ctypes.RTLD_GLOBAL)
    except OSError as error:
        raise ArtifactError(f"the TVM runtime library '{found}' cannot be loaded: {error}.") from error


def _path_of(memory: int) -> str:
    """A path of an open descriptor that no loaded library has had.

    The linker takes a path that it knows for the library that had it, and numbers of descriptors come again. Those of
    inodes do not while they are in use: its bits, lowest first as in host.hpp, are written in ways to spell one folder.
    """
    spelled = "".join("//." if bit == "1" else "/." for bit in f"{os.fstat(memory).st_ino:b}"[::-1])
    return f"/proc/self/fd{spelled}/{memory}"


class Library:
    """A loaded model.so, whose bytes are `code`; path is how messages call it.

    Code and constants exist once; each virtual machine runs one call at a time, on the CPU or on a GPU. The bytes are
    loaded from memory that has no name in any file system: what was checked is what runs, and a file that is written
    over later cannot change running code.
    """

    def __init__(self, code: bytes, path: Path, gpu: int | None = None) -> None:
        self.gpu = gpu
        self._devices = (CPU, 0, _POOLED) if gpu is None else (CUDA, gpu, _POOLED)
        try:
            with os.fdopen(os.memfd_create(path.name, os.MFD_CLOEXEC), "wb") as file:
                file.write(code)
                file.flush()
                load = tvm_ffi.get_global_func("ffi.Module.load_from_file.so")
                # It lives as long as functions or virtual machines of it do; results are memory of the runtime.
                self._executable = load(_path_of(file.fileno()), "so")
            self.set_threads = self._executable.get_function("lowering_set_threads", query_imports=True)
            self._load = self._executable.get_function("vm_load_executable")
        except (RuntimeError, ValueError, AttributeError, OSError) as error:
            reason = next((line for line in str(error).splitlines() if line.strip()), type(error).__name__)
            raise ArtifactError(f"'{path}' cannot be loaded as a compiled model: {reason}") from error

    def new_machine(self, instrument: Instrument | None = None) -> Machine:
        machine = self._load()
        machine["vm_initialization"](*self._devices, CPU, 0, _POOLED)
        if instrument is not None:
            machine["set_instrument"](tvm_ffi.convert(instrument))
        return Machine(machine)

    def new_replay(self) -> tvm_ffi.Function:
        """`replay` (passes/replay.py) of a virtual machine of its own. Raises ArtifactError if the code has none."""
        machine = self._load()
        machine["vm_initialization"](*self._devices, CPU, 0, _POOLED)
        try:
            return machine["replay"]
        except AttributeError as error:
            raise ArtifactError("the artifact is from before there were graphs: compile the model again.") from error

    def function(self, name: str) -> tvm_ffi.Function:
        """A compiled function by name."""
        return self._executable.get_function(name, query_imports=True)


class Machine:
    """A virtual machine: main(*inputs[, weights]) gives an array of outputs; release() lets go of the last one."""

    __slots__ = ("main", "release")

    def __init__(self, machine: tvm_ffi.Module) -> None:
        self.main = machine["main"]
        self.release = machine["release"]
