"""Attention for few query rows over long keys: split-KV over thread blocks (Flash-Decoding; Dao, Haziza, Massa, Sizov
2023). Its cost is that of reading K and V once.

    a block for each key/value head, 16 of its R = S G packed query rows, and split of the visible keys:
        each of its warps, for every W-th tile of B_c keys of the split:     K_j [B_c, D], V_j [B_c, Dv]
            online softmax in registers, as in prefill_mma.py                m, l [16], O [16, Dv]
        the (m, l, O) of the warps are merged and stored
    a warp for each query row:                               s counts the splits; a sink is one more, with O_s = 0
        m = max m_s,  w_s = exp(m_s - m)
        Y = sum w_s O_s / sum w_s l_s                        0 where no key was visible

Warps share only Q until the end: each has its own ring of tiles in shared memory and waits for no other warp. Keys that
a formula hides from all rows are neither read nor multiplied. Queries are packed so that all heads that share keys are
in one tile; row r is query row r // G of head r % G.

The host chooses the number of splits by the capacity of the cache, and the device cuts the valid length into so many.
Blocks without keys end at once. With one split, its blocks write Y. With more, the second launch costs less than its
alternative: counters that are zeroed before, and a last block that merges alone after all others have ended.

Where rows see different keys, a value hidden from one of them may still be infinite or NaN, and 0 * NaN = NaN. Rows
with such results are recomputed one by one, and so are rows whose keys are all hidden by finite numbers.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext

from tvm import tirx
from tvm.ir import Expr
from tvm.script.ir_builder import tirx as T

from lowering.attention.codegen.bound import BoundAttention
from lowering.attention.codegen.key_ranges import KeyRange, count_keys
from lowering.attention.codegen.key_tiles import KeyTiles
from lowering.attention.codegen.scores import HIDDEN_BIAS

from ..cache.quantized_kv import KvDequantizer, staged_chunk_bytes
from ..cache.quantized_rows import QuantizedRows
from ..cache.row_copies import RowCopies
from ..primitives import ptx
from ..primitives.device import Device
from ..primitives.host import bind_on_host, sm_count
from ..primitives.ptx import WARP, alloc_shared_memory, let, store_element, unrolled
from ..primitives.shared_tile import CHUNK, SharedTile
from .attention_tiles import pad_head_dim
from .decode_tiles import DecodeTiles
from .fragments import OnlineSoftmax
from .mask_fragment import MaskFragment
from .partial_results import KeySplits, PartialResults, merge_partials, visit_elements
from .visible_tiles import VisibleTiles
from .warp_tile import ROWS, WarpTile


def decode(bound: BoundAttention, tiles: DecodeTiles, gpu: Device) -> None:
    """Emit the kernels and their launches into the PrimFunc opened by `bound`, for problems that `prefill_mma` accepts.

    In a ragged batch, this serves the sequences with at most tiles.rows rows over all heads that share keys.
    """
    p = bound.problem
    max_rows = tiles.rows // p.group
    row_blocks = bind_on_host(tirx.ceildiv(tirx.min(T.int64(1) * bound.S, T.int64(max_rows)) * p.group, ROWS))
    heads = bind_on_host(T.int64(1) * bound.B * p.kv_heads)
    with T.If(heads * row_blocks > 0), T.Then():
        target_blocks = sm_count() * tiles.per_sm if tiles.blocks is None else T.int64(tiles.blocks)
        by_blocks = tirx.truncdiv(target_blocks, heads * row_blocks)
        by_keys = tirx.truncdiv(T.int64(1) * bound.T + (tiles.split - 1), T.int64(tiles.split))
        by_size = tirx.max(tirx.min(by_blocks, by_keys), T.int64(1))
        splits = bind_on_host(by_size if p.splits is None else T.int64(p.splits))
        keys, dequantizer = (
            KeySplits(bound, splits, tiles.keys * tiles.warps),
            KvDequantizer(bound, gpu) if p.is_quantized else None,
        )
        partial = PartialResults(
            bound,
            splits,
            group=p.group,
            careful=bound.has_row_dependent_keys,
            warps=tiles.warps,
            ahead=tiles.ahead,
            max_rows=max_rows,
        )
        with (
            T.launch_thread("blockIdx.x", (heads * splits * row_blocks).astype("int32")) as block,
            T.launch_thread("threadIdx.x", tiles.threads) as thread,
            ptx.all_registers() if dequantizer is not None or bound.scores.has_tensor else nullcontext(),
        ):
            row_blocks, split_count = (let(size.astype("int32")) for size in (row_blocks, splits))
            row_block, work = let(tirx.truncmod(block, row_blocks)), let(tirx.truncdiv(block, row_blocks))
            head, split = let(tirx.truncdiv(work, split_count)), let(tirx.truncmod(work, split_count))
            with partial.if_served(let(tirx.truncdiv(head, p.kv_heads))):
                _Split(bound, tiles, dequantizer, partial, keys, (head, split, row_block), let(thread)).emit()
        partial.merge(keys.count_used)


class _Split:
    """The code of one block of the first launch: 16 packed rows of a key/value head with the keys of a split."""

    def __init__(
        self,
        bound: BoundAttention,
        tiles: DecodeTiles,
        dequantizer: KvDequantizer | None,
        partial: PartialResults,
        splits: KeySplits,
        position: tuple[Expr, Expr, Expr],
        thread: Expr,
    ) -> None:
        self.bound, self.tiles, self.problem, self.partial, self.splits = bound, tiles, bound.problem, partial, splits
        self.head, self.split, row_block = position
        self.thread, self.warp, self.lane = thread, let(thread // WARP), let(thread % WARP)
        self.b, self.hk = (let(f(self.head, self.problem.kv_heads)) for f in (tirx.truncdiv, tirx.truncmod))
        rows = bound.rows(self.b) * self.problem.group if self.problem.is_ragged else partial.rows
        self.rows, self.r0 = let(rows.astype("int32")), let(row_block * ROWS)
        self.chunks = {"q": pad_head_dim(self.problem.head_dim) // CHUNK, "v": self.problem.v_head_dim // CHUNK}
        self.chunks["k"] = self.chunks["q"]
        elements = tiles.shared_memory(self.problem) // 2
        self.memory = alloc_shared_memory(elements, self.problem.dtype, 128)
        self.Q = SharedTile(self.memory, 0, self.chunks["q"])
        self.dequantizer, self.rings = dequantizer, dict[str, QuantizedRows]()
        if dequantizer is not None:
            self.create_rings(dequantizer)
        self.visible_tiles: VisibleTiles | None = None

    def create_rings(self, dequantizer: KvDequantizer) -> None:
        """Create the warp's rings for quantized K and V.

        They follow the tiles into which the warps dequantize.
        """
        tiles, tile_elements = self.tiles, self.tiles.keys * max(self.chunks["k"], self.chunks["v"]) * CHUNK
        first = ROWS * self.chunks["q"] * CHUNK
        self.dequantized = let(first + self.warp * tile_elements)
        ring_elements = (
            tiles.stages * tiles.keys * (self.chunks["k"] + self.chunks["v"]) * staged_chunk_bytes(self.problem) // 2
        )
        start = let(first + tiles.warps * tile_elements + self.warp * ring_elements)
        for name in ("k", "v"):
            rows = RowCopies(self.bound, name, self.b, self.hk, self.lane, WARP)
            self.rings[name] = QuantizedRows(dequantizer, rows, self.memory, start, tiles.keys)
            start = let(start + tiles.stages * self.rings[name].size)

    def emit(self) -> None:
        self.keys = self.splits.find_keys(self.b, self.split)
        self.has_all_keys = let(self.splits.splits.astype("int32")) == 1
        with T.If(tirx.any(count_keys(self.keys) > 0, self.has_all_keys)), T.Then():
            self.attend()

    def attend(self) -> None:
        tiles = self.tiles
        self.key_tiles = KeyTiles(self.keys, self.find_unmasked_ranges(), tiles.keys, lambda x: let(x.astype("int32")))
        self.steps = let(tirx.truncdiv(tirx.max(self.key_tiles.count - self.warp, 0) + (tiles.warps - 1), tiles.warps))
        self.load_queries()
        ptx.commit_copies()
        if self.bound.scores.formula is None:
            for u in range(tiles.stages - 1):
                self.load(tirx.const(u, "int32"))
        else:
            self.visible_tiles = VisibleTiles(self.steps, self.lane, self.is_visible)
            with T.serial(tiles.stages - 1) as u:
                self.load(u)
        rows = self.row_of(0), self.row_of(1)
        softmax = OnlineSoftmax(self.bound, self.b, rows, self.lane, tiles.keys, split=True)
        softmax.start()
        warp = WarpTile(self.problem, self.lane, tiles.keys)
        ptx.wait_for_copies(tiles.stages - 1)
        if self.dequantizer is not None and self.dequantizer.in_query:
            self.scale_queries(self.dequantizer)
        ptx.synchronize()
        with T.serial(self.steps) as u:
            mask = self.load_mask(softmax, u) if self.bound.scores.has_tensor else None
            ptx.wait_for_copies(tiles.stages - 2)
            ptx.synchronize_warp()
            self.load(u + (tiles.stages - 1))
            with self.if_visible():
                t = self.warp + u * tiles.warps
                kv0, full = let(self.key_tiles.first(t)), self.key_tiles.full(t)
                warp.scores(self.Q, self.read_tile("k", u))
                softmax.step(warp.S, kv0, full, self.key_tiles.number(t), mask, self.key_tiles.stop(t))
                softmax.rescale(warp.O, softmax.alpha, self.problem.v_head_dim)
                softmax.pack(warp.S, warp.P)
                warp.accumulate(self.read_tile("v", u))
        ptx.synchronize()  # all tiles have been read
        self.store_result(softmax, warp)

    def load_mask(self, softmax: OnlineSoftmax, u: Expr) -> MaskFragment:
        """Load the mask's elements for the warp's tile number u; they arrive while it waits for the tile."""
        t = self.warp + u * self.tiles.warps
        return softmax.load_mask(let(self.key_tiles.first(t)), self.key_tiles.number(t), self.key_tiles.stop(t))

    # Tiles that a formula hides.

    def is_visible(self, u: Expr) -> Expr:
        """Return whether the formula shows a key of the warp's tile u to some row of the block."""
        t = let(self.warp + u * self.tiles.warps)
        keys = (let(key.astype("int64")) for key in (self.key_tiles.first(t), self.key_tiles.end(t) - 1))
        group, b, hk = self.problem.group, self.b.astype("int64"), self.hk.astype("int64")
        ends = (tirx.min(r, self.rows - 1) for r in (self.r0, self.r0 + (ROWS - 1)))
        (i0, i1), (j0, j1) = (let(tirx.truncdiv(r, group).astype("int64")) for r in ends), keys
        _, highest = self.bound.scores.emit_mask_bounds(b, hk * group, group, (i0, i1), (j0, j1))
        return highest > T.float32(HIDDEN_BIAS)

    @contextmanager
    def if_visible(self) -> Iterator[None]:
        """Run the enclosed code if the current tile was loaded."""
        if self.visible_tiles is None:
            yield
            return
        with T.If(self.visible_tiles.recall(self.tiles.stages - 1)), T.Then():
            yield

    # Rows.

    def row_of(self, r: int) -> tuple[Expr, Expr]:
        """Return query head and query row of the thread's row r; rows that do not exist repeat the last one."""
        row = let(tirx.min(self.r0 + (self.lane // 4 + 8 * r), self.rows - 1))
        _, h, i = self.partial.row_of(self.head, row)
        return h, i

    def load_queries(self) -> None:
        """Load Q. Rows that do not exist are zeros."""

        def load(row: Expr, chunk: Expr) -> None:
            _, h, i = self.partial.row_of(self.head, let(self.r0 + row))
            exists = tirx.all(self.r0 + row < self.rows, chunk < self.problem.head_dim // CHUNK)
            buffer, indices = self.bound.addressing.at("q", self.b, h, i.astype("int64"), chunk * CHUNK)
            ptx.copy_chunk(self.Q.at(row, chunk), buffer[tuple(indices)], exists)

        self.visit_query_chunks(load)

    def scale_queries(self, dequantizer: KvDequantizer) -> None:
        """Multiply Q by the scales of K. A thread scales the chunks that it has copied."""
        self.visit_query_chunks(lambda row, chunk: dequantizer.scale_query(self.Q.at(row, chunk), self.hk, chunk))

    def visit_query_chunks(self, body: Callable[[Expr, Expr], None]) -> None:
        """Emit body(row, chunk) for the chunks of this thread."""
        chunks, threads = self.chunks["q"], self.tiles.threads
        with unrolled(-(-ROWS * chunks // threads)) as n:
            c = let(n * threads + self.thread)
            with T.If(c < ROWS * chunks), T.Then():
                body(let(tirx.truncdiv(c, chunks)), let(tirx.truncmod(c, chunks)))

    # Keys and values.

    def find_unmasked_ranges(self) -> list[KeyRange]:
        """Return, for each range of the split, the keys that need no mask code; none where there is a mask."""
        i0, i1 = (let(tirx.truncdiv(r, self.problem.group)) for r in (self.r0, self.r0 + ROWS - 1))
        ranges = self.bound.find_unmasked_ranges(self.b, i0.astype("int64"), i1.astype("int64") + 1)
        return [
            (lo.astype("int32"), tirx.min(hi.astype("int32"), stop)) for (lo, hi), (_, stop) in zip(ranges, self.keys)
        ]

    def tile_at(self, name: str, u: Expr) -> SharedTile:
        """Return the warp's tile number u of K or V. In each stage of the ring, K precedes V."""
        tiles, k, v = self.tiles, self.chunks["k"], self.chunks["v"]
        stage = self.warp * tiles.stages + tirx.truncmod(u, tiles.stages)
        start = (
            ROWS * k * CHUNK + stage * (tiles.keys * (k + v) * CHUNK) + (tiles.keys * k * CHUNK if name == "v" else 0)
        )
        return SharedTile(self.memory, let(start), self.chunks[name])

    def read_tile(self, name: str, u: Expr) -> SharedTile:
        """Return the warp's tile number u of K or V, after it has arrived.

        Quantized tiles are dequantized into one buffer: K first, then V.
        """
        if self.dequantizer is None:
            return self.tile_at(name, u)
        tile = SharedTile(self.memory, self.dequantized, self.chunks[name])
        if name == "v":
            ptx.synchronize_warp()  # no lane reads K any longer
        self.rings[name].dequantize(tirx.truncmod(u, self.tiles.stages), tile)
        ptx.synchronize_warp()
        return tile

    def load(self, u: Expr) -> None:
        """Load the warp's tile number u, if there is one and the mask shows it."""
        exists = u < self.steps if self.visible_tiles is None else self.visible_tiles.test_tile(u)
        with T.If(exists), T.Then():
            t = self.warp + u * self.tiles.warps
            kv0, stop = let(self.key_tiles.first(t)), let(self.key_tiles.stop(t))
            for name in ("k", "v"):
                if self.dequantizer is None:
                    self.load_rows(name, self.tile_at(name, u), kv0, stop)
                else:
                    self.rings[name].copy(tirx.truncmod(u, self.tiles.stages), kv0, stop)
        ptx.commit_copies()

    def load_rows(self, name: str, tile: SharedTile, kv0: Expr, stop: Expr) -> None:
        """Load K_j or V_j. The lanes of a warp run along rows as far as they divide them. Keys from `stop` on are
        zeros.
        """
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

    def store_result(self, softmax: OnlineSoftmax, warp: WarpTile) -> None:
        """Merge the (m, l, O) of the warps through shared memory, and store them.

        Y is stored where the split has all keys.
        """
        if self.dequantizer is not None:
            self.dequantizer.scale_values(warp.O, self.hk, self.lane)
        W, dim = self.tiles.warps, self.problem.v_head_dim
        pitch = dim + CHUNK  # so that rows begin in different banks
        memory = T.decl_buffer((W * ROWS * (2 + pitch),), "float32", data=self.memory.data, scope="shared.dyn")
        m_start, l_start, o_start = 0, W * ROWS, 2 * W * ROWS
        for r in range(2):
            slot = let(self.warp * ROWS + self.lane // 4 + 8 * r)
            l = ptx.reduce_quad(softmax.l[r], lambda x, y: x + y)
            with T.If(self.lane % 4 == 0), T.Then():
                store_element(memory, m_start + slot, softmax.maximum(r))
                store_element(memory, l_start + slot, l)
            with unrolled(dim // 8) as column, T.vectorized(2) as x:
                store_element(
                    memory, o_start + slot * pitch + column * 8 + self.lane % 4 * 2 + x, warp.O[column * 4 + r * 2 + x]
                )
        ptx.synchronize()
        with T.serial(-(-ROWS // W)) as n:
            row = let(n * W + self.warp)
            r = let(self.r0 + row)
            with T.If(tirx.all(row < ROWS, r < self.rows)), T.Then():
                b, h, i = self.partial.row_of(self.head, r)
                empty = T.float32(float("-inf")), T.float32(0)
                sink = self.bound.scores.compute_initial_statistics(h)  # which the splits share
                state = merge_partials(
                    (tirx.const(W, "int32"), W),
                    lambda w: (memory[m_start + w * ROWS + row], memory[l_start + w * ROWS + row]),
                    lambda w, d: memory[o_start + (w * ROWS + row) * pitch + d],
                    tuple(tirx.Select(self.has_all_keys, *ends) for ends in zip(sink, empty)),
                    (dim, self.lane),
                )
                with T.If(self.has_all_keys):
                    with T.Then():
                        self.partial.finish((b, h, i), self.lane, state)
                    with T.Else():
                        m, l, O = state
                        index = self.partial.index(self.head, r, self.split)
                        self.partial.store_state_ends(index, m, l)
                        visit_elements(
                            dim, self.lane, lambda n, d: store_element(self.partial.O, index * dim + d, O[n])
                        )
