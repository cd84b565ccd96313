"""Targets: the machines that code is generated for, one file per kind.

This is the only place that reads the features of the machine at hand.
"""

from __future__ import annotations

import difflib

from ..errors import TargetError
from ..machine import host_features
from .cpu import CPUS, make_cpu_target
from .cuda import ARCHITECTURES, make_cuda_targets
from .record import Target

__all__ = ["Target", "host_features", "resolve"]


def resolve(name: str, cc: str | None = None) -> tuple[Target, ...]:
    """Return the targets called `name`: one, or several for a list of CUDA architectures.

    cc names the C compiler that links (a cross compiler for a foreign architecture).

    Raises:
        TargetError: The name is unknown, or this machine cannot be read.
    """
    kind, _, arch = name.partition(":")
    base, *more = arch.split("+")
    if kind == "cpu" and base in ("", *CPUS):
        return (make_cpu_target(name, base, tuple(more), cc),)
    if kind == "cuda" and set(arch.split(",")) <= {*ARCHITECTURES, *([""] if not arch else [])}:
        return make_cuda_targets(name, arch, cc)
    names = ["cpu", *(f"cpu:{a}" for a in CPUS), "cuda", *(f"cuda:{a}" for a in ARCHITECTURES)]
    meant = _guess_target(name.lower(), names)
    raise TargetError(
        "target.name_unknown",
        f"There is no target '{name}'.{f' Did you mean {meant}?' if meant else ''} Use one of: {', '.join(names)}. "
        "Architectures of CUDA may be a list, with commas between; CPUs may have more features than the name promises, "
        "such as cpu:aarch64+dotprod.",
    )


_ELSEWHERE = {
    "native": "cpu", "host": "cpu", "llvm": "cpu", "x86": "cpu", "gpu": "cuda", "nvidia": "cuda",
    "arm64": "cpu:aarch64", "armv8": "cpu:aarch64", "x86_64": "cpu:x86-64-v3", "amd64": "cpu:x86-64-v3",
    "avx2": "cpu:x86-64-v3", "avx512": "cpu:x86-64-v4", "ampere": "cuda:sm_80", "ada": "cuda:sm_89",
    "hopper": "cuda:sm_90a", "blackwell": "cuda:sm_100",
}  # fmt: skip
"""Names of other projects, with or without the prefix of their kind."""


def _guess_target(name: str, names: list[str]) -> str | None:
    """Return the target with nearly this name, or with this name in another project."""
    suffix = name.removeprefix("cpu:").removeprefix("cuda:").removeprefix("gpu:")
    if suffix in _ELSEWHERE:
        return _ELSEWHERE[suffix]
    number = suffix.removeprefix("sm").removeprefix("_").replace(".", "")
    prefixed = [target for target in names if number and target.startswith(f"cuda:sm_{number}")]
    return next(iter(prefixed or difflib.get_close_matches(name.replace("_", "-"), names, 1, 0.8)), None)
