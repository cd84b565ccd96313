"""What records of a database are for: a CPU by its features and caches, a GPU by its architecture."""

from __future__ import annotations

import hashlib
import json
from dataclasses import asdict, dataclass

import tvm

from ..measuring.machine import caches
from ..target import Target


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


def architecture(target: Target, measured_on: tuple[int, ...] | None = None) -> Architecture:
    """That of a target. Caches are those of the machine that measured; else this one's, where the code is for it."""
    if target.architecture:
        return Architecture(target.architecture, (), ())
    features = tuple(str(f) for f in target.tvm.attrs.get("mattr", ()))
    own = caches() if target.name == "cpu" else ()
    return Architecture(_machine(target.tvm), features, own if measured_on is None else measured_on)


def _machine(target: tvm.target.Target) -> str:
    return str(target.attrs.get("mtriple", "")).partition("-")[0]
