"""CPUs: `cpu` (this machine), and `cpu:x86-64-v3`, `cpu:x86-64-v4` or `cpu:aarch64`, with `+feature` for additions.

`cpu` takes the features from the machine itself and never from the CPU's name: a virtual machine may hide AMX, bf16 or
fp16 units, and a name alone would give illegal instructions.
"""

from __future__ import annotations

import platform

import tvm

from ..errors import TargetError
from ..machine import FEATURES, V3, V4, host_features
from .record import Target

CPUS: dict[str, tuple[str, ...]] = {"x86-64-v3": V3, "x86-64-v4": V4, "aarch64": ()}
"""Names after `cpu:`, and the features that they promise, as Linux names them."""


def make_cpu_target(name: str, base: str, more: tuple[str, ...], cc: str | None) -> Target:
    """Return the target `name`; base is the name after `cpu:`, and more are additional features, as LLVM names them."""
    machine = platform.machine() if base == "" else "aarch64" if base == "aarch64" else "x86_64"
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
    if machine == "aarch64":
        linker = cc or ("gcc" if platform.machine() == "aarch64" else "aarch64-linux-gnu-gcc")
        config = {"kind": "llvm", "mtriple": "aarch64-linux-gnu", "mattr": ["+neon", *attributes]}
        return Target(name, tvm.target.Target(config), features, linker)
    mcpu = "x86-64-v4" if set(V4) <= set(features) else "x86-64-v3" if set(V3) <= set(features) else "x86-64"
    config = {"kind": "llvm", "mtriple": "x86_64-linux-gnu", "mcpu": mcpu, "mattr": attributes}
    return Target(name, tvm.target.Target(config), features, cc or "gcc")
