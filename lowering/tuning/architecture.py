"""What records of a database are for: a CPU by its features and caches, a GPU by its architecture and its card."""

from __future__ import annotations

import hashlib
import json
import re
from dataclasses import asdict, dataclass

import tvm

from ..measuring.machine import Machine, caches
from ..target import Target

_OWN_CACHES = 2  # levels of a core's own


@dataclass(frozen=True)
class Architecture:
    """kind is that of the CPU, or the GPU's architecture; features are those that code may use; caches are bytes by
    level, () where code is made for another machine; card is the GPU's name, "" for CPUs and where it is not known.
    """

    kind: str
    features: tuple[str, ...]
    caches: tuple[int, ...]
    card: str = ""

    @property
    def vectors(self) -> str:
        """The feature that tells how wide a CPU's vectors are."""
        return next((f for f in ("avx512f", "avx2", "neon") if any(f in feature for feature in self.features)), "")

    @property
    def name(self) -> str:
        """Of its folder: what people tell it by, and a digest of everything."""
        digest = hashlib.sha256(self.to_json().encode()).hexdigest()[:8]
        sizes = [f"{size >> 10}k" for size in self.caches]
        card = re.sub(r"[^A-Za-z0-9]+", "_", self.card).strip("_")
        return "-".join([self.kind, *filter(None, [self.vectors, card, *sizes]), digest])

    def is_for_code_of(self, other: Architecture) -> bool:
        """Whether both run the same code, whatever machines they are."""
        return (self.kind, self.features) == (other.kind, other.features)

    def is_like(self, other: Architecture) -> bool:
        """Whether tiles for one are good for the other: the same vectors, and the same caches of a core's own."""
        own, its = ((a.kind, a.vectors, a.caches[:_OWN_CACHES]) for a in (self, other))
        return own == its and len(self.caches) >= _OWN_CACHES

    def to_json(self) -> str:
        return json.dumps(asdict(self))


def architecture(target: Target, measured_on: Machine | None = None) -> Architecture:
    """That of a target on the machine that measured; else on this one, where a CPU's code is for it."""
    if target.architecture:
        known = measured_on or Machine(())
        return Architecture(target.architecture, (), known.caches, known.gpu)
    features = tuple(str(f) for f in target.tvm.attrs.get("mattr", ()))
    own = caches() if target.name == "cpu" else ()
    return Architecture(_machine(target.tvm), features, own if measured_on is None else measured_on.caches)


def _machine(target: tvm.target.Target) -> str:
    return str(target.attrs.get("mtriple", "")).partition("-")[0]
