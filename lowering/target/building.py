"""Building for GPUs on machines that have none.

TVM wraps machine code for GPUs in its CUDA runtime's module. Without that runtime it would put the CUDA C++ into the
artifact, to be compiled at load. The runtime needs the driver's library: if there is none, a stub replaces it whose
functions all return an error.
"""

from __future__ import annotations

import ctypes
import subprocess
import tempfile
from pathlib import Path

from ..errors import ArtifactError, TargetError
from ..machine import CUDART, DRIVER, find_cudart
from ..runtime.gpu import load_device_runtime
from . import cubin as cubin  # the compiler of kernels, registered with TVM

_SOURCE = Path(__file__).with_name("stand_in.c")


def load_cuda_runtime(cc: str) -> None:
    """Load the CUDA part of the TVM runtime, with stubs for missing libraries.

    cc is the C compiler that builds the stubs. Raises TargetError.
    """
    with tempfile.TemporaryDirectory() as folder:
        try:
            if not _loads(DRIVER):
                _build_stub(cc, DRIVER, Path(folder), "-DDRIVER")
            if find_cudart() is None:
                script = Path(folder) / "versions"
                script.write_text(f"{CUDART} {{ *; }};\n")
                _build_stub(cc, CUDART, Path(folder), f"-Wl,--version-script={script}")
            load_device_runtime(None)
        except (ArtifactError, OSError, subprocess.CalledProcessError) as error:
            raise TargetError(
                "toolchain.cuda_runtime_unloadable",
                f"TVM's CUDA runtime, which packs machine code, cannot be loaded: {error}",
            ) from error


def _loads(library: str) -> bool:
    try:
        ctypes.CDLL(library, ctypes.RTLD_GLOBAL)
    except OSError:
        return False
    return True


def _build_stub(cc: str, name: str, folder: Path, option: str) -> None:
    path = folder / name
    command = [cc, "-shared", "-fPIC", "-w", f"-Wl,-soname,{name}", option, str(_SOURCE), "-o", str(path)]
    subprocess.run(command, check=True, capture_output=True)
    ctypes.CDLL(str(path), ctypes.RTLD_GLOBAL)
