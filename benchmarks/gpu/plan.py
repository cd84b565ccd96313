"""What a bundle holds and what is to be measured with it: plain data, written by the compiler's side as plan.json."""

from __future__ import annotations

import dataclasses
import json
from dataclasses import dataclass, replace
from fnmatch import fnmatchcase
from pathlib import Path
from types import SimpleNamespace
from typing import Any

FILE = "plan.json"

TOLERANCE = {"float32": 2e-5, "float16": 2e-3, "bfloat16": 1.6e-2}
"""Largest error of a right answer, as `attention.error` measures it. Y is rounded to half a unit in the last place, and
so is P."""


@dataclass(frozen=True)
class Sizes:
    """What is symbolic in a kernel. lengths holds the valid keys of each batch, or the write indices of an update; of a
    product only q_len counts, the rows of A."""

    batch: int
    q_len: int
    kv_len: int
    lengths: tuple[int, ...] = ()


@dataclass(frozen=True)
class Kernel:
    """One library with one function, `kernel`.

    operation is "attention", "update" or "matmul", whose problem (AttentionProblem, CacheUpdate, Matmul) is JSON;
    parameters are in the order of the function, and result is the one that holds the answer. contender is its column
    among those of a case. checks are small and odd, the first one the smallest.
    """

    name: str
    contender: str
    operation: str
    problem: str
    parameters: tuple[str, ...]
    result: str
    tolerance: float
    checks: tuple[Sizes, ...]
    library: str = ""

    @property
    def record(self) -> Any:
        """The problem, with the attributes of its own class, which needs the compiler."""
        return json.loads(self.problem, object_hook=lambda fields: SimpleNamespace(**fields))


@dataclass(frozen=True)
class Bar:
    """What a contender has to reach; one of: work per second, share of the limit, best peer's time by its own."""

    contender: str
    rate: float | None = None
    share: float | None = None
    ratio: float | None = None


@dataclass(frozen=True)
class Case:
    """Kernels of one problem and the sizes at which they are timed; amount is the work of a call, in "FLOP" or "byte".

    FLOPs are those of pairs that window and lengths leave visible, bytes those that must be moved at least.
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
class Plan:
    """digest names the code of the kernels; models are folders below `models`, and steps folders below `steps`."""

    digest: str
    kernels: dict[str, Kernel]
    cases: dict[str, Case]
    models: tuple[str, ...] = ()
    steps: tuple[str, ...] = ()

    def without(self, peers: list[str]) -> Plan:
        """The plan without these peers. Raises ValueError for one that no case has."""
        known = {peer for case in self.cases.values() for peer in case.peers}
        for peer in set(peers) - known:
            raise ValueError(f"no case has the peer '{peer}'. The peers are {', '.join(sorted(known))}.")
        cases = {
            name: replace(case, peers=tuple(peer for peer in case.peers if peer not in peers))
            for name, case in self.cases.items()
        }
        return replace(self, cases=cases)

    def write(self, folder: Path) -> None:
        (folder / FILE).write_text(json.dumps(dataclasses.asdict(self), indent=1))

    def chosen(self, patterns: list[str]) -> list[Case]:
        """Cases whose name or group a pattern matches; all without patterns. Raises ValueError for a vain pattern."""
        for pattern in patterns:
            if not any(_matches(case, pattern) for case in self.cases.values()):
                groups = ", ".join(dict.fromkeys(case.group for case in self.cases.values()))
                raise ValueError(f"no case or group matches '{pattern}'. The groups are {groups}.")
        found = list(self.cases.values())
        return [case for case in found if not patterns or any(_matches(case, p) for p in patterns)]


def _matches(case: Case, pattern: str) -> bool:
    return pattern in (case.group, case.name) or fnmatchcase(case.name, pattern)


def read(folder: Path) -> Plan:
    """The plan of a bundle."""
    data = json.loads((folder / FILE).read_text())
    kernels = {name: _kernel(fields) for name, fields in data["kernels"].items()}
    cases = {name: _case(fields) for name, fields in data["cases"].items()}
    return Plan(data["digest"], kernels, cases, tuple(data["models"]), tuple(data["steps"]))


def _kernel(fields: dict[str, Any]) -> Kernel:
    checks = tuple(_sizes(sizes) for sizes in fields["checks"])
    return Kernel(**{**fields, "parameters": tuple(fields["parameters"]), "checks": checks})


def _case(fields: dict[str, Any]) -> Case:
    tuples = {name: tuple(fields[name]) for name in ("kernels", "peers")}
    bars = tuple(Bar(**bar) for bar in fields["bars"])
    return Case(**{**fields, **tuples, "sizes": _sizes(fields["sizes"]), "bars": bars})


def _sizes(fields: dict[str, Any]) -> Sizes:
    return Sizes(**{**fields, "lengths": tuple(fields["lengths"])})
