"""The GPU part of the TVM runtime, and what GPU is here."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import tvm_ffi

from ..errors import ArtifactError
from ..machine import CUDART, DRIVER, find_cudart, first_file, install_command, runtime_folders

CPU, CUDA = 1, 2  # kDLCPU, kDLCUDA

_RUNTIME = "libtvm_runtime_cuda.so"
# What loading the runtime registers.
_LOADER = "ffi.Module.load_from_bytes.cuda"
# DeviceAttrKind of the runtime.
_COMPUTE_VERSION, _NAME, _L2_BYTES = 4, 5, 13  # the first is "9.0"


def load_device_runtime(beside: Path | None = None) -> None:
    """Makes CUDA devices available to the TVM runtime, which is loaded already.

    Libraries are looked for in the folder `beside`, then where their wheels put them. Raises ArtifactError.
    """
    if tvm_ffi.get_global_func(_LOADER, allow_missing=True) is not None:
        return
    places = [] if beside is None else [beside.absolute()]
    runtime = first_file([*places, *runtime_folders()], _RUNTIME)
    if runtime is None:
        raise ArtifactError(f"{_RUNTIME} is in no installed apache-tvm. Install apache-tvm.")
    try:
        ctypes.CDLL(DRIVER, ctypes.RTLD_GLOBAL)
    except OSError as error:
        raise ArtifactError(f"this machine has no NVIDIA driver ({DRIVER}).") from error
    try:
        ctypes.CDLL(str(first_file(places, CUDART) or find_cudart() or CUDART), ctypes.RTLD_GLOBAL)
        ctypes.CDLL(str(runtime))
    except OSError as error:
        raise ArtifactError(
            f"the CUDA runtime cannot be loaded: {error}. Install it: {install_command('cuda')}."
        ) from error


def architecture_here(device: int) -> str:
    """What GPU number `device` is, as `sm_90`. Raises ArtifactError if there is no such GPU."""
    return f"sm_{_attribute(device, _COMPUTE_VERSION).replace('.', '')}"


def card_here(device: int) -> tuple[str, int]:
    """The name of GPU number `device`, and the bytes of its second-level cache. Raises ArtifactError likewise."""
    return str(_attribute(device, _NAME)), int(_attribute(device, _L2_BYTES))


def _attribute(device: int, kind: int) -> Any:
    try:
        value = tvm_ffi.get_global_func("runtime.GetDeviceAttr")(CUDA, device, kind)
    except RuntimeError:  # CUDA's: no driver, or none that works
        value = None
    if value is None:
        raise ArtifactError(f"this machine has no GPU number {device} that CUDA can use.")
    return value


def best_for(built: Sequence[str], here: str) -> str:
    """The architecture, of those that code was built for, whose code to run. Raises ArtifactError if none runs here."""
    runs = [architecture for architecture in built if runs_on(architecture, here)]
    if not runs:
        raise ArtifactError(
            f"the artifact was built for GPUs of architecture {', '.join(built)} and the one here is {here}: "
            "compile the model for it."
        )
    return max(runs, key=_newer)


def _newer(architecture: str) -> tuple[int, bool, bool]:
    """Order by version, then code for anything of it, for its family, for itself alone."""
    number = architecture.removeprefix("sm_")
    return int(number.rstrip("af")), number[-1] in "af", number[-1] == "a"


def runs_on(built: str, here: str) -> bool:
    """Whether code built for an architecture runs on the one that is here.

    Code runs on GPUs of the same major version and at least the same minor one (CUDA C++ Programming Guide, Binary
    Compatibility), and so does code for a family (`sm_100f`); what uses features of one architecture (`sm_90a`) on that
    one alone.
    """
    number, own = built.removeprefix("sm_"), here.removeprefix("sm_")
    if number.endswith("a"):
        return number[:-1] == own
    number = number.rstrip("f")
    return number[:-1] == own[:-1] and number[-1] <= own[-1]
