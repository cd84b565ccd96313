"""The TVM runtime library and one model.so, loaded without the compiler."""

from __future__ import annotations

import ctypes
import sys
from collections.abc import Callable
from pathlib import Path

import tvm_ffi

from ..errors import ArtifactError
from .gpu import CPU, CUDA

_RUNTIME = "libtvm_runtime.so"
# What loading the runtime registers.
_LOADER = "ffi.Module.load_from_bytes.relax.VMExecutable"
# vm_initialization takes device type, device number and allocator for each device: where the model runs, and the host.
_POOLED = 2

# Called before and after each function that a virtual machine calls: with the function, its name, whether it is before,
# the result if it is not, and the arguments. 0 lets the machine go on.
Instrument = Callable[..., int]


def load_runtime(folder: Path) -> None:
    """Makes the TVM runtime available to the process.

    It is looked for beside the artifact in `folder`, then where the apache-tvm wheel puts it. The wheel is not
    imported, nor asked of the import system: that would load the compiler, or fail where it is barred. Raises
    ArtifactError.
    """
    if tvm_ffi.get_global_func(_LOADER, allow_missing=True) is not None:
        return
    places = [folder / _RUNTIME, *(Path(p) / "tvm" / "lib" / _RUNTIME for p in sys.path)]
    found = next((p for p in places if p.is_file()), None)
    if found is None:
        raise ArtifactError(
            f"the TVM runtime library {_RUNTIME} is neither in '{folder}' nor in an installed apache-tvm. "
            "Install apache-tvm, or copy the library into that folder."
        )
    try:
        # Code that TVM generates finds the runtime's functions among the global symbols.
        ctypes.CDLL(str(found.absolute()), ctypes.RTLD_GLOBAL)
    except OSError as error:
        raise ArtifactError(f"the TVM runtime library '{found}' cannot be loaded: {error}.") from error


class Library:
    """A loaded model.so.

    Code and constants exist once; each virtual machine runs one call at a time, on the CPU or on a GPU.
    """

    def __init__(self, path: Path, gpu: int | None = None) -> None:
        self._devices = (CPU, 0, _POOLED) if gpu is None else (CUDA, gpu, _POOLED)
        try:
            # It lives as long as functions or virtual machines of it do; results are memory of the runtime.
            self._executable = tvm_ffi.load_module(str(path.absolute()), keep_module_alive=False)
            self.set_threads = self._executable.get_function("lowering_set_threads", query_imports=True)
            self._load = self._executable.get_function("vm_load_executable")
        except (RuntimeError, ValueError, AttributeError) as error:
            reason = next((line for line in str(error).splitlines() if line.strip()), type(error).__name__)
            raise ArtifactError(f"'{path}' cannot be loaded as a compiled model: {reason}") from error

    def new_machine(self, instrument: Instrument | None = None) -> Machine:
        machine = self._load()
        machine["vm_initialization"](*self._devices, CPU, 0, _POOLED)
        if instrument is not None:
            machine["set_instrument"](tvm_ffi.convert(instrument))
        return Machine(machine)

    def function(self, name: str) -> tvm_ffi.Function:
        """A compiled function by name."""
        return self._executable.get_function(name, query_imports=True)


class Machine:
    """A virtual machine: main(*inputs[, weights]) gives an array of outputs; release() lets go of the last one."""

    __slots__ = ("main", "release")

    def __init__(self, machine: tvm_ffi.Module) -> None:
        self.main = machine["main"]
        self.release = machine["release"]
