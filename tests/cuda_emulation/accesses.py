"""Memory accesses of warps: the requests of each instruction of a kernel, and the minimum that would do."""

import subprocess
from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Literal

Memory = Literal["shared", "global"]
Kind = Literal["read", "write"]


@dataclass(frozen=True)
class Access:
    """Accesses of one instruction, over all launches of its kernel."""

    kernel: str
    memory: Memory
    kind: Kind
    bytes: int
    """Bytes of a lane."""
    line: int
    source: str
    """The line of the kernel, as C++."""
    requests: int
    """Requests of warps."""
    least: int
    """Wavefronts of shared memory, or sectors of 32 bytes of device memory, that would do."""
    taken: int

    def __str__(self) -> str:
        unit = "wavefronts" if self.memory == "shared" else "sectors"
        what = f"{self.kernel}: {self.kind} of {self.bytes} bytes a lane, {self.memory}"
        return f"{what}: {self.taken} {unit}, {self.least} would do, of {self.requests} warps\n    {self.source}"


def factor(accesses: Iterable[Access]) -> float:
    """Return the ratio of taken to least; 1 without accesses."""
    least, taken = (sum(getattr(access, name) for access in accesses) for name in ("least", "taken"))
    return taken / least if least else 1.0


def read(report: str) -> list[Access]:
    """Parse the report of the emulator."""
    counts: dict[tuple, list[int]] = defaultdict(lambda: [0, 0, 0])
    sites: dict[str, set[int]] = defaultdict(set)
    for line in report.splitlines():
        kernel, file, *numbers = line.split("\t")
        site, shared, write, width, *counted = map(int, numbers)
        sites[file].add(site)
        total = counts[kernel, file, site, shared, write, width]
        total[:] = map(sum, zip(total, counted))
    lines = {(file, site): line for file in sites for site, line in _lines(file, sorted(sites[file])).items()}
    return [
        Access(
            kernel,
            "shared" if shared else "global",
            "write" if write else "read",
            width,
            lines[file, site],
            _text(file)[lines[file, site] - 1].strip(),
            *total,
        )
        for (kernel, file, site, shared, write, width), total in counts.items()
    ]


@lru_cache
def _text(file: str) -> list[str]:
    return Path(file).read_text().splitlines()


def _lines(file: str, sites: list[int]) -> dict[int, int]:
    """Return the line of a kernel's body that each instruction belongs to, also through inlined functions."""
    library = str(Path(file).with_suffix(".so"))
    addresses = [hex(site - 1) for site in sites]  # of the call, which lies before its return address
    command = ["addr2line", "-a", "-i", "-f", "-e", library, *addresses]
    said = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    frames = [frame.split("\n")[1:] for frame in ("\n" + said.strip()).split("\n0x")[1:]]
    for *_, function, _ in frames:
        if function.startswith("_Z"):  # only kernels have C names
            raise AssertionError(f"{function} touches memory: make it __forceinline__, or its uses count as one")
    return {site: int(frame[-1].split(":")[-1].split()[0]) for site, frame in zip(sites, frames)}
