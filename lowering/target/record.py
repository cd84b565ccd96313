"""The record of one target."""

from __future__ import annotations

from dataclasses import dataclass

import tvm
from tvm.target.codegen import target_has_features


@dataclass(frozen=True)
class Target:
    """A target: its name, TVM's form of it, the /proc/cpuinfo features it needs, and the linker to use.

    architecture is that of the GPU (`sm_90a`), "" for CPUs. static_only: TVM's runtime does not exist for the machine,
    so that models are static objects.
    """

    name: str
    tvm: tvm.target.Target
    cpu_features: tuple[str, ...]
    linker: str
    architecture: str = ""
    static_only: bool = False

    @property
    def slower_than_bfloat16(self) -> tuple[str, ...]:
        """Element types that it multiplies at a lower rate than bfloat16."""
        if self.architecture:
            return ("float32",)
        return ("float32", "float16") if target_has_features("avx512bf16", self.tvm) else ()
