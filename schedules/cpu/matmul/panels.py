"""Tiles of the matrix kernel (matmul.py), and the width of a panel, which is that of packed weights."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

from tvm import tirx

from lowering.tensorir.expressions import Expr

from ...reading.matmul import MatmulGroup
from ...reading.quantized_weights import WeightQuantization
from ...reading.stages import count_points
from ...tiles import Space
from ..elementwise.loops import LoopTiles
from ..primitives.cycles import L1, L2, L2_LINE, TYPICAL, miss_ratio, register_tile_cycles
from ..primitives.vector import CpuFeatures

_STREAMED_BLOCK = 128 << 10
"""Bytes of a block of a panel that a few rows read: eight streams of four pages each."""

_LONGEST_STREAMED_KC = 4096


@dataclass(frozen=True, kw_only=True)
class PanelTiles(LoopTiles):
    """Block sizes: mr rows x nr columns in registers, kc values (or pairs) of k and mc rows in caches.

    mr * nr / lanes accumulators, nr / lanes vectors of B and one broadcast element of A must fit the registers. A panel
    of kc * nr elements, mc * kc of A and a tile of mc * nr accumulators should fit the L2 cache.
    """

    version: ClassVar[int] = 3

    vectors: int
    """nr / lanes of a panel that the kernel packs; panels packed ahead of time keep their own width."""
    mr: int = 6
    kc: int = 1024
    """This and the other numbers of values of k are rounded down to whole blocks of quantized values."""
    streamed_rows: int = 12
    """Up to this number of rows a matmul is bound by memory bandwidth. Its k blocks then have ..."""
    streamed_kc: int = 256
    """... this number of values (or pairs) of k, by default those of 128 KiB of a panel. The next block is prefetched
    meanwhile, from several streams."""
    mc: int = 144
    """Multiple of mr."""
    fused_mr: int = 5
    """mr of a micro-kernel that dequantizes B in registers, ..."""
    fused_rows: int = 10
    """... for up to this number of rows. More rows, if mc is more, share a panel that is dequantized in memory ..."""
    dequantized_kc: int = 256
    """... for this number of values of k."""
    many_tasks: int = 16
    """Panels that keep threads busy: with that many, a packed panel serves all rows."""

    @classmethod
    def default(cls, problem: Sequence[MatmulGroup], cpu: CpuFeatures) -> PanelTiles:
        """Return the default: where registers are many, quantized matrices are converted in them for more rows."""
        matmuls = [matmul for group in problem for matmul in group.matmuls]
        columns = matmuls[0].j.extent
        acc = matmuls[0].acc
        vectors = panel_width(columns.value if isinstance(columns, tirx.IntImm) else None, cpu, acc)
        vectors //= cpu.lanes(acc)
        fused, forms = {}, [quantized.form for quantized in _list_quantizations(problem)]
        if any(form.quads for form in forms):
            fused = {"fused_mr": 5 if cpu.registers >= 32 else 6}
        elif forms and cpu.registers >= 32:  # bytes are converted as fast as they are loaded
            packed = any(form.nibbles for form in forms)
            fused = {"fused_mr": 5, "fused_rows": 24} if packed else {"fused_mr": 6, "fused_rows": cls.mc}
        streamed_kc = min(_STREAMED_BLOCK // (4 * vectors * cpu.lanes(acc)), cls.kc)
        # Wide registers multiply more rows while a step of B is read.
        streamed_rows = 24 if cpu.vector_bytes >= 64 else cls.streamed_rows
        for quantized in _list_quantizations(problem):
            streamed_kc = min(_STREAMED_BLOCK * 8 // (quantized.bits * quantized.nr), _LONGEST_STREAMED_KC)
        streamed_kc = 1 << (streamed_kc.bit_length() - 1)
        return PanelTiles(vectors=vectors, streamed_rows=streamed_rows, streamed_kc=streamed_kc, **fused)

    @classmethod
    def space(cls, problem: Sequence[MatmulGroup], cpu: CpuFeatures) -> Space:
        dequantizes = bool(_list_quantizations(problem))
        return super().space(problem, cpu) | {
            "vectors": tuple(range(1, _max_vectors(cpu) + 1)),
            "mr": (1, 2, 3, 4, 5, 6, 8, 12),
            "kc": (128, 256, 512, 1024, 2048),
            "streamed_rows": (0, 1, 2, 4, 6, 12, 24, 48),
            "streamed_kc": (64, 128, 256, 512, 1024, 2048, _LONGEST_STREAMED_KC),
            "mc": (24, 48, 72, 96, 120, 140, 144, 192, 240, 288),
            "fused_mr": (2, 3, 4, 5, 6) if dequantizes else (cls.fused_mr,),
            "fused_rows": (4, 10, 24, 48, 144, 288) if dequantizes else (cls.fused_rows,),
            "dequantized_kc": (64, 128, 256, 512, 1024) if dequantizes else (cls.dequantized_kc,),
            "many_tasks": (4, 8, 16, 32),
        }

    def rules(self, problem: Sequence[MatmulGroup], cpu: CpuFeatures) -> dict[str, bool]:
        widest, registers = _max_vectors(cpu), cpu.registers
        quantized = _list_quantizations(problem)
        wide = max((c.nr // cpu.lanes("float32") for c in quantized), default=self.vectors)
        needed = self.mr * wide + wide + 1
        keeps_packed = any(c.form.nibbles and not c.form.quads for c in quantized)
        fused = self.fused_mr * wide + wide + 1 + (wide if keeps_packed else 0)
        return super().rules(problem, cpu) | {
            f"vectors = {self.vectors} must be from 1 to {widest}": 1 <= self.vectors <= widest,
            f"mc = {self.mc} must be a multiple of mr = {self.mr}": self.mr > 0
            and self.mc > 0
            and self.mc % self.mr == 0,
            f"kc = {self.kc} must be positive and even": self.kc > 0 and self.kc % 2 == 0,
            f"streamed_kc = {self.streamed_kc} must be positive and even": self.streamed_kc > 0
            and self.streamed_kc % 2 == 0,
            f"{needed} registers are more than {registers}": needed <= registers,
            f"{fused} registers to dequantize are more than {registers}": not quantized or fused <= registers,
            "fused_mr and dequantized_kc must be positive": min(self.fused_mr, self.dequantized_kc) > 0,
        }

    def estimate(self, problem: Sequence[MatmulGroup], cpu: CpuFeatures) -> float:
        """Estimate the log of the cycles.

        It counts the steps of the register tiles of all strips. It adds reloads of the panel from the second-level
        cache where it exceeds the first-level cache, and tiles that wait for another block of k.
        """
        total, lanes = 0.0, cpu.lanes(problem[0].acc)
        for group in problem:
            for matmul in group.matmuls:
                rows, columns, depth = (
                    _estimate_size(n) for n in (count_points(matmul.rows), matmul.j.extent, matmul.k.extent)
                )
                strips = max(-(-rows // self.mr), 1)
                panels = -(-columns // (self.vectors * lanes))
                step = register_tile_cycles(rows / strips, self.vectors)
                block = min(self.kc, depth)
                panel = 4 * block * self.vectors * lanes
                step += L2_LINE * self.vectors * miss_ratio(panel + 4 * block * self.mr, L1)
                blocks = -(-depth // block) if block else 0
                again = 2 * min(self.mr, rows) * self.vectors * (blocks - 1)
                rereads = L2_LINE * panel / 64 * blocks * miss_ratio(panel + 4 * self.mc * block, L2)
                total += panels * (strips * (depth * step + again) + -(-rows // self.mc) * rereads)
        return math.log(max(total, 1.0))


def _list_quantizations(problem: Sequence[MatmulGroup]) -> list[WeightQuantization]:
    return [matmul.quantization for group in problem for matmul in group.matmuls if matmul.quantization is not None]


def _estimate_size(size: Expr) -> int:
    return size.value if isinstance(size, tirx.IntImm) else TYPICAL


def panel_width(columns: int | None, cpu: CpuFeatures, acc: str = "float32") -> int:
    """Return nr for a matmul with `columns` columns (None: symbolic): the widest of the least work.

    v vectors take mr * v multiplications and mr + v loads for each k; few accumulators wait for one another.
    """
    lanes, mr = cpu.lanes(acc), PanelTiles.mr
    if columns is None:
        return _max_vectors(cpu) * lanes

    def work(v: int) -> float:
        return -(-columns // (v * lanes)) * register_tile_cycles(mr, v)

    return min(range(_max_vectors(cpu), 0, -1), key=work) * lanes


def is_panel_width(columns: int, lanes: int) -> bool:
    """Return whether a panel of `columns` columns is one to four vectors."""
    return 0 < columns <= 4 * lanes and columns % lanes == 0


def _max_vectors(cpu: CpuFeatures) -> int:
    """Return the maximum number of vectors of a panel that registers allow."""
    return 4 if cpu.registers >= 32 else 2
