"""K_j and V_j in shared memory, for the tiles of keys that a block of `prefill_mma` works on one after the other.

K_0 (with Q), V_0, K_1, V_1, ... are groups of asynchronous copies, empty behind the last tile.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass

from tvm import tirx
from tvm.ir import Expr
from tvm.script.ir_builder import tirx as T

from lowering.attention.bound import Bound

from . import ptx
from .attention_tiles import MmaTiles, padded
from .coded_rows import CodedRows
from .kv_codes import KvCodes
from .ptx import let
from .row_copies import Rows
from .shared_tile import CHUNK, SharedTile


@dataclass(frozen=True)
class Work:
    """Of a block: the tiles of keys before number `stop`, of which keys(u) gives the first key and the one behind the
    last; key/value head hk in batch b; the number of the thread."""

    b: Expr
    hk: Expr
    thread: Expr
    keys: Callable[[Expr], tuple[Expr, Expr]]
    stop: Expr


class KeyValueTiles(ABC):
    """The tiles of K and V. Those that can be read, `slots` of each, lie in shared memory behind Q."""

    def __init__(
        self, bound: Bound, tiles: MmaTiles, memory: tirx.Buffer, work: Work, *, slots: int, pending: int
    ) -> None:
        """pending: groups of copies that may be on their way when a tile is waited for."""
        p, self.tiles, self.memory, self.work = bound.problem, tiles, memory, work
        self.slots, self.pending = slots, pending
        self.chunks = {"k": padded(p.head_dim) // CHUNK, "v": p.v_head_dim // CHUNK}
        self.sizes = {name: tiles.kv * chunks * CHUNK for name, chunks in self.chunks.items()}
        k_start = tiles.q * max(self.chunks.values()) * CHUNK
        self.starts = {"k": k_start, "v": k_start + slots * self.sizes["k"]}
        self.end = self.starts["v"] + slots * self.sizes["v"]
        self.rows = {name: Rows(bound, name, work.b, work.hk, work.thread, tiles.threads) for name in ("k", "v")}

    def tile(self, name: str, u: Expr) -> SharedTile:
        """Where tile u of k or v is read, once it is there."""
        return SharedTile(self.memory, self.starts[name] + u % self.slots * self.sizes[name], self.chunks[name])

    @abstractmethod
    def begin(self, start: Expr) -> None:
        """Asks for the tiles from number `start` on."""

    @abstractmethod
    def await_keys(self, u: Expr) -> None:
        """K_u is there, and no warp reads V_u-1 any longer; asks for what comes next."""

    @abstractmethod
    def await_values(self, u: Expr) -> None:
        """V_u is there, and no warp reads K_u any longer; asks for what comes next."""

    def wait(self) -> None:
        """The group that comes next is there, and all threads are here."""
        ptx.wait_for_copies(self.pending)
        ptx.synchronize()

    def load(self, name: str, u: Expr) -> None:
        """Asks for tile u of k or v, if there is one."""
        with T.If(u < self.work.stop), T.Then():
            first, end = self.work.keys(u)
            self.copy(name, u, let(first), end)
        ptx.commit_copies()

    @abstractmethod
    def copy(self, name: str, u: Expr, first: Expr, end: Expr) -> None:
        """Begins to copy tile u of k or v, whose keys are [first, end)."""


class HalfTiles(KeyValueTiles):
    """Of half precision, copied to where they are read."""

    def __init__(self, bound: Bound, tiles: MmaTiles, memory: tirx.Buffer, work: Work) -> None:
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


class CodedTiles(KeyValueTiles):
    """Of codes, copied to rings of their own and expanded from there. A thread expands what it has copied, and so needs
    no barrier before: there are as many as for half precision."""

    def __init__(self, bound: Bound, tiles: MmaTiles, memory: tirx.Buffer, work: Work, codes: KvCodes) -> None:
        super().__init__(bound, tiles, memory, work, slots=1, pending=2 * tiles.stages - 1)
        self.rings, start = dict[str, CodedRows](), self.end
        for name, rows in self.rows.items():
            self.rings[name] = CodedRows(codes, rows, memory, start, tiles.kv)
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
        self.rings[name].expand(u % self.tiles.stages, self.tile(name, u))
        ptx.synchronize()
        self.load(name, u + self.tiles.stages)

    def copy(self, name: str, u: Expr, first: Expr, end: Expr) -> None:
        self.rings[name].copy(u % self.tiles.stages, first, end)
