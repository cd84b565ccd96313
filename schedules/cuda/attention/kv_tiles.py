"""K_j and V_j in shared memory, for the tiles of keys that a block of `prefill_mma` processes one after another.

K_0 (with Q), V_0, K_1, V_1, ... are groups of asynchronous copies, empty after the last tile.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass

from tvm import tirx
from tvm.ir import Expr
from tvm.script.ir_builder import tirx as T

from lowering.attention.codegen.bound import BoundAttention

from ..cache.quantized_kv import KvDequantizer
from ..cache.quantized_rows import QuantizedRows
from ..cache.row_copies import RowCopies
from ..primitives import ptx
from ..primitives.ptx import let
from ..primitives.shared_tile import CHUNK, SharedTile
from .attention_tiles import MmaTiles, pad_head_dim


@dataclass(frozen=True)
class KvTileRange:
    """The key tiles of a block: those before number `stop`, of key/value head hk in batch b.

    keys(u) returns the first key of tile u and the key after its last one. `thread` is the thread's index.
    """

    b: Expr
    hk: Expr
    thread: Expr
    keys: Callable[[Expr], tuple[Expr, Expr]]
    stop: Expr


class KvTiles(ABC):
    """The tiles of K and V. The `slots` readable tiles of each follow Q in shared memory."""

    def __init__(
        self,
        bound: BoundAttention,
        tiles: MmaTiles,
        memory: tirx.Buffer,
        work: KvTileRange,
        *,
        slots: int,
        pending: int,
    ) -> None:
        """`pending` is the number of groups of copies that may be in flight when a tile is waited for."""
        p, self.tiles, self.memory, self.work = bound.problem, tiles, memory, work
        self.slots, self.pending = slots, pending
        self.chunks = {"k": pad_head_dim(p.head_dim) // CHUNK, "v": p.v_head_dim // CHUNK}
        self.sizes = {name: tiles.kv * chunks * CHUNK for name, chunks in self.chunks.items()}
        k_start = tiles.q * max(self.chunks.values()) * CHUNK
        self.starts = {"k": k_start, "v": k_start + slots * self.sizes["k"]}
        self.end = self.starts["v"] + slots * self.sizes["v"]
        self.rows = {name: RowCopies(bound, name, work.b, work.hk, work.thread, tiles.threads) for name in ("k", "v")}

    def tile(self, name: str, u: Expr) -> SharedTile:
        """Return where tile u of k or v is read after its arrival."""
        return SharedTile(self.memory, self.starts[name] + u % self.slots * self.sizes[name], self.chunks[name])

    @abstractmethod
    def begin(self, start: Expr) -> None:
        """Load the tiles from number `start` on."""

    @abstractmethod
    def await_keys(self, u: Expr) -> None:
        """Wait until K_u has arrived and no warp reads V_u-1 any longer; load the next tile."""

    @abstractmethod
    def await_values(self, u: Expr) -> None:
        """Wait until V_u has arrived and no warp reads K_u any longer; load the next tile."""

    def wait(self) -> None:
        """Wait for the next group of copies, and for all threads."""
        ptx.wait_for_copies(self.pending)
        ptx.synchronize()

    def load(self, name: str, u: Expr) -> None:
        """Load tile u of k or v, if there is one."""
        with T.If(u < self.work.stop), T.Then():
            first, end = self.work.keys(u)
            self.copy(name, u, let(first), end)
        ptx.commit_copies()

    @abstractmethod
    def copy(self, name: str, u: Expr, first: Expr, end: Expr) -> None:
        """Begin to copy tile u of k or v, whose keys are [first, end)."""


class HalfPrecisionKvTiles(KvTiles):
    """Tiles of half precision, copied directly to where they are read."""

    def __init__(self, bound: BoundAttention, tiles: MmaTiles, memory: tirx.Buffer, work: KvTileRange) -> None:
        super().__init__(bound, tiles, memory, work, slots=tiles.stages, pending=2 * tiles.stages - 2)

    def begin(self, start: Expr) -> None:
        for u in range(self.slots):
            self.load("k", start + u)
            if u < self.slots - 1:
                self.load("v", start + u)

    def await_keys(self, u: Expr) -> None:
        self.wait()
        self.load("v", u + (self.slots - 1))

    def await_values(self, u: Expr) -> None:
        self.wait()
        self.load("k", u + self.slots)

    def copy(self, name: str, u: Expr, first: Expr, end: Expr) -> None:
        self.rows[name].copy(self.tile(name, u), first, self.tiles.kv, end)


class QuantizedKvTiles(KvTiles):
    """Quantized tiles, copied to rings of their own and dequantized from there.

    A thread dequantizes the chunks that it has copied, and needs no barrier before. So there are as many barriers as
    for half precision.
    """

    def __init__(
        self, bound: BoundAttention, tiles: MmaTiles, memory: tirx.Buffer, work: KvTileRange, dequantizer: KvDequantizer
    ) -> None:
        super().__init__(bound, tiles, memory, work, slots=1, pending=2 * tiles.stages - 1)
        self.rings, start = dict[str, QuantizedRows](), self.end
        for name, rows in self.rows.items():
            self.rings[name] = QuantizedRows(dequantizer, rows, memory, start, tiles.kv)
            start += tiles.stages * self.rings[name].size

    def begin(self, start: Expr) -> None:
        for u in range(self.tiles.stages):
            for name in ("k", "v"):
                self.load(name, start + u)

    def await_keys(self, u: Expr) -> None:
        self.await_tile("k", u)

    def await_values(self, u: Expr) -> None:
        self.await_tile("v", u)

    def await_tile(self, name: str, u: Expr) -> None:
        ptx.wait_for_copies(self.pending)
        self.rings[name].dequantize(u % self.tiles.stages, self.tile(name, u))
        ptx.synchronize()
        self.load(name, u + self.tiles.stages)

    def copy(self, name: str, u: Expr, first: Expr, end: Expr) -> None:
        self.rings[name].copy(u % self.tiles.stages, first, end)
