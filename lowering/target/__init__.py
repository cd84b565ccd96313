"""Targets: what code is made for. One file per kind of machine; the only place that looks at the machine here."""

from __future__ import annotations

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
    known = ", ".join(["cpu", *(f"cpu:{a}" for a in CPUS), "cuda", *(f"cuda:{a}" for a in ARCHITECTURES)])
    raise TargetError(
        f"There is no target '{name}'. Use one of: {known}. Architectures of CUDA may be a list, with commas between; "
        "CPUs may have more features than the name promises, such as cpu:aarch64+dotprod."
    )
