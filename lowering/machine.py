"""This machine's properties for compiling and running, read without importing the compiler or the runtime."""

from __future__ import annotations

import platform
import shutil
import sys
from pathlib import Path

DRIVER, CUDART = "libcuda.so.1", "libcudart.so.13"

SHIPPED = Path(__file__).parent / "runtime" / "lib"
"""The folder of TVM's libraries in the wheel onnx-lowering-runtime; other installations use those of apache-tvm."""
VERSION_FILE = "apache-tvm.version"
"""The file with the version of these libraries."""

# The folders of CUDART in CUDA's wheel and of its installer.
_WHEEL, _TOOLKIT = Path("nvidia/cu13/lib"), Path("/usr/local/cuda/lib64")

# CPU features that generated code may use: names of Linux's /proc/cpuinfo, and of LLVM.
X86_FEATURES = {
    "sse4_2": "sse4.2", "popcnt": "popcnt", "avx": "avx", "f16c": "f16c", "fma": "fma", "bmi1": "bmi", "bmi2": "bmi2",
    "avx2": "avx2", "abm": "lzcnt", "movbe": "movbe",
    "avx512f": "avx512f", "avx512bw": "avx512bw", "avx512cd": "avx512cd", "avx512dq": "avx512dq",
    "avx512vl": "avx512vl", "avx512_vnni": "avx512vnni", "avx512_bf16": "avx512bf16", "avx_vnni": "avxvnni",
}  # fmt: skip
AARCH64_FEATURES = {"asimddp": "dotprod", "i8mm": "i8mm"}
RISCV64_FEATURES = {"v": "v"}
FEATURES = {"x86_64": X86_FEATURES, "aarch64": AARCH64_FEATURES, "riscv64": RISCV64_FEATURES}

V3 = ("sse4_2", "popcnt", "avx", "f16c", "fma", "bmi1", "bmi2", "avx2", "abm", "movbe")
V4 = (*V3, "avx512f", "avx512bw", "avx512cd", "avx512dq", "avx512vl")


def cpu_flags() -> frozenset[str]:
    """Return the features of this machine's CPUs, as Linux names them."""
    for line in Path("/proc/cpuinfo").read_text().splitlines():
        key, _, value = line.partition(":")
        if key.strip() in ("flags", "Features"):
            return frozenset(value.split())
    return frozenset()


def host_features() -> tuple[str, ...]:
    """Return the features of this machine that generated code may use, by /proc/cpuinfo name."""
    flags = cpu_flags()
    return tuple(f for f in FEATURES.get(platform.machine(), {}) if f in flags)


def find_first_file(folders: list[Path], name: str) -> Path | None:
    """Return the file of that name in the first folder that has it, or None."""
    return next((f / name for f in folders if (f / name).is_file()), None)


def list_runtime_folders() -> list[Path]:
    """Return the possible folders of TVM's runtime libraries."""
    return [SHIPPED, *(Path(p) / "tvm" / "lib" for p in sys.path)]


def runtime_alone() -> bool:
    """Return whether this is onnx-lowering-runtime, which has no compiler."""
    return (SHIPPED / VERSION_FILE).is_file()


def describe_missing_package(package: str, distribution: str = "") -> str:
    """Return the sentences about a missing package, whose name on the package index is `distribution`."""
    return f"{package} is not installed. Install it: pip install {distribution or package}."


def install_command(extra: str = "", options: str = "") -> str:
    """Return the command that installs this package again, with the requirements of an extra.

    The package is not on an index: the command names the checkout or the wheel file of the installation, if it still
    exists.
    """
    command = "pip install" + (f" {options}" if options else "")
    suffix, origin = f"[{extra}]" if extra else "", _origin()
    if origin is not None:
        return f"{command} '{origin}{suffix}'"
    if runtime_alone():
        return f"{command} 'WHEEL{suffix}', where WHEEL is the file of onnx-lowering-runtime"
    return f"{command} '.{suffix}' in a checkout of onnx-lowering"


def get_compiler() -> str:
    """Return how to get the compiler where onnx-lowering-runtime is installed."""
    return "pip uninstall onnx-lowering-runtime, then pip install . in a checkout of onnx-lowering"


def _origin() -> Path | None:
    """Return the checkout or the wheel file of this installation, or None where it is gone or cannot be determined."""
    import json  # imported here: every process imports this module, and few need an installer's record
    from importlib import metadata
    from urllib.parse import unquote, urlsplit

    checkout = Path(__file__).parents[1]
    if (checkout / "pyproject.toml").is_file():
        return checkout
    name = "onnx-lowering-runtime" if runtime_alone() else "onnx-lowering"
    for installed in metadata.distributions(name=name):  # metadata of a build in a checkout has no origin
        try:
            url_text = installed.read_text("direct_url.json")
            url = urlsplit(json.loads(url_text)["url"]) if url_text else None
        except (ValueError, KeyError, OSError):
            continue
        path = Path(unquote(url.path)) if url is not None and url.scheme == "file" else None
        if path is not None and path.exists():
            return path
    return None


def find_cudart() -> Path | None:
    """Return CUDA's runtime library, of its wheel or its installer, or None."""
    return find_first_file([*(Path(p) / _WHEEL for p in sys.path), _TOOLKIT], CUDART)


def find_nvcc() -> str | None:
    """Return the toolkit's compiler, on PATH or in its installer's folder, or None."""
    return shutil.which("nvcc") or shutil.which("nvcc", path="/usr/local/cuda/bin")
