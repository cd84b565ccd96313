"""The GPU part of the TVM runtime, and properties of the installed GPU."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import tvm_ffi

from ..errors import ArtifactError
from ..machine import CUDART, DRIVER, find_cudart, find_first_file, install_command, list_runtime_folders

CPU, CUDA = 1, 2  # kDLCPU, kDLCUDA

_RUNTIME = "libtvm_runtime_cuda.so"
# A function that loading the runtime registers.
_LOADER = "ffi.Module.load_from_bytes.cuda"
# DeviceAttrKind of the runtime.
_COMPUTE_VERSION, _NAME, _L2_BYTES = 4, 5, 13  # the first is "9.0"


def load_device_runtime(folder: Path | None = None) -> None:
    """Make CUDA devices available to the TVM runtime, which must be loaded already.

    Libraries are searched in `folder`, then in the folders of their wheels. Raises ArtifactError.
    """
    if tvm_ffi.get_global_func(_LOADER, allow_missing=True) is not None:
        return
    folders = [] if folder is None else [folder.absolute()]
    runtime = find_first_file([*folders, *list_runtime_folders()], _RUNTIME)
    if runtime is None:
        raise ArtifactError("gpu.runtime_missing", f"no installed apache-tvm has {_RUNTIME}. Install apache-tvm.")
    try:
        ctypes.CDLL(DRIVER, ctypes.RTLD_GLOBAL)
    except OSError as error:
        raise ArtifactError(
            "gpu.driver_missing", f"this machine has no NVIDIA driver ({DRIVER}). Install it."
        ) from error
    try:
        ctypes.CDLL(str(find_first_file(folders, CUDART) or find_cudart() or CUDART), ctypes.RTLD_GLOBAL)
        ctypes.CDLL(str(runtime))
    except OSError as error:
        raise ArtifactError(
            "gpu.runtime_unloadable",
            f"the CUDA runtime cannot be loaded: {error}. Install it: {install_command('cuda')}.",
        ) from error


def read_gpu_architecture(device: int) -> str:
    """Return the architecture of GPU number `device`, such as `sm_90`. Raises ArtifactError without such a GPU."""
    return f"sm_{_read_attribute(device, _COMPUTE_VERSION).replace('.', '')}"


def read_gpu_card(device: int) -> tuple[str, int]:
    """Return the name of GPU number `device` and the bytes of its L2 cache. Raises ArtifactError as above."""
    return str(_read_attribute(device, _NAME)), int(_read_attribute(device, _L2_BYTES))


def _read_attribute(device: int, kind: int) -> Any:
    try:
        value = tvm_ffi.get_global_func("runtime.GetDeviceAttr")(CUDA, device, kind)
    except RuntimeError:  # raised by CUDA: no driver, or none that works
        value = None
    if value is None:
        raise ArtifactError(
            "gpu.device_missing", f"this machine has no GPU number {device} that CUDA can use. Choose another device."
        )
    return value


def choose_architecture(architectures: Sequence[str], local: str) -> str:
    """Return the best of the compiled architectures for a GPU. Raises ArtifactError if none runs on it."""
    runnable = [architecture for architecture in architectures if runs_on(architecture, local)]
    if not runnable:
        raise ArtifactError(
            "artifact.gpu_architecture_mismatch",
            f"the artifact was built for GPUs of architecture {', '.join(architectures)} and the one here is {local}: "
            "compile the model for it.",
        )
    return max(runnable, key=_rank_architecture)


def _rank_architecture(architecture: str) -> tuple[int, bool, bool]:
    """Return a sort key: the version, then generic, family-specific and architecture-specific code."""
    number = architecture.removeprefix("sm_")
    return int(number.rstrip("af")), number[-1] in "af", number[-1] == "a"


def runs_on(built: str, here: str) -> bool:
    """Return whether code built for an architecture runs on the local one.

    Code runs on GPUs of the same major version and at least the same minor one (CUDA C++ Programming Guide, Binary
    Compatibility). So does code for a family (`sm_100f`). Code that uses features of one architecture (`sm_90a`) runs
    only on that one.
    """
    number, own = built.removeprefix("sm_"), here.removeprefix("sm_")
    if number.endswith("a"):
        return number[:-1] == own
    number = number.rstrip("f")
    return number[:-1] == own[:-1] and number[-1] <= own[-1]
