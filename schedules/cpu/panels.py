"""Tiles of the matrix kernel (matmul.py), and the width of a panel, which is that of stored weights."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

from tvm import tirx

from lowering.tensorir.expressions import Expr

from ..reading.matmul import Group
from ..reading.stages import volume
from ..tiles import Space
from .cycles import L1, L2, L2_LINE, TYPICAL, overflow, register_tile
from .loops import LoopTiles
from .vector import Machine


@dataclass(frozen=True, kw_only=True)
class PanelTiles(LoopTiles):
    """Block sizes: mr rows x nr columns in registers, kc values (or pairs) of k and mc rows in caches.

    mr * nr / lanes accumulators, nr / lanes vectors of B and one broadcast element of A must fit the registers. A panel
    of kc * nr elements, mc * kc of A and a tile of mc * nr accumulators should fit the L2 cache.
    """

    version: ClassVar[int] = 2

    vectors: int
    """nr / lanes of a panel that the kernel makes; stored ones are as wide as they are."""
    mr: int = 6
    kc: int = 1024
    """Of codes in blocks: of whole blocks, as many as that is."""
    streamed_rows: int = 12
    """So many rows wait for memory rather than for arithmetic: blocks are then of ..."""
    streamed_kc: int = 128
    """... so many values (or pairs) of k, and what is asked for is never farther ahead than that."""
    mc: int = 144
    """Multiple of mr."""
    many_tasks: int = 16
    """Panels that keep threads busy: one that is packed then serves all rows."""
    waiting_rows: int = 2
    """A matmul of codes and so many rows is done before the next elements of B are there: they are asked for, ..."""
    ahead: int = 4096
    """... so many bytes ahead, and scales a quarter of that."""

    @classmethod
    def default(cls, problem: Sequence[Group], machine: Machine) -> PanelTiles:
        """Integers of several codes wait in registers, too."""
        matmuls = [matmul for group in problem for matmul in group.matmuls]
        columns = matmuls[0].j.extent
        acc = matmuls[0].acc
        vectors = panel_width(columns.value if isinstance(columns, tirx.IntImm) else None, machine, acc)
        vectors //= machine.lanes(acc)
        if any(matmul.codes is not None and matmul.codes.group > 1 for matmul in matmuls):
            return PanelTiles(vectors=vectors, mr=5, mc=140)
        return PanelTiles(vectors=vectors)

    @classmethod
    def space(cls, problem: Sequence[Group], machine: Machine) -> Space:
        return super().space(problem, machine) | {
            "vectors": tuple(range(1, _widest(machine) + 1)),
            "mr": (1, 2, 3, 4, 5, 6, 8, 12),
            "kc": (128, 256, 512, 1024, 2048),
            "streamed_rows": (0, 6, 12, 24, 48),
            "streamed_kc": (64, 128, 256, 512, 1024),
            "mc": (24, 48, 72, 96, 120, 140, 144, 192, 240, 288),
            "many_tasks": (4, 8, 16, 32),
            "waiting_rows": (0, 1, 2, 4),
            "ahead": (1024, 2048, 4096, 8192),
        }

    def rules(self, problem: Sequence[Group], machine: Machine) -> dict[str, bool]:
        widest, registers = _widest(machine), machine.registers
        codes = [matmul.codes for group in problem for matmul in group.matmuls if matmul.codes is not None]
        wide = max((c.nr // machine.lanes("float32") for c in codes), default=self.vectors)
        needed = self.mr * wide + wide + 1 + (wide if any(c.group > 1 for c in codes) else 0)
        return super().rules(problem, machine) | {
            f"vectors = {self.vectors} must be from 1 to {widest}": 1 <= self.vectors <= widest,
            f"mc = {self.mc} must be a multiple of mr = {self.mr}": self.mr > 0
            and self.mc > 0
            and self.mc % self.mr == 0,
            f"kc = {self.kc} must be positive and even": self.kc > 0 and self.kc % 2 == 0,
            f"streamed_kc = {self.streamed_kc} must be positive and even": self.streamed_kc > 0
            and self.streamed_kc % 2 == 0,
            f"{needed} registers are more than {registers}": needed <= registers,
        }

    def estimate(self, problem: Sequence[Group], machine: Machine) -> float:
        """Steps of the register tiles of all strips, the panel from the second-level cache where the first does not
        hold it, and tiles that wait for another block of k."""
        total, lanes = 0.0, machine.lanes(problem[0].acc)
        for group in problem:
            for matmul in group.matmuls:
                rows, columns, depth = (_known(n) for n in (volume(matmul.rows), matmul.j.extent, matmul.k.extent))
                strips = max(-(-rows // self.mr), 1)
                panels = -(-columns // (self.vectors * lanes))
                step = register_tile(rows / strips, self.vectors)
                block = min(self.kc, depth)
                panel = 4 * block * self.vectors * lanes
                step += L2_LINE * self.vectors * overflow(panel + 4 * block * self.mr, L1)
                blocks = -(-depth // block) if block else 0
                again = 2 * min(self.mr, rows) * self.vectors * (blocks - 1)
                rereads = L2_LINE * panel / 64 * blocks * overflow(panel + 4 * self.mc * block, L2)
                total += panels * (strips * (depth * step + again) + -(-rows // self.mc) * rereads)
        return math.log(max(total, 1.0))


def _known(size: Expr) -> int:
    return size.value if isinstance(size, tirx.IntImm) else TYPICAL


def panel_width(columns: int | None, cpu: Machine, acc: str = "float32") -> int:
    """nr for a matmul with so many columns (None: not known): that of the least work, and the widest among those.

    v vectors take mr * v multiplications and mr + v loads for each k; few accumulators wait for one another.
    """
    lanes, mr = cpu.lanes(acc), PanelTiles.mr
    if columns is None:
        return _widest(cpu) * lanes

    def work(v: int) -> float:
        return -(-columns // (v * lanes)) * register_tile(mr, v)

    return min(range(_widest(cpu), 0, -1), key=work) * lanes


def is_width(columns: int, lanes: int) -> bool:
    """Whether a panel of so many columns is one to four vectors."""
    return 0 < columns <= 4 * lanes and columns % lanes == 0


def _widest(cpu: Machine) -> int:
    """Vectors of a panel for which there are registers."""
    return 4 if cpu.registers >= 32 else 2
