"""What records of a database are for: a CPU by its features and caches, a GPU by its architecture."""

from __future__ import annotations

import hashlib
import json
from dataclasses import asdict, dataclass
from pathlib import Path

import tvm

from ..target import Target

_CACHES = Path("/sys/devices/system/cpu/cpu0/cache")


@dataclass(frozen=True)
class Architecture:
    """kind is "cpu" or the GPU's architecture; features are those that code may use; caches are bytes by level, ()
    where code is made for another machine.
    """

    kind: str
    features: tuple[str, ...]
    caches: tuple[int, ...]

    @property
    def name(self) -> str:
        """Of its folder: what people tell it by, and a digest of everything."""
        digest = hashlib.sha256(self.to_json().encode()).hexdigest()[:8]
        widest = next((f for f in ("avx512f", "avx2", "neon") if any(f in feature for feature in self.features)), "")
        sizes = [f"{size >> 10}k" for size in self.caches]
        return "-".join([self.kind, *filter(None, [widest, *sizes]), digest])

    def to_json(self) -> str:
        return json.dumps(asdict(self))


def architecture(target: Target) -> Architecture:
    """That of a target; caches are this machine's where the code is for this machine."""
    if target.architecture:
        return Architecture(target.architecture, (), ())
    features = tuple(str(f) for f in target.tvm.attrs.get("mattr", ()))
    return Architecture(_machine(target.tvm), features, caches() if target.name == "cpu" else ())


def caches() -> tuple[int, ...]:
    """Sizes of this machine's caches for data, from the first level on, as far as the kernel tells."""
    found: dict[int, int] = {}
    for index in sorted(_CACHES.glob("index*")):
        if (index / "type").read_text().strip() != "Instruction":
            size = (index / "size").read_text().strip()
            unit = {"K": 1 << 10, "M": 1 << 20}[size[-1]]
            found[int((index / "level").read_text())] = int(size[:-1]) * unit
    return tuple(found[level] for level in sorted(found))


def _machine(target: tvm.target.Target) -> str:
    return str(target.attrs.get("mtriple", "")).partition("-")[0]
