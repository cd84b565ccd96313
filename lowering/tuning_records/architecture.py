"""The key of database records: a CPU by its features and caches, a GPU by its architecture and its card."""

from __future__ import annotations

import hashlib
import re
from dataclasses import dataclass

import tvm

from ..measuring.machine import TuningMachine, caches
from ..records import Record
from ..target import Target

_OWN_CACHES = 2  # cache levels that are private to a core


@dataclass(frozen=True)
class Architecture(Record):
    """The architecture that records apply to.

    kind is that of the CPU, or the GPU's architecture. features are those that code may use. caches are bytes by level,
    () if code is generated for another machine. card is the GPU's name, "" for CPUs and if unknown.
    """

    kind: str
    features: tuple[str, ...]
    caches: tuple[int, ...]
    card: str = ""

    @property
    def vector_feature(self) -> str:
        """The feature that determines the vector width of a CPU."""
        return next((f for f in ("avx512f", "avx2", "neon") if any(f in feature for feature in self.features)), "")

    @property
    def name(self) -> str:
        """The name of its folder: a readable part, and a digest of all fields."""
        digest = hashlib.sha256(self.to_json().encode()).hexdigest()[:8]
        sizes = [f"{size >> 10}k" for size in self.caches]
        card = re.sub(r"[^A-Za-z0-9]+", "_", self.card).strip("_")
        return "-".join([self.kind, *filter(None, [self.vector_feature, card, *sizes]), digest])

    def runs_same_code_as(self, other: Architecture) -> bool:
        """Return whether both run the same code, on whatever machines."""
        return (self.kind, self.features) == (other.kind, other.features)

    def is_similar_to(self, other: Architecture) -> bool:
        """Return whether tiles for one suit the other: the same vectors and private caches of a core."""
        own_caches, other_caches = ((a.kind, a.vector_feature, a.caches[:_OWN_CACHES]) for a in (self, other))
        return own_caches == other_caches and len(self.caches) >= _OWN_CACHES


def detect_architecture(target: Target, measured_on: TuningMachine | None = None) -> Architecture:
    """Return the architecture of a target on the measuring machine.

    Without `measured_on`, it is this machine, if a CPU's code is compiled for it.
    """
    if target.architecture:
        machine_info = measured_on or TuningMachine(())
        return Architecture(target.architecture, (), machine_info.caches, machine_info.gpu)
    features = tuple(str(f) for f in target.tvm.attrs.get("mattr", ()))
    local_caches = caches() if target.name == "cpu" else ()
    return Architecture(
        _read_machine(target.tvm), features, local_caches if measured_on is None else measured_on.caches
    )


def _read_machine(target: tvm.target.Target) -> str:
    return str(target.attrs.get("mtriple", "")).partition("-")[0]
