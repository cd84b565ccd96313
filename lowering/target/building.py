"""Building for GPUs on machines that have none.

TVM wraps machine code for GPUs in its CUDA runtime's module; without that runtime it would put the CUDA C++ into the
artifact, to be compiled at load. The runtime needs the driver's library: where there is none, one stands in for it that
refuses everything.
"""

from __future__ import annotations

import ctypes
import subprocess
import tempfile
from pathlib import Path

from ..errors import ArtifactError, TargetError
from ..machine import CUDART, DRIVER, find_cudart
from ..runtime.gpu import load_device_runtime
from . import cubin as cubin  # what compiles kernels, registered with TVM

_SOURCE = Path(__file__).with_name("stand_in.c")


def make_modules_of_machine_code(cc: str) -> None:
    """Loads the CUDA part of the TVM runtime, with what stands in for missing libraries.

    cc is the C compiler that makes them. Raises TargetError.
    """
    with tempfile.TemporaryDirectory() as folder:
        try:
            if not _loads(DRIVER):
                _stand_in(cc, DRIVER, Path(folder), "-DDRIVER")
            if find_cudart() is None:
                script = Path(folder) / "versions"
                script.write_text(f"{CUDART} {{ *; }};\n")
                _stand_in(cc, CUDART, Path(folder), f"-Wl,--version-script={script}")
            load_device_runtime(None)
        except (ArtifactError, OSError, subprocess.CalledProcessError) as error:
            raise TargetError(f"TVM's CUDA runtime, which packs machine code, cannot be loaded: {error}") from error


def _loads(library: str) -> bool:
    try:
        ctypes.CDLL(library, ctypes.RTLD_GLOBAL)
    except OSError:
        return False
    return True


def _stand_in(cc: str, name: str, folder: Path, option: str) -> None:
    path = folder / name
    command = [cc, "-shared", "-fPIC", "-w", f"-Wl,-soname,{name}", option, str(_SOURCE), "-o", str(path)]
    subprocess.run(command, check=True, capture_output=True)
    ctypes.CDLL(str(path), ctypes.RTLD_GLOBAL)
