"""What of a machine decides which tiles are fast on it, beside the features of its CPU."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from ..runtime.gpu import load_device_runtime, read_gpu_card
from ..runtime.library import load_runtime

_CACHES = Path("/sys/devices/system/cpu/cpu0/cache")
_UNKNOWN = 32 << 20


@dataclass(frozen=True)
class Machine:
    """What kernels run on: the bytes of its caches for data by level, as far as they are known, of a GPU of the second
    one; and the name of a GPU's card, "" for a CPU.
    """

    caches: tuple[int, ...]
    gpu: str = ""

    @property
    def largest(self) -> int:
        """Bytes of its largest cache."""
        return max(self.caches, default=_UNKNOWN)


def machine(gpu: bool) -> Machine:
    """This machine, or its first GPU. Raises ArtifactError where there is none that works."""
    if not gpu:
        return Machine(caches())
    load_runtime()
    load_device_runtime()
    name, cache = read_gpu_card(0)
    return Machine((cache,), name)


def caches() -> tuple[int, ...]:
    """Sizes of this machine's caches for data, from the first level on, as far as the kernel tells."""
    found: dict[int, int] = {}
    for index in sorted(_CACHES.glob("index*")):
        if (index / "type").read_text().strip() != "Instruction":
            size = (index / "size").read_text().strip()
            unit = {"K": 1 << 10, "M": 1 << 20}[size[-1]]
            found[int((index / "level").read_text())] = int(size[:-1]) * unit
    return tuple(found[level] for level in sorted(found))
