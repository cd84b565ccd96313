"""CPUs: `cpu` (this machine), and `cpu:x86-64-v3`, `cpu:x86-64-v4`, `cpu:aarch64` or `cpu:riscv64`, with `+feature` for
additions.

`cpu` takes the features from the machine itself and never from the CPU's name: a virtual machine may hide AMX, bf16 or
fp16 units, and a name alone would give illegal instructions.
"""

from __future__ import annotations

import platform
from typing import Any

import tvm

from ..errors import TargetError
from ..machine import FEATURES, V3, V4, host_features
from .record import Target

CPUS: dict[str, tuple[str, ...]] = {"x86-64-v3": V3, "x86-64-v4": V4, "aarch64": (), "riscv64": ()}
"""Names after `cpu:`, and the features that they promise, as Linux names them."""

_OPTIONS: dict[str, dict[str, Any]] = {
    "x86_64": {"mtriple": "x86_64-linux-gnu", "mattr": []},
    "aarch64": {"mtriple": "aarch64-linux-gnu", "mattr": ["+neon"]},
    "riscv64": {"mtriple": "riscv64-linux-gnu", "mattr": ["+m", "+a", "+f", "+d", "+c"], "mabi": "lp64d"},
}
"""LLVM's options for a machine without additional features."""


def make_cpu_target(name: str, base: str, more: tuple[str, ...], cc: str | None) -> Target:
    """Return the target `name`; base is the name after `cpu:`, and more are additional features, as LLVM names them."""
    machine = platform.machine() if base == "" else base if base in _OPTIONS else "x86_64"
    if machine not in FEATURES:
        raise TargetError(
            "target.machine_unsupported",
            f"Target 'cpu' does not support {machine} machines. Name a target, such as cpu:x86-64-v3.",
        )
    linux = {feature: flag for flag, feature in FEATURES[machine].items()}
    for feature in more:
        if feature not in linux or base == "":
            what = "of this machine are detected automatically" if base == "" else f"of {base} are {', '.join(linux)}"
            raise TargetError(
                "target.feature_unknown", f"Target '{name}' names the feature '{feature}', but features {what}."
            )
    promised = host_features() if base == "" else CPUS[base]
    features = (*promised, *(linux[feature] for feature in more if linux[feature] not in promised))
    attributes = [f"+{FEATURES[machine][flag]}" for flag in features]
    options = {"kind": "llvm", **_OPTIONS[machine]}
    options["mattr"] = [*options["mattr"], *attributes]
    if machine == "x86_64":
        level = "x86-64-v4" if set(V4) <= set(features) else "x86-64-v3" if set(V3) <= set(features) else "x86-64"
        options["mcpu"] = level
    is_foreign = machine not in ("x86_64", platform.machine())
    linker = cc or (f"{machine}-linux-gnu-gcc" if is_foreign else "gcc")
    return Target(name, tvm.target.Target(options), features, linker, static_only=machine == "riscv64")
