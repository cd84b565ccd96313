"""The real GPU in place of the emulation: `pytest --gpu`.

What tests hand to the emulation's worker then runs on the first GPU of this machine. Code for an older architecture is
compiled for the GPU that is here, from the same CUDA C++ with the older architecture's macros: PTX of sm_80 is legal on
sm_90. Orders of threads and arrivals of copies are the hardware's, and nobody counts calls, accesses or matmuls.
"""

import functools
import importlib
import os
import shutil
import stat
import tempfile
from pathlib import Path

VARIABLE = "ONNX_LOWERING_TEST_GPU"
"""Set to 1 where tests run on the real GPU; processes inherit it."""

_NVCC = """\
#!/bin/sh
# The real nvcc, for the GPU that is here: `-gencode arch=compute_80,code=sm_80` makes code for it out of PTX for sm_80.
for argument; do
  shift
  case "$argument" in
    arch=compute_*a,code=*) ;;
    arch=compute_*,code=sm_*) argument="${{argument%,code=*}},code={code}" ;;
  esac
  set -- "$@" "$argument"
done
exec {nvcc} "$@"
"""


def is_used() -> bool:
    """Return whether tests run on the real GPU."""
    return os.environ.get(VARIABLE) == "1"


@functools.cache
def architecture() -> str:
    """Return the name of the GPU's architecture in DEVICES of schedules/cuda/primitives/device.py, such as "sm_90a"."""
    import subprocess

    query = ["nvidia-smi", "--query-gpu=compute_cap", "--format=csv,noheader"]
    said = subprocess.run(query, capture_output=True, text=True, check=True).stdout
    number = said.splitlines()[0].strip().replace(".", "")
    return f"sm_{number}a" if number == "90" else f"sm_{number}"


def runs(arch: str) -> bool:
    """Return whether code for an architecture can be made to run here."""
    here, number = architecture(), int(arch.removeprefix("sm_").rstrip("a"))
    return arch == here or (not arch.endswith("a") and number <= int(here.removeprefix("sm_").rstrip("a")))


def libraries() -> tuple[str, str]:
    """Return the names of the driver's and the runtime's libraries, which TVM has loaded."""
    from lowering.machine import CUDART, DRIVER

    return DRIVER, CUDART


def compile_source(source: str, arch: str) -> bytes:
    """Return machine code for this GPU of CUDA C++ that is for an architecture."""
    from lowering.target.cubin import machine_code

    return machine_code(source, arch)[0]


def prepare() -> None:
    """Make this process compile for the GPU that is here, and run code of any older architecture on it."""
    nvcc = shutil.which("nvcc") or shutil.which("nvcc", path="/usr/local/cuda/bin")
    if nvcc is None:
        raise RuntimeError("nvcc is not installed: tests on a GPU compile by it")
    folder = Path(tempfile.mkdtemp(prefix="nvcc-for-this-gpu-"))
    script = folder / "nvcc"
    script.write_text(_NVCC.format(nvcc=nvcc, code=architecture().rstrip("a")))
    script.chmod(script.stat().st_mode | stat.S_IXUSR)
    os.environ["PATH"] = f"{folder}{os.pathsep}{os.environ['PATH']}"
    import tvm

    importlib.import_module("lowering.target.cubin")
    gpu = importlib.import_module("lowering.runtime.gpu")
    artifact_cache = importlib.import_module("lowering.compiling.cache.artifact_cache")
    artifact_cache.key = lambda *_: None  # code of sm_80 that is for this GPU is nothing for others
    gpu.runs_on = lambda built, here: runs(built)
    if not tvm.cuda(0).exist:
        raise RuntimeError("TVM finds no GPU here")
