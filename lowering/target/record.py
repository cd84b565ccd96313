"""The record of one target."""

from __future__ import annotations

from dataclasses import dataclass

import tvm


@dataclass(frozen=True)
class Target:
    """A target: its name, TVM's form of it, the /proc/cpuinfo features it needs, and the linker to use.

    architecture is that of the GPU (`sm_90a`), "" for CPUs.
    """

    name: str
    tvm: tvm.target.Target
    cpu_features: tuple[str, ...]
    linker: str
    architecture: str = ""
