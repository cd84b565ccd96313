"""Measurements, and the file that stores them: one record for each case, written as soon as it exists."""

from __future__ import annotations

import json
import os
import platform
import re
from dataclasses import asdict, dataclass, field, replace
from importlib import metadata
from pathlib import Path

from .peers import ONE_THREAD, OURS, PEERS
from .timing import Timing

_PACKAGES = ("apache-tvm", "torch", "onnxruntime", "openvino", "numpy")


@dataclass(frozen=True)
class Outcome:
    """The result of one form of one contender on so many threads.

    timing is None where it was not timed: refused says why it could not run; else error, the largest difference from
    float64 relative to the range of an output, is beyond what is right.
    """

    contender: str
    form: str
    threads: int
    timing: Timing | None = None
    error: float | None = None
    refused: str = ""


@dataclass(frozen=True)
class Record:
    """One case: its amount of work ("FLOP" or "byte"), the result of every form, and of the limits, of which one call
    does limit_amount of that unit."""

    case: str
    group: str
    date: str
    threads: int
    amount: float
    unit: str
    outcomes: list[Outcome]
    limits: list[Outcome]
    limit_amount: float

    def best(self, contender: str) -> Outcome | None:
        """Return the fastest right form."""
        return _fastest([o for o in self.outcomes if o.contender == contender], self.threads)

    def own_timing(self, threads: int | None = None) -> Timing | None:
        fastest = _fastest([o for o in self.outcomes if o.contender == OURS], threads or self.threads)
        return None if fastest is None else fastest.timing

    def limit(self, threads: int | None = None) -> float | None:
        """Return the work's unit per second, by the fastest."""
        fastest = _fastest(self.limits, threads or self.threads)
        return None if fastest is None or fastest.timing is None else self.limit_amount / fastest.timing.median

    def limit_scaling(self) -> float | None:
        """Return how much faster all threads are than one, over the limits that were measured on both."""
        single = {o.form: o.timing for o in self.limits if o.threads == 1 and o.timing is not None}
        on_both = [o for o in self.limits if o.threads > 1 and f"{o.form}{ONE_THREAD}" in single]
        fastest = _fastest(on_both, self.threads)
        if fastest is None or fastest.timing is None:
            return None
        return min(timing.median for timing in single.values()) / fastest.timing.median


def _fastest(outcomes: list[Outcome], threads: int) -> Outcome | None:
    timed = [o for o in outcomes if o.timing is not None and o.threads == threads]
    return min(timed, key=lambda o: o.timing.median if o.timing else 0.0, default=None)


@dataclass
class Results:
    """Records by case, all of one machine and one number of threads.

    apart: every contender had a process of its own, as on several threads; files from before that say nothing.
    """

    machine: str
    threads: int
    packages: dict[str, str]
    records: dict[str, Record] = field(default_factory=dict)
    apart: bool = False

    def peers(self) -> list[str]:
        """Return the peers that ran, or refused, a case."""
        contenders = {outcome.contender for record in self.records.values() for outcome in record.outcomes}
        return [peer for peer in PEERS if peer in contenders]

    def write(self, path: Path) -> None:
        """Whole or not at all; a record is a line."""
        about = asdict(replace(self, records={}))
        del about["records"]
        lines = [json.dumps(_rounded(asdict(record))) for record in self.records.values()]
        text = json.dumps(about)[:-1] + ', "records": [\n' + ",\n".join(lines) + "\n]}\n"
        partial = path.with_suffix(".partial")
        partial.write_text(text)
        os.replace(partial, path)


def read(path: Path) -> Results:
    """The results of a file."""
    data = json.loads(path.read_text())
    records = []
    for record in data.pop("records"):
        for kind in ("outcomes", "limits"):
            record[kind] = [
                Outcome(**{**o, "timing": None if o["timing"] is None else Timing(**o["timing"])}) for o in record[kind]
            ]
        records.append(Record(**record))
    return Results(**data, records={record.case: record for record in records})


def here(threads: int, target: str = "cpu") -> Results:
    """No records yet, of this machine and of ours for that target."""
    path = Path("/proc/cpuinfo")
    fields = dict(re.findall(r"^(.+?)\s*: (.*)$", path.read_text() if path.exists() else "", re.MULTILINE))
    features = [f for f in ("avx2", "avx512f", "avx512_bf16", "amx_tile") if f in fields.get("flags", "").split()]
    machine = f"{fields.get('model name', platform.processor())} ({', '.join(features)})"
    if target != "cpu":
        machine += f", ours for {target}"
    packages = {name: version for name in _PACKAGES if (version := _version(name))}
    return Results(machine, threads, packages, apart=threads > 1)


def _version(package: str) -> str:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return ""


def _rounded(value: object) -> object:
    """Six digits say more than any clock."""
    if isinstance(value, dict):
        return {key: _rounded(entry) for key, entry in value.items()}
    if isinstance(value, list):
        return [_rounded(entry) for entry in value]
    return float(f"{value:.6g}") if isinstance(value, float) else value
