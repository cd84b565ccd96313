"""NVIDIA GPUs: `cuda:sm_90a` and the like, lists of them, and `cuda` for the GPU of this machine.

Machines that build need neither a GPU nor a driver.
"""

from __future__ import annotations

import tvm

from schedules import DEVICES

from ..errors import ArtifactError, TargetError
from ..runtime.gpu import choose_architecture, load_device_runtime, read_gpu_architecture, runs_on
from .record import Target

ARCHITECTURES = tuple(DEVICES)
"""Names after `cuda:`."""


def make_cuda_targets(name: str, arch: str, cc: str | None) -> tuple[Target, ...]:
    """Return the target `name` for each architecture; arch is the text after `cuda:`.

    Raises TargetError when it is empty and this machine has no usable GPU.
    """
    architectures = arch.split(",") if arch else [_detect_architecture()]
    return tuple(Target(name, _target(a), (), cc or "gcc", a) for a in dict.fromkeys(architectures))


def _detect_architecture() -> str:
    try:
        load_device_runtime(None)
        here = read_gpu_architecture(0)
    except ArtifactError as error:
        raise TargetError(
            "gpu.unavailable",
            f"Target 'cuda' is the GPU of this machine, and none can be used: {error} "
            "Name an architecture to build for another machine, such as cuda:sm_90a.",
        ) from error
    if not any(runs_on(a, here) for a in ARCHITECTURES):
        raise TargetError(
            "gpu.architecture_unsupported", f"The GPU here is {here}; code can be made for {', '.join(ARCHITECTURES)}."
        )
    return choose_architecture(ARCHITECTURES, here)


def _target(arch: str) -> tvm.target.Target:
    device = {
        "kind": "cuda",
        "arch": arch,
        "max_threads_per_block": 1024,
        "max_shared_memory_per_block": DEVICES[arch].shared_memory,
        "thread_warp_size": 32,
    }
    # The host code only launches kernels: any x86-64 will do.
    return tvm.target.Target(device, host={"kind": "llvm", "mtriple": "x86_64-linux-gnu", "mcpu": "x86-64"})
