"""What of a machine decides which tiles are fast on it, beside the features of its CPU."""

from __future__ import annotations

from pathlib import Path

_CACHES = Path("/sys/devices/system/cpu/cpu0/cache")


def caches() -> tuple[int, ...]:
    """Sizes of this machine's caches for data, from the first level on, as far as the kernel tells."""
    found: dict[int, int] = {}
    for index in sorted(_CACHES.glob("index*")):
        if (index / "type").read_text().strip() != "Instruction":
            size = (index / "size").read_text().strip()
            unit = {"K": 1 << 10, "M": 1 << 20}[size[-1]]
            found[int((index / "level").read_text())] = int(size[:-1]) * unit
    return tuple(found[level] for level in sorted(found))
