"""The properties of a machine that decide which tiles are fast on it, besides the features of its CPU."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from ..runtime.gpu import load_device_runtime, read_gpu_card
from ..runtime.library import load_runtime

_CACHES = Path("/sys/devices/system/cpu/cpu0/cache")
_DEFAULT_CACHE = 32 << 20


@dataclass(frozen=True)
class TuningMachine:
    """A machine that runs kernels, by its data caches and its GPU.

    caches are their sizes in bytes by level, as far as they can be read; for a GPU only the second level. gpu is the
    name of the GPU's card, "" for a CPU.
    """

    caches: tuple[int, ...]
    gpu: str = ""

    @property
    def largest(self) -> int:
        """Bytes of its largest cache."""
        return max(self.caches, default=_DEFAULT_CACHE)


def read_tuning_machine(gpu: bool) -> TuningMachine:
    """Return this machine, or its first GPU. Raises ArtifactError if no GPU works."""
    if not gpu:
        return TuningMachine(caches())
    load_runtime()
    load_device_runtime()
    name, cache = read_gpu_card(0)
    return TuningMachine((cache,), name)


def caches() -> tuple[int, ...]:
    """Return the sizes of this machine's data caches, from the first level on, as far as the kernel reports them."""
    sizes: dict[int, int] = {}
    for index in sorted(_CACHES.glob("index*")):
        if (index / "type").read_text().strip() != "Instruction":
            text = (index / "size").read_text().strip()
            unit = {"K": 1 << 10, "M": 1 << 20}[text[-1]]
            sizes[int((index / "level").read_text())] = int(text[:-1]) * unit
    return tuple(sizes[level] for level in sorted(sizes))
