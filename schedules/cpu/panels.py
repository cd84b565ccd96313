"""Block sizes of the matrix kernel (matmul.py), of which the width of a panel is that of stored weights."""

from __future__ import annotations

from dataclasses import dataclass

from .codes import Codes
from .vector import Machine


@dataclass(frozen=True)
class Tiles:
    """Block sizes: mr rows x nr columns in registers, kc values (or pairs) of k and mc rows in caches.

    mr * nr / lanes accumulators, nr / lanes vectors of B and one broadcast element of A must fit the registers. A panel
    of kc * nr elements, mc * kc of A and a tile of mc * nr accumulators should fit the L2 cache. mr divides mc.
    """

    lanes: int
    nr: int
    mr: int = 6
    kc: int = 1024
    mc: int = 144


def panel_width(columns: int | None, cpu: Machine) -> int:
    """nr for a product with so many columns (None: not known): that of the least work, and the widest among those.

    v vectors take mr * v multiplications and mr + v loads for each k; few accumulators wait for one another.
    """
    lanes, mr = cpu.lanes("float32"), Tiles.mr
    widest = 4 if cpu.registers >= 32 else 2
    if columns is None:
        return widest * lanes

    def work(v: int) -> int:
        return -(-columns // (v * lanes)) * max(mr * v, mr + v, 8)

    return min(range(widest, 0, -1), key=work) * lanes


def is_width(columns: int, lanes: int) -> bool:
    """Whether a panel of so many columns is one to four vectors."""
    return 0 < columns <= 4 * lanes and columns % lanes == 0


def tiles_of_codes(codes: Codes, lanes: int) -> Tiles:
    """kc is a number of whole blocks, or a part of the only one. Integers of several codes wait in registers, too."""
    kc = max(Tiles.kc // codes.block, 1) * codes.block if codes.block else Tiles.kc
    return Tiles(lanes, codes.nr, kc=kc) if codes.group == 1 else Tiles(lanes, codes.nr, mr=5, kc=kc, mc=140)
