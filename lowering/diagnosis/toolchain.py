"""Compilers and linkers, the NVIDIA driver and GPUs."""

from __future__ import annotations

import ctypes
import importlib.util
import platform
import shutil
import subprocess
import tempfile

from ..machine import CUDART, DRIVER, find_cudart, find_nvcc, install_command, runtime_alone
from .report import DiagnosisReport

_MIN_DRIVER = 13000  # cuDriverGetVersion of CUDA 13.0, driver 580
_MIN_GPU = 8  # major compute capability
_MAJOR, _MINOR = 75, 76  # CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_*
# Requirements of linking a model library (runtime/native/parallel.c): the C library's headers, and threads.
_TRIAL = "#include <pthread.h>\n#include <stdint.h>\nint32_t f(void) { return (int32_t)pthread_self(); }\n"


def examine(report: DiagnosisReport) -> None:
    if not runtime_alone():
        _examine_linker(report)
        for machine in ("aarch64", "riscv64"):
            if machine != platform.machine():
                cross = shutil.which(f"{machine}-linux-gnu-gcc")
                missing = f"none (Debian's gcc-{machine}-linux-gnu), for --target cpu:{machine}"
                report.add_fact("linkers", machine, cross or missing)
        _examine_cuda_compiler(report)
    _examine_driver(report)


def _examine_linker(report: DiagnosisReport) -> None:
    gcc = shutil.which("gcc")
    report.add_fact("linkers", "this machine", gcc or "none")
    fix = "Install it with the C library's headers, for instance: apt-get install gcc libc6-dev"
    if gcc is None:
        report.add_problem("there is no gcc, which links compiled models.", fix, blocks=True)
        return
    with tempfile.NamedTemporaryFile(suffix=".so") as file:
        command = [gcc, "-shared", "-fPIC", "-pthread", "-x", "c", "-", "-o", file.name]
        process = subprocess.run(command, input=_TRIAL, capture_output=True, text=True)
    if process.returncode != 0:
        message = (process.stderr.strip().splitlines() or [f"status {process.returncode}"])[0]
        report.add_problem(f"gcc cannot make a shared library: {message}.", fix, blocks=True)


def _examine_cuda_compiler(report: DiagnosisReport) -> None:
    nvcc = find_nvcc()
    try:
        nvrtc = importlib.util.find_spec("cuda.bindings") is not None
    except ModuleNotFoundError:
        nvrtc = False
    compiler = nvcc or ("NVRTC, of cuda-bindings" if nvrtc else None)
    report.add_fact("gpu", "compiler", compiler or f"none (nvcc, or {install_command('cuda')}), for --target cuda:...")


def _examine_driver(report: DiagnosisReport) -> None:
    cudart = find_cudart()
    report.add_fact("gpu", "CUDA runtime", str(cudart) if cudart else f"no {CUDART}, which running on a GPU needs")
    try:
        driver = ctypes.CDLL(DRIVER)
        get_version = driver.cuDriverGetVersion
    except (OSError, AttributeError):  # the stub driver of compilation (target/stand_in.c) has no version
        report.add_fact("gpu", "driver", f"none ({DRIVER})")
        return
    version, count = ctypes.c_int(), ctypes.c_int()
    get_version(ctypes.byref(version))
    report.add_fact("gpu", "driver", f"for CUDA {version.value // 1000}.{version.value % 1000 // 10}")
    if version.value < _MIN_DRIVER:
        problem = f"the NVIDIA driver is for CUDA {version.value // 1000}, and artifacts need CUDA 13."
        report.add_problem(problem, "Install driver 580 or later.")
    status = driver.cuInit(0) or driver.cuDeviceGetCount(ctypes.byref(count))
    if status:
        report.add_problem(f"the NVIDIA driver is installed and reports error {status}.", "Run nvidia-smi for details.")
    for number in range(count.value):
        name, size, capability = ctypes.create_string_buffer(100), ctypes.c_size_t(), [ctypes.c_int(), ctypes.c_int()]
        driver.cuDeviceGetName(name, len(name), number)
        driver.cuDeviceTotalMem_v2(ctypes.byref(size), number)
        for value, attribute in zip(capability, (_MAJOR, _MINOR)):
            driver.cuDeviceGetAttribute(ctypes.byref(value), attribute, number)
        architecture = f"sm_{capability[0].value}{capability[1].value}"
        if capability[0].value < _MIN_GPU:
            problem = f"GPU {number} is {architecture}, and artifacts are for GPUs from sm_{_MIN_GPU}0 on."
            report.add_problem(problem, "Compile for the CPU, or run on a newer GPU: lowering.load(..., device=N).")
        report.add_fact("gpu", f"GPU {number}", f"{name.value.decode()}, {architecture}, {size.value / 2**30:.0f} GiB")
    if count.value and cudart is None:
        report.add_problem(f"there is a GPU and no {CUDART} to run on it.", install_command("cuda"))
