"""CPUs: `cpu` (this machine), `cpu:x86-64-v3`, `cpu:x86-64-v4`, `cpu:aarch64`.

`cpu` takes the features from the machine itself and never from the CPU's name:
a virtual machine may hide AMX, bf16 or fp16 units, and a name alone would give illegal instructions.
"""

from __future__ import annotations

import platform
from pathlib import Path

import tvm

from ..errors import TargetError
from .record import Target

CPUS = ("x86-64-v3", "x86-64-v4", "aarch64")
"""Names behind `cpu:`."""

# Linux /proc/cpuinfo names and LLVM's names of the x86 features that the generated code may use.
_X86_FEATURES = {
    "sse4_2": "sse4.2", "popcnt": "popcnt", "avx": "avx", "f16c": "f16c", "fma": "fma", "bmi1": "bmi", "bmi2": "bmi2",
    "avx2": "avx2", "abm": "lzcnt", "movbe": "movbe",
    "avx512f": "avx512f", "avx512bw": "avx512bw", "avx512cd": "avx512cd", "avx512dq": "avx512dq",
    "avx512vl": "avx512vl", "avx512_vnni": "avx512vnni", "avx512_bf16": "avx512bf16",
}  # fmt: skip

_V3 = ("sse4_2", "popcnt", "avx", "f16c", "fma", "bmi1", "bmi2", "avx2", "abm", "movbe")
_V4 = (*_V3, "avx512f", "avx512bw", "avx512cd", "avx512dq", "avx512vl")


def cpu(name: str, arch: str, cc: str | None) -> Target:
    """The target `name`; arch is what stands behind `cpu:`."""
    machine = platform.machine()
    if arch == "aarch64" or (arch == "" and machine == "aarch64"):
        linker = cc or ("gcc" if machine == "aarch64" else "aarch64-linux-gnu-gcc")
        config = {"kind": "llvm", "mtriple": "aarch64-linux-gnu", "mattr": ["+neon"]}
        return Target(name, tvm.target.Target(config), (), linker)
    if arch == "" and machine != "x86_64":
        raise TargetError(f"Target 'cpu' knows no {machine} machines. Name a target, such as cpu:x86-64-v3.")
    features = {"": host_features, "x86-64-v3": lambda: _V3, "x86-64-v4": lambda: _V4}[arch]()
    mcpu = "x86-64-v4" if set(_V4) <= set(features) else "x86-64-v3" if set(_V3) <= set(features) else "x86-64"
    config = {
        "kind": "llvm",
        "mtriple": "x86_64-linux-gnu",
        "mcpu": mcpu,
        "mattr": [f"+{_X86_FEATURES[f]}" for f in features],
    }
    return Target(name, tvm.target.Target(config), features, cc or "gcc")


def host_features() -> tuple[str, ...]:
    """The x86 features this machine shows, by /proc/cpuinfo name, of those the generated code may use."""
    text = Path("/proc/cpuinfo").read_text()
    flags = next((line.partition(":")[2].split() for line in text.splitlines() if line.startswith("flags")), [])
    return tuple(f for f in _X86_FEATURES if f in flags)
