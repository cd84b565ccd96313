"""Targets: what code is made for. One file per kind of machine; the only place that looks at the machine here."""

from __future__ import annotations

import difflib

from ..errors import TargetError
from ..machine import host_features
from .cpu import CPUS, cpu
from .cuda import ARCHITECTURES, cuda
from .record import Target

__all__ = ["Target", "host_features", "resolve"]


def resolve(name: str, cc: str | None = None) -> tuple[Target, ...]:
    """The targets called `name`: one, but for a list of CUDA architectures.

    cc names the C compiler that links (a cross compiler for a foreign architecture). Raises TargetError for an
    unknown name, or when this machine cannot be read.
    """
    kind, _, arch = name.partition(":")
    base, *more = arch.split("+")
    if kind == "cpu" and base in ("", *CPUS):
        return (cpu(name, base, tuple(more), cc),)
    if kind == "cuda" and set(arch.split(",")) <= {*ARCHITECTURES, *([""] if not arch else [])}:
        return cuda(name, arch, cc)
    names = ["cpu", *(f"cpu:{a}" for a in CPUS), "cuda", *(f"cuda:{a}" for a in ARCHITECTURES)]
    meant = _meant(name.lower(), names)
    raise TargetError(
        f"There is no target '{name}'.{f' Did you mean {meant}?' if meant else ''} Use one of: {', '.join(names)}. "
        "Architectures of CUDA may be a list, with commas between; CPUs may have more features than the name promises, "
        "such as cpu:aarch64+dotprod."
    )


_ELSEWHERE = {
    "native": "cpu", "host": "cpu", "llvm": "cpu", "x86": "cpu", "gpu": "cuda", "nvidia": "cuda",
    "arm64": "cpu:aarch64", "armv8": "cpu:aarch64", "x86_64": "cpu:x86-64-v3", "amd64": "cpu:x86-64-v3",
    "avx2": "cpu:x86-64-v3", "avx512": "cpu:x86-64-v4", "ampere": "cuda:sm_80", "ada": "cuda:sm_89",
    "hopper": "cuda:sm_90a", "blackwell": "cuda:sm_100",
}  # fmt: skip
"""What others call them, with or without what kind they are."""


def _meant(name: str, names: list[str]) -> str | None:
    """The target that is called nearly so, or so elsewhere."""
    short = name.removeprefix("cpu:").removeprefix("cuda:").removeprefix("gpu:")
    if short in _ELSEWHERE:
        return _ELSEWHERE[short]
    number = short.removeprefix("sm").removeprefix("_").replace(".", "")
    begun = [known for known in names if number and known.startswith(f"cuda:sm_{number}")]
    return next(iter(begun or difflib.get_close_matches(name.replace("_", "-"), names, 1, 0.8)), None)
