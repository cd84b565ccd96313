"""Compilation of CUDA C++ to machine code: by nvcc or, without a toolkit, by NVRTC from the `cuda` extra.

--use_fast_math is not set: it makes exp, log and division of ordinary operators inaccurate. Kernels that profit from
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

# TVM's code uses the operators of 16-bit types. ptxas stays at its --register-usage-level of 5: at 10, which TVM sets,
# it spills in the kernels for Hopper.
_FLAGS = (
    *(f"-U__CUDA_NO_{name}__" for name in ("HALF_OPERATORS", "HALF_CONVERSIONS", "BFLOAT16_OPERATORS")),
    *(f"-U__CUDA_NO_{name}__" for name in ("BFLOAT16_CONVERSIONS", "BFLOAT162_OPERATORS", "BFLOAT162_CONVERSIONS")),
)

_LOG = logging.getLogger(__name__)

_IS_ENABLED = ContextVar("machine code is wanted", default=True)

# Headers that nvcc includes by default and NVRTC does not; the complete type of TMA descriptors is in the driver's
# header.
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
def compile_cubin(source: str) -> bytes:
    """Compile the CUDA C++ of a module's kernels for the architecture of the current target; TVM calls this.

    Messages of ptxas are logged. Raises TargetError when there is no compiler, or it fails.
    """
    if not _IS_ENABLED.get():
        return b"\x7fELF"
    arch = str(tvm.target.Target.current().attrs["arch"])
    code, messages = machine_code(source, arch)
    for line in filter(None, map(str.strip, messages.splitlines())):
        # Spills cost some speed; serialized matmuls (C7508 and the like) are a bug of the kernel.
        _LOG.log(logging.INFO if "spilled" in line else logging.WARNING, "%s: %s", arch, line)
    return code


@contextmanager
def skip_machine_code() -> Iterator[None]:
    """Generate CUDA C++ without compiling it: code that TVM cannot lower still fails, and sooner."""
    token = _IS_ENABLED.set(False)
    try:
        yield
    finally:
        _IS_ENABLED.reset(token)


def machine_code(source: str, arch: str) -> tuple[bytes, str]:
    """Return the code for an architecture, and the messages of ptxas. Raises TargetError."""
    nvcc = find_nvcc()
    if nvcc is not None:
        return _compile_by_nvcc(nvcc, source, arch)
    if importlib.util.find_spec("cuda") and importlib.util.find_spec("cuda.bindings"):
        return _compile_by_nvrtc(source, arch)
    raise TargetError(
        "toolchain.cuda_compiler_missing",
        f"Code for '{arch}' is compiled by nvcc or NVRTC, and neither is installed. Install NVRTC: "
        f"{install_command('cuda')}.",
    )


def _compile_by_nvcc(nvcc: str, source: str, arch: str) -> tuple[bytes, str]:
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "kernels.cu"
        path.write_text(source)
        code = f"arch=compute_{arch.removeprefix('sm_')},code={arch}"
        # TVM's code has unused variables, so warnings of the front end carry no information.
        flags = ["-Xcudafe", "-w", "-Xptxas", "-warn-spills"]
        command = [nvcc, "--cubin", "-O3", *flags, "-gencode", code, *_FLAGS, "--expt-relaxed-constexpr"]
        process = subprocess.run([*command, path, "-o", path.with_suffix(".cubin")], capture_output=True, text=True)
        if process.returncode != 0:
            raise TargetError(
                "toolchain.cuda_compile_failed", f"nvcc cannot compile kernels for '{arch}':\n{process.stderr}"
            )
        return path.with_suffix(".cubin").read_bytes(), process.stderr


def _compile_by_nvrtc(source: str, arch: str) -> tuple[bytes, str]:
    from cuda.bindings import nvrtc

    wheel = importlib.util.find_spec("nvidia.cu13")
    folders = [Path(p) / "include" for p in (wheel.submodule_search_locations or [] if wheel else [])]
    includes = [f"-I{path}" for folder in folders for path in (folder, folder / "cccl")]
    flags = ("-w", "--ptxas-options=-warn-spills")
    options = [o.encode() for o in (f"--gpu-architecture={arch}", "-default-device", *flags, *_FLAGS, *includes)]
    text = _NVRTC_PRELUDE + source.replace("#include <cuda.h>", "")
    _, program = nvrtc.nvrtcCreateProgram(text.encode(), b"kernels.cu", 0, None, None)
    (status,) = nvrtc.nvrtcCompileProgram(program, len(options), options)
    log = bytearray(nvrtc.nvrtcGetProgramLogSize(program)[1])
    nvrtc.nvrtcGetProgramLog(program, log)
    if status != nvrtc.nvrtcResult.NVRTC_SUCCESS:
        raise TargetError(
            "toolchain.cuda_compile_failed", f"NVRTC cannot compile kernels for '{arch}':\n{log.decode()}"
        )
    code = bytearray(nvrtc.nvrtcGetCUBINSize(program)[1])
    nvrtc.nvrtcGetCUBIN(program, code)
    nvrtc.nvrtcDestroyProgram(program)
    return bytes(code), log.decode().rstrip("\0")
