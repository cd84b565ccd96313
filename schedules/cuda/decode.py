"""Attention for few query rows over long keys: split-KV over thread blocks (Flash-Decoding; Dao, Haziza, Massa, Sizov
2023), which is bound by reading K and V once.

    a block for each key/value head, 16 of its R = S G packed query rows, and split of the visible keys:
        each of its warps, for every W-th tile of B_c keys of the split:     K_j [B_c, D], V_j [B_c, Dv]
            online softmax in registers, as in prefill_mma.py                m, l [16], O [16, Dv]
        the warps' (m, l, O) become one, which is kept
    a warp for each query row:                               s counts the splits; a sink is one more, with O_s = 0
        m = max m_s,  w_s = exp(m_s - m)
        Y = sum w_s O_s / sum w_s l_s                        0 where no key was visible

Warps share nothing but Q until the end: each has a ring of tiles of its own in shared memory and waits for nobody. What
a formula hides from all rows is neither read nor multiplied.
Queries are packed so that all heads that share keys meet them in one tile; row r is query row r // G of head r % G.

The host chooses the number of splits by the capacity of the cache, the device cuts the valid length into so many:
blocks that are left without keys end at once. With one split its blocks write Y. With more, the second launch costs
less than what would replace it: counters that are zeroed before, and a last block that merges alone while the others
have left.

Where rows differ in what they see, a value that one of them does not see may still be infinite or NaN, and 0 * NaN =
NaN. Rows that come out so are computed again one by one, and so are rows whose keys are all hidden by finite numbers.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext

from tvm import tirx
from tvm.ir import Expr
from tvm.script.ir_builder import tirx as T

from lowering.attention.bound import Bound
from lowering.attention.key_tiles import KeyTiles
from lowering.attention.keys import Range, length
from lowering.attention.scores import HIDDEN

from . import ptx
from .attention_tiles import padded
from .coded_rows import CodedRows
from .decode_tiles import DecodeTiles
from .device import Device
from .fragments import OnlineSoftmax
from .host import on_host, sm_count
from .kv_codes import KvCodes, arriving_bytes
from .mask_words import MaskWords
from .partial import KeySplits, Partial, each_element, merged
from .ptx import WARP, let, put, shared_memory, unrolled
from .row_copies import Rows
from .shared_tile import CHUNK, SharedTile
from .shown_tiles import ShownTiles
from .warp_tile import ROWS, WarpTile


def decode(bound: Bound, tiles: DecodeTiles, gpu: Device) -> None:
    """Emits the kernels and their launches into the PrimFunc that `bound` has opened, for what `prefill_mma` takes.

    Where batches have packed rows of their own, those with at most tiles.rows of all heads that share keys are served.
    """
    p = bound.problem
    most = tiles.rows // p.group
    row_blocks = on_host(tirx.ceildiv(tirx.min(T.int64(1) * bound.S, T.int64(most)) * p.group, ROWS))
    heads = on_host(T.int64(1) * bound.B * p.kv_heads)
    with T.If(heads * row_blocks > 0), T.Then():
        wanted = sm_count() * tiles.per_sm if tiles.blocks is None else T.int64(tiles.blocks)
        by_blocks = tirx.truncdiv(wanted, heads * row_blocks)
        by_keys = tirx.truncdiv(T.int64(1) * bound.T + (tiles.split - 1), T.int64(tiles.split))
        by_size = tirx.max(tirx.min(by_blocks, by_keys), T.int64(1))
        splits = on_host(by_size if p.splits is None else T.int64(p.splits))
        keys, codes = KeySplits(bound, splits, tiles.keys * tiles.warps), KvCodes(bound, gpu) if p.coded else None
        partial = Partial(
            bound, splits, group=p.group, careful=bound.rows_differ, warps=tiles.warps, ahead=tiles.ahead, most=most
        )
        with (
            T.launch_thread("blockIdx.x", (heads * splits * row_blocks).astype("int32")) as block,
            T.launch_thread("threadIdx.x", tiles.threads) as thread,
            ptx.all_registers() if codes is not None or bound.scores.has_tensor else nullcontext(),
        ):
            row_blocks, parts = (let(size.astype("int32")) for size in (row_blocks, splits))
            row_block, work = let(tirx.truncmod(block, row_blocks)), let(tirx.truncdiv(block, row_blocks))
            head, split = let(tirx.truncdiv(work, parts)), let(tirx.truncmod(work, parts))
            with partial.if_served(let(tirx.truncdiv(head, p.kv_heads))):
                _Split(bound, tiles, codes, partial, keys, (head, split, row_block), let(thread)).emit()
        partial.merge(keys.used)


class _Split:
    """The code of one block of the first launch: 16 packed rows of a key/value head with the keys of a split."""

    def __init__(
        self,
        bound: Bound,
        tiles: DecodeTiles,
        codes: KvCodes | None,
        partial: Partial,
        splits: KeySplits,
        place: tuple[Expr, Expr, Expr],
        thread: Expr,
    ) -> None:
        self.bound, self.tiles, self.problem, self.partial, self.splits = bound, tiles, bound.problem, partial, splits
        self.head, self.split, row_block = place
        self.thread, self.warp, self.lane = thread, let(thread // WARP), let(thread % WARP)
        self.b, self.hk = (let(f(self.head, self.problem.kv_heads)) for f in (tirx.truncdiv, tirx.truncmod))
        rows = bound.rows(self.b) * self.problem.group if self.problem.packed else partial.rows
        self.rows, self.r0 = let(rows.astype("int32")), let(row_block * ROWS)
        self.chunks = {"q": padded(self.problem.head_dim) // CHUNK, "v": self.problem.v_head_dim // CHUNK}
        self.chunks["k"] = self.chunks["q"]
        size = tiles.shared_memory(self.problem) // 2
        self.memory = shared_memory(size, self.problem.dtype, 128)
        self.Q = SharedTile(self.memory, 0, self.chunks["q"])
        self.codes, self.rings = codes, dict[str, CodedRows]()
        if codes is not None:
            self.begin_rings(codes)
        self.shown: ShownTiles | None = None

    def begin_rings(self, codes: KvCodes) -> None:
        """The warp's rings for codes of K and V, behind a place of each warp where it expands them."""
        tiles, room = self.tiles, self.tiles.keys * max(self.chunks["k"], self.chunks["v"]) * CHUNK
        first = ROWS * self.chunks["q"] * CHUNK
        self.expanded = let(first + self.warp * room)
        each = tiles.stages * tiles.keys * (self.chunks["k"] + self.chunks["v"]) * arriving_bytes(self.problem) // 2
        start = let(first + tiles.warps * room + self.warp * each)
        for name in ("k", "v"):
            rows = Rows(self.bound, name, self.b, self.hk, self.lane, WARP)
            self.rings[name] = CodedRows(codes, rows, self.memory, start, tiles.keys)
            start = let(start + tiles.stages * self.rings[name].size)

    def emit(self) -> None:
        self.keys = self.splits.of(self.b, self.split)
        self.alone = let(self.splits.splits.astype("int32")) == 1
        with T.If(tirx.any(length(self.keys) > 0, self.alone)), T.Then():
            self.attend()

    def attend(self) -> None:
        tiles = self.tiles
        self.key_tiles = KeyTiles(self.keys, self.without_mask_code(), tiles.keys, lambda x: let(x.astype("int32")))
        self.steps = let(tirx.truncdiv(tirx.max(self.key_tiles.count - self.warp, 0) + (tiles.warps - 1), tiles.warps))
        self.load_queries()
        ptx.commit_copies()
        if self.bound.scores.formula is None:
            for u in range(tiles.stages - 1):
                self.load(tirx.const(u, "int32"))
        else:
            self.shown = ShownTiles(self.steps, self.lane, self.is_shown)
            with T.serial(tiles.stages - 1) as u:
                self.load(u)
        rows = self.row_of(0), self.row_of(1)
        softmax = OnlineSoftmax(self.bound, self.b, rows, self.lane, tiles.keys, split=True)
        softmax.start()
        warp = WarpTile(self.problem, self.lane, tiles.keys)
        ptx.wait_for_copies(tiles.stages - 1)
        if self.codes is not None and self.codes.in_query:
            self.scale_queries(self.codes)
        ptx.synchronize()
        with T.serial(self.steps) as u:
            words = self.ask(softmax, u) if self.bound.scores.has_tensor else None
            ptx.wait_for_copies(tiles.stages - 2)
            ptx.synchronize_warp()
            self.load(u + (tiles.stages - 1))
            with self.if_shown():
                t = self.warp + u * tiles.warps
                kv0, full = let(self.key_tiles.first(t)), self.key_tiles.full(t)
                warp.scores(self.Q, self.read("k", u))
                softmax.step(warp.S, kv0, full, self.key_tiles.number(t), words, self.key_tiles.stop(t))
                softmax.rescale(warp.O, softmax.alpha, self.problem.v_head_dim)
                softmax.pack(warp.S, warp.P)
                warp.accumulate(self.read("v", u))
        ptx.synchronize()  # all tiles have been read
        self.keep(softmax, warp)

    def ask(self, softmax: OnlineSoftmax, u: Expr) -> MaskWords:
        """The mask's elements for the warp's tile number u, on their way while it waits for the tile."""
        t = self.warp + u * self.tiles.warps
        return softmax.ask(let(self.key_tiles.first(t)), self.key_tiles.number(t), self.key_tiles.stop(t))

    # Tiles that a formula hides.

    def is_shown(self, u: Expr) -> Expr:
        """Whether the formula shows a key of the warp's tile u to some row of the block."""
        t = let(self.warp + u * self.tiles.warps)
        keys = (let(key.astype("int64")) for key in (self.key_tiles.first(t), self.key_tiles.end(t) - 1))
        group, b, hk = self.problem.group, self.b.astype("int64"), self.hk.astype("int64")
        ends = (tirx.min(r, self.rows - 1) for r in (self.r0, self.r0 + (ROWS - 1)))
        (i0, i1), (j0, j1) = (let(tirx.truncdiv(r, group).astype("int64")) for r in ends), keys
        _, highest = self.bound.scores.mask_extremes(b, hk * group, group, (i0, i1), (j0, j1))
        return highest > T.float32(HIDDEN)

    @contextmanager
    def if_shown(self) -> Iterator[None]:
        """Runs what it encloses if the tile that is worked on was asked for."""
        if self.shown is None:
            yield
            return
        with T.If(self.shown.was(self.tiles.stages - 1)), T.Then():
            yield

    # Rows.

    def row_of(self, r: int) -> tuple[Expr, Expr]:
        """Query head and query row of the thread's row r; rows that do not exist repeat the last one."""
        row = let(tirx.min(self.r0 + (self.lane // 4 + 8 * r), self.rows - 1))
        _, h, i = self.partial.row_of(self.head, row)
        return h, i

    def load_queries(self) -> None:
        """Q: rows that do not exist are zeros."""

        def load(row: Expr, chunk: Expr) -> None:
            _, h, i = self.partial.row_of(self.head, let(self.r0 + row))
            exists = tirx.all(self.r0 + row < self.rows, chunk < self.problem.head_dim // CHUNK)
            buffer, indices = self.bound.addressing.at("q", self.b, h, i.astype("int64"), chunk * CHUNK)
            ptx.copy_chunk(self.Q.at(row, chunk), buffer[tuple(indices)], exists)

        self.each_chunk_of_queries(load)

    def scale_queries(self, codes: KvCodes) -> None:
        """Q := Q times the scales of K; a thread what it has copied."""
        self.each_chunk_of_queries(lambda row, chunk: codes.scale_query(self.Q.at(row, chunk), self.hk, chunk))

    def each_chunk_of_queries(self, body: Callable[[Expr, Expr], None]) -> None:
        """body(row, chunk) for those of the thread."""
        chunks, threads = self.chunks["q"], self.tiles.threads
        with unrolled(-(-ROWS * chunks // threads)) as n:
            c = let(n * threads + self.thread)
            with T.If(c < ROWS * chunks), T.Then():
                body(let(tirx.truncdiv(c, chunks)), let(tirx.truncmod(c, chunks)))

    # Keys and values.

    def without_mask_code(self) -> list[Range]:
        """Of each range of the split, the keys that need no mask code; none where there is a mask."""
        i0, i1 = (let(tirx.truncdiv(r, self.problem.group)) for r in (self.r0, self.r0 + ROWS - 1))
        found = self.bound.without_mask_code(self.b, i0.astype("int64"), i1.astype("int64") + 1)
        return [
            (lo.astype("int32"), tirx.min(hi.astype("int32"), stop)) for (lo, hi), (_, stop) in zip(found, self.keys)
        ]

    def tile(self, name: str, u: Expr) -> SharedTile:
        """Where the warp's tile number u of K or V lies: K before V in each stage of its ring."""
        tiles, k, v = self.tiles, self.chunks["k"], self.chunks["v"]
        stage = self.warp * tiles.stages + tirx.truncmod(u, tiles.stages)
        start = (
            ROWS * k * CHUNK + stage * (tiles.keys * (k + v) * CHUNK) + (tiles.keys * k * CHUNK if name == "v" else 0)
        )
        return SharedTile(self.memory, let(start), self.chunks[name])

    def read(self, name: str, u: Expr) -> SharedTile:
        """The warp's tile number u of K, and then of V, which is there; codes are expanded in one place."""
        if self.codes is None:
            return self.tile(name, u)
        tile = SharedTile(self.memory, self.expanded, self.chunks[name])
        if name == "v":
            ptx.synchronize_warp()  # no lane reads K any longer
        self.rings[name].expand(tirx.truncmod(u, self.tiles.stages), tile)
        ptx.synchronize_warp()
        return tile

    def load(self, u: Expr) -> None:
        """Asks for the warp's tile number u, if there is one and the mask shows it."""
        exists = u < self.steps if self.shown is None else self.shown.ask(u)
        with T.If(exists), T.Then():
            t = self.warp + u * self.tiles.warps
            kv0, stop = let(self.key_tiles.first(t)), let(self.key_tiles.stop(t))
            for name in ("k", "v"):
                if self.codes is None:
                    self.load_rows(name, self.tile(name, u), kv0, stop)
                else:
                    self.rings[name].copy(tirx.truncmod(u, self.tiles.stages), kv0, stop)
        ptx.commit_copies()

    def load_rows(self, name: str, tile: SharedTile, kv0: Expr, stop: Expr) -> None:
        """K_j or V_j: a warp's lanes go along rows as far as these divide. Keys from `stop` on are zeros."""
        keys, chunks = self.tiles.keys, self.chunks[name]
        whole = (self.problem.head_dim if name == "k" else self.problem.v_head_dim) // CHUNK
        across = math.gcd(chunks, WARP)
        at_once = WARP // across
        row0, chunk0 = let(self.lane // across), let(self.lane % across)

        def load_row(step: Expr) -> None:
            row = row0 + step * at_once
            j = let((kv0 + row).astype("int64"))
            with unrolled(chunks // across) as n:
                exists = kv0 + row < stop
                if chunks > whole:
                    exists = tirx.all(exists, n * across + chunk0 < whole)
                buffer, indices = self.bound.addressing.at(name, self.b, self.hk, j, (n * across + chunk0) * CHUNK)
                ptx.copy_chunk(tile.at(row, n * across + chunk0), buffer[tuple(indices)], exists)

        with unrolled(-(-keys // at_once)) as step:
            if keys % at_once:
                with T.If(row0 + step * at_once < keys), T.Then():
                    load_row(step)
            else:
                load_row(step)

    # The result of the split.

    def keep(self, softmax: OnlineSoftmax, warp: WarpTile) -> None:
        """The warps' (m, l, O), through shared memory, as one; Y of it, where there are no other keys."""
        if self.codes is not None:
            self.codes.scale_values(warp.O, self.hk, self.lane)
        W, dim = self.tiles.warps, self.problem.v_head_dim
        pitch = dim + CHUNK  # so that rows begin in different banks
        memory = T.decl_buffer((W * ROWS * (2 + pitch),), "float32", data=self.memory.data, scope="shared.dyn")
        m_start, l_start, o_start = 0, W * ROWS, 2 * W * ROWS
        for r in range(2):
            place = let(self.warp * ROWS + self.lane // 4 + 8 * r)
            l = ptx.reduce_quad(softmax.l[r], lambda x, y: x + y)
            with T.If(self.lane % 4 == 0), T.Then():
                put(memory, m_start + place, softmax.maximum(r))
                put(memory, l_start + place, l)
            with unrolled(dim // 8) as column, T.vectorized(2) as x:
                put(
                    memory, o_start + place * pitch + column * 8 + self.lane % 4 * 2 + x, warp.O[column * 4 + r * 2 + x]
                )
        ptx.synchronize()
        with T.serial(-(-ROWS // W)) as n:
            row = let(n * W + self.warp)
            r = let(self.r0 + row)
            with T.If(tirx.all(row < ROWS, r < self.rows)), T.Then():
                b, h, i = self.partial.row_of(self.head, r)
                nothing = T.float32(float("-inf")), T.float32(0)
                sink = self.bound.scores.before_keys(h)  # which the parts have in common
                state = merged(
                    (tirx.const(W, "int32"), W),
                    lambda w: (memory[m_start + w * ROWS + row], memory[l_start + w * ROWS + row]),
                    lambda w, d: memory[o_start + (w * ROWS + row) * pitch + d],
                    tuple(tirx.Select(self.alone, *ends) for ends in zip(sink, nothing)),
                    (dim, self.lane),
                )
                with T.If(self.alone):
                    with T.Then():
                        self.partial.finish((b, h, i), self.lane, state)
                    with T.Else():
                        m, l, O = state
                        place = self.partial.place(self.head, r, self.split)
                        self.partial.keep_ends(place, m, l)
                        each_element(dim, self.lane, lambda n, d: put(self.partial.O, place * dim + d, O[n]))
