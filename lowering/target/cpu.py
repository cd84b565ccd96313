"""CPUs: `cpu` (this machine), `cpu:x86-64-v3`, `cpu:x86-64-v4`, `cpu:aarch64`.

`cpu` takes the features from the machine itself and never from the CPU's name:
a virtual machine may hide AMX, bf16 or fp16 units, and a name alone would give illegal instructions.
"""

from __future__ import annotations

import platform

import tvm

from ..errors import TargetError
from ..machine import V3, V4, X86_FEATURES, host_features
from .record import Target

CPUS = ("x86-64-v3", "x86-64-v4", "aarch64")
"""Names behind `cpu:`."""


def cpu(name: str, arch: str, cc: str | None) -> Target:
    """The target `name`; arch is what stands behind `cpu:`."""
    machine = platform.machine()
    if arch == "aarch64" or (arch == "" and machine == "aarch64"):
        linker = cc or ("gcc" if machine == "aarch64" else "aarch64-linux-gnu-gcc")
        config = {"kind": "llvm", "mtriple": "aarch64-linux-gnu", "mattr": ["+neon"]}
        return Target(name, tvm.target.Target(config), (), linker)
    if arch == "" and machine != "x86_64":
        raise TargetError(f"Target 'cpu' knows no {machine} machines. Name a target, such as cpu:x86-64-v3.")
    features = {"": host_features, "x86-64-v3": lambda: V3, "x86-64-v4": lambda: V4}[arch]()
    mcpu = "x86-64-v4" if set(V4) <= set(features) else "x86-64-v3" if set(V3) <= set(features) else "x86-64"
    config = {
        "kind": "llvm",
        "mtriple": "x86_64-linux-gnu",
        "mcpu": mcpu,
        "mattr": [f"+{X86_FEATURES[f]}" for f in features],
    }
    return Target(name, tvm.target.Target(config), features, cc or "gcc")
