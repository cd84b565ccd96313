"""The contents of a bundle, and its measurements: plain data, written by the compiler's side as plan.json."""

from __future__ import annotations

import dataclasses
import json
from dataclasses import dataclass, field, replace
from fnmatch import fnmatchcase
from pathlib import Path
from types import SimpleNamespace
from typing import Any

FILE = "plan.json"

TOLERANCE = {"float32": 2e-5, "float16": 2e-3, "bfloat16": 1.6e-2}
"""Largest error of a right answer, as `attention.error` measures it. Y is rounded to half a unit of the last digit, and
so is P."""


@dataclass(frozen=True)
class Sizes:
    """The symbolic sizes of a kernel. lengths are the valid keys of each batch, or the write indices of an update; of a
    matmul only q_len counts, the rows of A."""

    batch: int
    q_len: int
    kv_len: int
    lengths: tuple[int, ...] = ()


Tiles = dict[str, dict[str, int | bool]]
"""By kernel of a function, the fields of its tiles that differ from the default."""

LIMITS = "limits"
"""The group of cases that say how fast memory can be read."""

OPTIONAL_PEERS = ("flex", "compiled")
"""Peers that take part only on request: each compiles for seconds before it runs."""


@dataclass(frozen=True)
class Kernel:
    """One library with one function, `kernel`.

    operation is "attention", "update", "matmul" or "read", whose problem (AttentionProblem, CacheUpdate, Matmul, Read)
    is JSON; parameters are in the order of the function, and result is the one with the answer. variant is the
    schedule and tiles what is not its default, by which contender, the column among those of a case, may differ from
    variant. checks are small and odd, the first one the smallest.
    """

    name: str
    contender: str
    operation: str
    problem: str
    parameters: tuple[str, ...]
    result: str
    tolerance: float
    checks: tuple[Sizes, ...]
    variant: str
    tiles: Tiles = field(default_factory=dict)
    library: str = ""

    @property
    def record(self) -> Any:
        """The problem, with the attributes of its own class, which needs the compiler."""
        return json.loads(self.problem, object_hook=lambda fields: SimpleNamespace(**fields))


@dataclass(frozen=True)
class Bar:
    """The speed to reach, as one of: work per second, share of the limit, best peer's time by its own."""

    contender: str
    rate: float | None = None
    share: float | None = None
    ratio: float | None = None


@dataclass(frozen=True)
class Case:
    """Kernels of one problem and the sizes at which they are timed.

    amount is the work of a call, and unit what bounds it: "FLOP", or bytes that are only read, "read", or read and
    written, "copy". FLOPs are those of pairs that window and lengths leave visible, bytes those that must be moved at
    least.
    """

    name: str
    group: str
    kernels: tuple[str, ...]
    peers: tuple[str, ...]
    sizes: Sizes
    amount: float
    unit: str
    bars: tuple[Bar, ...] = ()


@dataclass(frozen=True)
class Program:
    """An artifact in a folder of the bundle, measured as a whole.

    kind is "model", "step", "weights", "experts", "flex", "decoder" or "batcher"; details are what the kind asks for
    (host/programs.py).
    """

    name: str
    kind: str
    folder: str
    details: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Plan:
    """digest names the code of the kernels.

    sanitized are the kernels that compute-sanitizer looks at. peers has libraries by peer, and missing says of what the
    bundle lacks why it does.
    """

    digest: str
    kernels: dict[str, Kernel]
    cases: dict[str, Case]
    programs: dict[str, Program] = field(default_factory=dict)
    sanitized: tuple[str, ...] = ()
    peers: dict[str, str] = field(default_factory=dict)
    missing: dict[str, str] = field(default_factory=dict)

    def with_peers(self, requested: list[str], excluded: list[str]) -> Plan:
        """The plan without these peers, and of the optional ones with those requested alone.

        Raises ValueError for a peer that no case has.
        """
        names = {peer for case in self.cases.values() for peer in case.peers} | set(OPTIONAL_PEERS)
        for peer in (set(requested) | set(excluded)) - names:
            raise ValueError(f"no case has the peer '{peer}'. The peers are {', '.join(sorted(names))}.")
        gone = {*excluded, *(peer for peer in OPTIONAL_PEERS if peer not in requested)}
        cases = {
            name: replace(case, peers=tuple(peer for peer in case.peers if peer not in gone))
            for name, case in self.cases.items()
        }
        return replace(self, cases=cases)

    def has_variants(self, case: Case) -> bool:
        """Whether kernels of the case differ in their tiles."""
        return any(self.kernels[name].tiles for name in case.kernels)

    def write(self, folder: Path) -> None:
        (folder / FILE).write_text(json.dumps(dataclasses.asdict(self), indent=1))

    def chosen(self, patterns: list[str]) -> list[Case]:
        """Cases whose name or group a pattern matches; all without patterns. Raises ValueError for a vain pattern."""
        for pattern in patterns:
            if not any(_matches(case, pattern) for case in self.cases.values()):
                groups = ", ".join(dict.fromkeys(case.group for case in self.cases.values()))
                raise ValueError(f"no case or group matches '{pattern}'. The groups are {groups}.")
        cases = list(self.cases.values())
        return [case for case in cases if not patterns or any(_matches(case, p) for p in patterns)]


def _matches(case: Case, pattern: str) -> bool:
    return pattern in (case.group, case.name) or fnmatchcase(case.name, pattern)


def read(folder: Path) -> Plan:
    """Read the plan of a bundle."""
    data = json.loads((folder / FILE).read_text())
    readers = {"kernels": _kernel, "cases": _case, "programs": lambda fields: Program(**fields)}
    records = {key: {name: reader(fields) for name, fields in data[key].items()} for key, reader in readers.items()}
    return Plan(**{**data, **records, "sanitized": tuple(data["sanitized"])})


def _kernel(fields: dict[str, Any]) -> Kernel:
    checks = tuple(_sizes(sizes) for sizes in fields["checks"])
    return Kernel(**{**fields, "parameters": tuple(fields["parameters"]), "checks": checks})


def _case(fields: dict[str, Any]) -> Case:
    tuples = {name: tuple(fields[name]) for name in ("kernels", "peers")}
    bars = tuple(Bar(**bar) for bar in fields["bars"])
    return Case(**{**fields, **tuples, "sizes": _sizes(fields["sizes"]), "bars": bars})


def _sizes(fields: dict[str, Any]) -> Sizes:
    return Sizes(**{**fields, "lengths": tuple(fields["lengths"])})
