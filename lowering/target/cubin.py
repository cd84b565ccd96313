"""CUDA C++ becomes machine code: by nvcc or, where no toolkit is installed, by NVRTC out of the `cuda` extra.

Not with --use_fast_math: it makes exp, log and division of ordinary operators inaccurate. Kernels that want
approximate instructions name them.
"""

from __future__ import annotations

import importlib.util
import logging
import subprocess
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from pathlib import Path

import tvm
import tvm_ffi

from ..errors import TargetError
from ..machine import find_nvcc as find_nvcc
from ..machine import install_command

# TVM's code uses the operators of the types of 16 bits. ptxas keeps its --register-usage-level of 5: with 10, which TVM
# asks for, it spills in the kernels for Hopper.
_FLAGS = (
    *(f"-U__CUDA_NO_{name}__" for name in ("HALF_OPERATORS", "HALF_CONVERSIONS", "BFLOAT16_OPERATORS")),
    *(f"-U__CUDA_NO_{name}__" for name in ("BFLOAT16_CONVERSIONS", "BFLOAT162_OPERATORS", "BFLOAT162_CONVERSIONS")),
)

_LOG = logging.getLogger(__name__)

_IS_WANTED = ContextVar("machine code is wanted", default=True)

# What NVRTC lacks of what nvcc includes unasked; the complete type of TMA descriptors is in the driver's header.
_NVRTC_PRELUDE = """\
#include <cuda/std/cstdint>
#include <cuda/std/limits>
using cuda::std::int8_t; using cuda::std::int16_t; using cuda::std::int32_t; using cuda::std::int64_t;
using cuda::std::uint8_t; using cuda::std::uint16_t; using cuda::std::uint32_t; using cuda::std::uint64_t;
#define INFINITY (::cuda::std::numeric_limits<float>::infinity())
struct alignas(64) CUtensorMap_st { unsigned long long opaque[16]; };
typedef struct CUtensorMap_st CUtensorMap;
"""


@tvm_ffi.register_global_func("tvm_callback_cuda_compile", override=True)
def cubin(source: str) -> bytes:
    """Machine code for the architecture of the current target: what TVM calls with the CUDA C++ of a module's kernels.

    What ptxas has to say of it is logged. Raises TargetError when there is no compiler, or it refuses.
    """
    if not _IS_WANTED.get():
        return b"\x7fELF"
    arch = str(tvm.target.Target.current().attrs["arch"])
    code, said = machine_code(source, arch)
    for line in filter(None, map(str.strip, said.splitlines())):
        # Spills cost some speed; that matmuls wait for each other (C7508 and its like) is a fault of ours.
        _LOG.log(logging.INFO if "spilled" in line else logging.WARNING, "%s: %s", arch, line)
    return code


@contextmanager
def without_machine_code() -> Iterator[None]:
    """Generate CUDA C++ without compiling it: what TVM cannot lower fails all the same, and in less time."""
    token = _IS_WANTED.set(False)
    try:
        yield
    finally:
        _IS_WANTED.reset(token)


def machine_code(source: str, arch: str) -> tuple[bytes, str]:
    """The code for an architecture, and what ptxas said. Raises TargetError."""
    nvcc = find_nvcc()
    if nvcc is not None:
        return _by_nvcc(nvcc, source, arch)
    if importlib.util.find_spec("cuda") and importlib.util.find_spec("cuda.bindings"):
        return _by_nvrtc(source, arch)
    raise TargetError(
        f"Code for '{arch}' is compiled by nvcc, which is not installed, or by NVRTC: {install_command('cuda')}."
    )


def _by_nvcc(nvcc: str, source: str, arch: str) -> tuple[bytes, str]:
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "kernels.cu"
        path.write_text(source)
        code = f"arch=compute_{arch.removeprefix('sm_')},code={arch}"
        # TVM's code has variables that nobody reads: of the front end's warnings nothing is to be learned.
        said = ["-Xcudafe", "-w", "-Xptxas", "-warn-spills"]
        command = [nvcc, "--cubin", "-O3", *said, "-gencode", code, *_FLAGS, "--expt-relaxed-constexpr"]
        done = subprocess.run([*command, path, "-o", path.with_suffix(".cubin")], capture_output=True, text=True)
        if done.returncode != 0:
            raise TargetError(f"nvcc cannot compile kernels for '{arch}':\n{done.stderr}")
        return path.with_suffix(".cubin").read_bytes(), done.stderr


def _by_nvrtc(source: str, arch: str) -> tuple[bytes, str]:
    from cuda.bindings import nvrtc

    wheel = importlib.util.find_spec("nvidia.cu13")
    folders = [Path(p) / "include" for p in (wheel.submodule_search_locations or [] if wheel else [])]
    includes = [f"-I{path}" for folder in folders for path in (folder, folder / "cccl")]
    said = ("-w", "--ptxas-options=-warn-spills")
    options = [o.encode() for o in (f"--gpu-architecture={arch}", "-default-device", *said, *_FLAGS, *includes)]
    text = _NVRTC_PRELUDE + source.replace("#include <cuda.h>", "")
    _, program = nvrtc.nvrtcCreateProgram(text.encode(), b"kernels.cu", 0, None, None)
    (status,) = nvrtc.nvrtcCompileProgram(program, len(options), options)
    log = bytearray(nvrtc.nvrtcGetProgramLogSize(program)[1])
    nvrtc.nvrtcGetProgramLog(program, log)
    if status != nvrtc.nvrtcResult.NVRTC_SUCCESS:
        raise TargetError(f"NVRTC cannot compile kernels for '{arch}':\n{log.decode()}")
    code = bytearray(nvrtc.nvrtcGetCUBINSize(program)[1])
    nvrtc.nvrtcGetCUBIN(program, code)
    nvrtc.nvrtcDestroyProgram(program)
    return bytes(code), log.decode().rstrip("\0")
