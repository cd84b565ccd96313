"""How warps access memory: what each instruction of a kernel asks of it, beside the least that would do."""

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
    """One instruction, over all launches of its kernel."""

    kernel: str
    memory: Memory
    kind: Kind
    bytes: int
    """Of a lane."""
    line: int
    source: str
    """The line of the kernel, as C++."""
    requests: int
    """Of warps."""
    least: int
    """Wavefronts of shared memory, or sectors of 32 bytes of device memory, that would do."""
    taken: int

    def __str__(self) -> str:
        unit = "wavefronts" if self.memory == "shared" else "sectors"
        what = f"{self.kernel}: {self.kind} of {self.bytes} bytes a lane, {self.memory}"
        return f"{what}: {self.taken} {unit}, {self.least} would do, of {self.requests} warps\n    {self.source}"


def factor(accesses: Iterable[Access]) -> float:
    """Taken of the least; 1 of none."""
    least, taken = (sum(getattr(access, name) for access in accesses) for name in ("least", "taken"))
    return taken / least if least else 1.0


def read(report: str) -> list[Access]:
    """What the emulator's lines say."""
    counts: dict[tuple, list[int]] = defaultdict(lambda: [0, 0, 0])
    places: dict[str, set[int]] = defaultdict(set)
    for line in report.splitlines():
        kernel, file, *numbers = line.split("\t")
        place, shared, write, width, *found = map(int, numbers)
        places[file].add(place)
        total = counts[kernel, file, place, shared, write, width]
        total[:] = map(sum, zip(total, found))
    lines = {(file, place): line for file in places for place, line in _lines(file, sorted(places[file])).items()}
    return [
        Access(
            kernel,
            "shared" if shared else "global",
            "write" if write else "read",
            width,
            lines[file, place],
            _text(file)[lines[file, place] - 1].strip(),
            *total,
        )
        for (kernel, file, place, shared, write, width), total in counts.items()
    ]


@lru_cache
def _text(file: str) -> list[str]:
    return Path(file).read_text().splitlines()


def _lines(file: str, places: list[int]) -> dict[int, int]:
    """The line of a kernel's body that each instruction belongs to, whatever functions were inlined there."""
    library = str(Path(file).with_suffix(".so"))
    addresses = [hex(place - 1) for place in places]  # of the call, which lies before its return address
    command = ["addr2line", "-a", "-i", "-e", library, *addresses]
    said = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    frames = [part.split("\n")[1:] for part in ("\n" + said.strip()).split("\n0x")[1:]]
    return {place: int(found[-1].split(":")[-1].split()[0]) for place, found in zip(places, frames)}
