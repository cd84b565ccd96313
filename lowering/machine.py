"""What this machine has for compiling and running, found without importing the compiler or the runtime."""

from __future__ import annotations

import platform
import shutil
import sys
from pathlib import Path

DRIVER, CUDART = "libcuda.so.1", "libcudart.so.13"

SHIPPED = Path(__file__).parent / "runtime" / "lib"
"""Where the wheel onnx-lowering-runtime has TVM's libraries, which other installations take from apache-tvm."""
VERSION_FILE = "apache-tvm.version"
"""Which version these are of."""

# Where CUDA's wheel and its installer put CUDART.
_WHEEL, _TOOLKIT = Path("nvidia/cu13/lib"), Path("/usr/local/cuda/lib64")

# Linux /proc/cpuinfo names and LLVM's names of the features that the generated code may use.
X86_FEATURES = {
    "sse4_2": "sse4.2", "popcnt": "popcnt", "avx": "avx", "f16c": "f16c", "fma": "fma", "bmi1": "bmi", "bmi2": "bmi2",
    "avx2": "avx2", "abm": "lzcnt", "movbe": "movbe",
    "avx512f": "avx512f", "avx512bw": "avx512bw", "avx512cd": "avx512cd", "avx512dq": "avx512dq",
    "avx512vl": "avx512vl", "avx512_vnni": "avx512vnni", "avx512_bf16": "avx512bf16", "avx_vnni": "avxvnni",
}  # fmt: skip
AARCH64_FEATURES = {"asimddp": "dotprod", "i8mm": "i8mm"}
FEATURES = {"x86_64": X86_FEATURES, "aarch64": AARCH64_FEATURES}

V3 = ("sse4_2", "popcnt", "avx", "f16c", "fma", "bmi1", "bmi2", "avx2", "abm", "movbe")
V4 = (*V3, "avx512f", "avx512bw", "avx512cd", "avx512dq", "avx512vl")


def cpu_flags() -> frozenset[str]:
    """The features of this machine's CPUs, as Linux names them."""
    for line in Path("/proc/cpuinfo").read_text().splitlines():
        key, _, value = line.partition(":")
        if key.strip() in ("flags", "Features"):
            return frozenset(value.split())
    return frozenset()


def host_features() -> tuple[str, ...]:
    """The features this machine shows, by /proc/cpuinfo name, of those the generated code may use."""
    flags = cpu_flags()
    return tuple(f for f in FEATURES.get(platform.machine(), {}) if f in flags)


def first_file(folders: list[Path], name: str) -> Path | None:
    """The file of that name in the first folder that has it."""
    return next((f / name for f in folders if (f / name).is_file()), None)


def runtime_folders() -> list[Path]:
    """Where TVM's runtime libraries may be."""
    return [SHIPPED, *(Path(p) / "tvm" / "lib" for p in sys.path)]


def runtime_alone() -> bool:
    """Whether this is onnx-lowering-runtime, which leaves the compiler out."""
    return (SHIPPED / VERSION_FILE).is_file()


def not_installed(package: str, distribution: str = "") -> str:
    """Return the sentence about a package that is missing, and is on the package index as `distribution`."""
    return f"{package} is not installed: pip install {distribution or package}."


def install_command(extra: str = "", options: str = "") -> str:
    """Return the command that installs this package again, with what an extra needs.

    The package is on no index: the command names the checkout or the wheel file that the package is from, where that is
    still there.
    """
    begin = "pip install" + (f" {options}" if options else "")
    suffix, origin = f"[{extra}]" if extra else "", _origin()
    if origin is not None:
        return f"{begin} '{origin}{suffix}'"
    if runtime_alone():
        return f"{begin} 'WHEEL{suffix}', where WHEEL is the file of onnx-lowering-runtime"
    return f"{begin} '.{suffix}' in a checkout of onnx-lowering"


def get_compiler() -> str:
    """Return what to do where the compiler is needed, and onnx-lowering-runtime is installed."""
    return "pip uninstall onnx-lowering-runtime, then pip install . in a checkout of onnx-lowering"


def _origin() -> Path | None:
    """Return the checkout or the wheel file that this package is from, None where it is gone or not known."""
    import json  # not above: every process imports this module, and few need what an installer wrote
    from importlib import metadata
    from urllib.parse import unquote, urlsplit

    checkout = Path(__file__).parents[1]
    if (checkout / "pyproject.toml").is_file():
        return checkout
    name = "onnx-lowering-runtime" if runtime_alone() else "onnx-lowering"
    for installed in metadata.distributions(name=name):  # what a build leaves in a checkout does not say
        try:
            said = installed.read_text("direct_url.json")
            url = urlsplit(json.loads(said)["url"]) if said else None
        except (ValueError, KeyError, OSError):
            continue
        path = Path(unquote(url.path)) if url is not None and url.scheme == "file" else None
        if path is not None and path.exists():
            return path
    return None


def find_cudart() -> Path | None:
    """CUDA's runtime library, from its wheel or its installer."""
    return first_file([*(Path(p) / _WHEEL for p in sys.path), _TOOLKIT], CUDART)


def find_nvcc() -> str | None:
    """The toolkit's compiler, on PATH or where its installer puts it."""
    return shutil.which("nvcc") or shutil.which("nvcc", path="/usr/local/cuda/bin")
