"""Gradients of attention: FlashAttention-2, backward (Dao, arXiv:2307.08691, Algorithm 2), in CPU registers.

    for each batch and key/value head, in parallel:
        dK = dV = 0                                          [T, D], [T, Dv]
        for each of its query heads, each tile of B_r rows:  Q_i, dY_i, delta = rowsum(dY_i * Y_i)
            for each tile of B_c keys that some row sees:
                S   = Q_i K_j^T,  dP = dY_i V_j^T            [B_r, B_c], stored transposed
                P   = exp(S - lse),  dz = P * (dP - delta)   0 where a key is not visible
                dS  = dz * ds'/ds
                dV_j += P^T dY_i,  dK_j += dS^T Q_i,  dQ_i += dS K_j

S is stored transposed, as in prefill.py. Tables that scores read get their gradients pair by pair. Batches or heads
that share elements of a table run one after the other. An invisible pair has P = dS = 0. If its inputs may not be
finite, such pairs are skipped in the matmuls, as 0 * NaN = NaN.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import tvm
from tvm import tirx
from tvm.ir import Expr
from tvm.script.ir_builder import IRBuilder
from tvm.script.ir_builder import tirx as T

from lowering.attention.codegen.plain_gradient import add_to_table, clear_tables
from lowering.attention.expr.emit import lanes as lanes_of
from lowering.attention.record.gradient import ATTRIBUTE, BoundGradient, GradientParameters, GradientProblem, TableRead

from ...variant import Variant
from ..primitives.vector import (
    LOG2_E,
    Buffer,
    CpuFeatures,
    Register,
    allocate_workspace,
    convert,
    element_type,
    exp2,
    let,
    load,
    of_vectors,
    read_cpu_features,
    reduce_lanes,
    reinterpret,
    splat,
    splat_like,
    store,
    tanh,
    transpose,
)
from .gradient_matmuls import TileMatmuls, whole_vectors
from .gradient_tiles import GradientTiles

_LARGEST_HEAD = 512


def gradient(func: tirx.PrimFunc, target: tvm.target.Target) -> list[Variant] | None:
    """Schedule a function that has a GradientProblem attribute; None for heads that are empty or unreasonably large."""
    if func.attrs is None or ATTRIBUTE not in func.attrs:
        return None
    problem = GradientProblem.from_json(func.attrs[ATTRIBUTE])
    sizes = problem.forward.head_dim, problem.forward.v_head_dim
    if not min(sizes) or max(sizes) > _LARGEST_HEAD:
        return None
    cpu = read_cpu_features(target)
    tiles = {"gradient": GradientTiles.default(problem.forward, cpu)}
    return [Variant("tiled", problem.forward, cpu, tiles, lambda t: gradient_kernel(problem, cpu, t["gradient"]))]


def gradient_kernel(problem: GradientProblem, cpu: CpuFeatures, tiles: GradientTiles) -> tirx.PrimFunc:
    """Return the PrimFunc with the parameters of `build_plain_gradient(problem)`."""
    with IRBuilder() as builder, T.prim_func():
        T.func_name("attention_gradient")
        bound = BoundGradient(GradientParameters(problem, emit_vector_call=of_vectors))
        if problem.tables:
            clear_tables(bound)
        with _tasks(bound) as (b, hk):
            _Head(bound, tiles, cpu, b, hk).emit()
    return builder.get()


@contextmanager
def _tasks(bound: BoundGradient) -> Iterator[tuple[Expr, Expr]]:
    """Emit loops over batches and key/value heads, in parallel unless they add to the same elements of tables."""
    extents = [T.int64(1) * bound.bound.B, T.int64(bound.problem.kv_heads)]
    separate = [bound.gradient.separates(index) for index in "bh"]
    count = [extent if is_separate else T.int64(1) for extent, is_separate in zip(extents, separate)]
    serial = [T.int64(1) if is_separate else extent for extent, is_separate in zip(extents, separate)]
    with T.parallel(count[0] * count[1]) as work, T.serial(serial[0]) as b, T.serial(serial[1]) as hk:
        yield (
            let(work // count[1] if separate[0] else b),
            let(work % count[1] if separate[1] else hk),
        )


class _Head:
    """The code for key/value head hk in batch b."""

    def __init__(self, bound: BoundGradient, tiles: GradientTiles, cpu: CpuFeatures, b: Expr, hk: Expr) -> None:
        self.bound, self.tiles, self.cpu, self.b, self.hk = bound, tiles, cpu, b, hk
        self.problem = p = bound.problem
        self.acc = p.acc_dtype
        self.W = W = cpu.lanes(self.acc)
        self.D, self.Dv = p.head_dim, p.v_head_dim
        self.unpacks = p.dtype != self.acc
        rows, keys = (n if self.unpacks else 0 for n in (tiles.q, tiles.kv))
        self.memory = allocate_workspace(
            Qt=(self.D * tiles.q, self.acc),  # scale Q_i^T by panels: [panel][d][row]
            dYt=(self.Dv * tiles.q, self.acc),
            P=(tiles.kv * tiles.q, self.acc),  # [key][row]
            dS=(tiles.kv * tiles.q, self.acc),
            S=(bool(bound.reads) * tiles.kv * tiles.q, self.acc),
            dz=(bool(bound.reads) * tiles.kv * tiles.q, self.acc),
            dQ=(tiles.q * self.D, self.acc),
            lse=(tiles.q, self.acc),  # in powers of two; infinity if no key is visible, or the row does not exist
            delta=(tiles.q, self.acc),
            q=(rows * self.D, self.acc),
            dy=(rows * self.Dv, self.acc),
            k=(keys * self.D, self.acc),
            v=(keys * self.Dv, self.acc),
        )
        self.panel = tiles.qk_vectors * W
        self.matmul = TileMatmuls(tiles, W, self.acc, self.operand)

    def emit(self) -> None:
        keys, zero = T.int64(1) * self.bound.bound.T, tirx.const(0, self.acc)
        with T.serial(keys) as j:
            for name, size in (("dk", self.D), ("dv", self.Dv)):
                with T.serial(size) as d:
                    T.buffer_store(self.bound.buffers[name], zero, [self.b, self.hk, j, d])
        count = let(tirx.ceildiv(T.int64(1) * self.bound.bound.S, T.int64(self.tiles.q)))
        with T.serial(self.problem.group) as g, T.serial(count) as tile:
            self.h, self.i0 = let(self.hk * self.problem.group + g), let(tile * self.tiles.q)
            self.here = let(tirx.min(T.int64(self.tiles.q), self.bound.bound.S - self.i0))
            self.panels = let(tirx.ceildiv(self.here, self.panel))
            self.open_rows()
            with T.serial(tirx.ceildiv(keys, T.int64(self.tiles.kv))) as block:
                self.j0 = let(block * self.tiles.kv)
                self.keys = let(tirx.min(T.int64(self.tiles.kv), keys - self.j0))
                self.key_tile()
            self.store_rows()

    # Rows.

    def open_rows(self) -> None:
        """Load and transpose the tile's rows; rows past the end repeat the last one, with P = 0."""
        W, scale = self.W, self.bound.bound.scores.scale
        with T.serial(self.here) as r:
            total = Register(tirx.const(0, self.acc))
            with T.serial(self.Dv) as d:
                dy, y = (self.element(name, r, d) for name in ("dy", "y"))
                total.value += dy * y
            T.buffer_store(self.memory["delta"], total.value, [r])
            lse = self.bound.buffers["lse"][self.b, self.h, self.i0 + r]
            is_empty = tirx.EQ(lse, tirx.const(float("-inf"), self.acc))
            infinity = tirx.const(float("inf"), self.acc)
            T.buffer_store(self.memory["lse"], tirx.Select(is_empty, infinity, lse * LOG2_E), [r])
        with T.serial(self.tiles.q - self.here) as n:
            T.buffer_store(self.memory["lse"], tirx.const(float("inf"), self.acc), [self.here + n])
            T.buffer_store(self.memory["delta"], tirx.const(0, self.acc), [self.here + n])
        with T.serial(self.tiles.q * self.D) as n:
            T.buffer_store(self.memory["dQ"], tirx.const(0, self.acc), [n])
        for name, panels, size in (("q", "Qt", self.D), ("dy", "dYt", self.Dv)):
            if self.unpacks:
                self.unpack(name, size, self.here)
            factor = splat_like(scale, splat(0.0, W, self.acc)) if name == "q" else None
            self.transpose_rows(name, self.memory[panels], size, factor)
        self.finite_rows = self.all_finite(("q", self.D), ("dy", self.Dv), self.here)

    def transpose_rows(self, name: str, into: Buffer, size: int, factor: Expr | None) -> None:
        w = min(self.W, whole_vectors(size, self.W))
        with T.serial(self.panels * (self.panel // w)) as block, T.serial(size // w) as n:
            rows = []
            for lane in range(w):
                row = let(tirx.min(block * w + lane, self.here - 1))
                x = self.row_vector(name, row, n * w, w)
                rows.append(let(x if factor is None else x * splat_like(self.bound.bound.scores.scale, x)))
            column = let(block * w // self.panel * (size * self.panel) + block * w % self.panel)
            for lane, x in enumerate(transpose(rows)):
                store(into, x, column + (n * w + lane) * self.panel)

    def store_rows(self) -> None:
        """Store dQ_i, after applying the scale."""
        w = whole_vectors(self.D, self.W)
        with T.serial(self.here) as r, T.serial(self.D // w) as n:
            x = load(self.memory["dQ"], w, r * self.D + n * w)
            store(
                self.bound.buffers["dq"],
                x * splat_like(self.bound.bound.scores.scale, x),
                self.b,
                self.h,
                self.i0 + r,
                n * w,
            )

    # Operands.

    def row_index(self, name: str, row: Expr) -> list[Expr]:
        if name in ("k", "v"):
            return [self.b, self.hk, self.j0 + row]
        return [self.b, self.h, self.i0 + row]

    def row_vector(self, name: str, row: Expr, d: Expr, w: int) -> Expr:
        """Load elements [d, d + w) of a row of q or dy, or of a key or value, of the tile, in place."""
        return convert(load(self.bound.buffers[name], w, *self.row_index(name, row), d), self.acc, self.cpu)

    def element(self, name: str, row: Expr, d: Expr) -> Expr:
        return self.row_vector(name, row, d, 1)

    def unpack(self, name: str, size: int, rows: Expr) -> None:
        w = whole_vectors(size, self.W)
        with T.serial(rows) as r, T.serial(size // w) as n:
            store(self.memory[name], self.row_vector(name, r, n * w, w), r * size + n * w)

    def operand(self, name: str, size: int, row: Expr, d: Expr, w: int) -> Expr:
        """Load elements of a row of a tile, unpacked or in place."""
        if self.unpacks:
            return load(self.memory[name], w, row * size + d)
        return load(self.bound.buffers[name], w, *self.row_index(name, row), d)

    def all_finite(self, first: tuple[str, int], second: tuple[str, int], rows: Expr) -> Expr:
        """Return whether rows of two operands are all finite, as 1 or 0; always 1 if every pair is visible."""
        if not self.bound.bound.scores.has_mask:
            return tirx.const(1, "int32")
        integer, infinity = {"float32": ("int32", 0x7F800000), "float64": ("int64", 0x7FF0000000000000)}[self.acc]
        finite = tirx.const(1, "int32")
        for name, size in (first, second):
            w = whole_vectors(size, self.W)
            largest = Register(splat(0, w, integer))
            with T.serial(rows) as r, T.serial(size // w) as n:
                bits = reinterpret(self.operand(name, size, r, n * w, w), integer)
                magnitude = T.bind(
                    T.bitwise_and(bits, splat_like(2 ** (32 if integer == "int32" else 64) // 2 - 1, bits))
                )
                largest.value = T.max(largest.value, magnitude)
            below = reduce_lanes(largest.value, lambda x, y: T.max(x, y)) < tirx.const(infinity, integer)
            finite = let(tirx.Select(below, finite, tirx.const(0, "int32")))
        return finite

    # A tile of keys.

    def key_tile(self) -> None:
        """Attend a tile of keys, unless no row sees it; without mask code if every row sees all of it."""
        scores, whole = self.bound.bound.scores, tirx.EQ(self.here, T.int64(self.tiles.q))
        if not scores.has_mask:
            self.attend(whole)
            return
        rows, keys = (self.i0, self.i0 + self.here - 1), (self.j0, self.j0 + self.keys - 1)
        lowest, highest = scores.emit_mask_bounds(self.b, self.h, 1, rows, keys)
        shown, zero = let(highest), tirx.const(0, self.acc)
        full = let(tirx.all(whole, lowest == zero, shown == zero).astype("int32"))
        with T.If(shown > tirx.const(float("-inf"), self.acc)), T.Then():
            self.attend(full != 0)

    def attend(self, full: Expr) -> None:
        if self.unpacks:
            self.unpack("k", self.D, self.keys)
            self.unpack("v", self.Dv, self.keys)
        with T.If(full):
            with T.Then():
                self.emit_pairs(masked=False)
                self.emit_matmuls(leave_out=False)
            with T.Else():
                self.emit_pairs(masked=True)
                if not self.bound.bound.scores.has_mask:
                    self.emit_matmuls(leave_out=False)
                    return
                finite = self.all_finite(("k", self.D), ("v", self.Dv), self.keys)
                with T.If(tirx.all(finite != 0, self.finite_rows != 0)):
                    with T.Then():
                        self.emit_matmuls(leave_out=False)
                    with T.Else():
                        self.emit_matmuls(leave_out=True)

    def emit_pairs(self, masked: bool) -> None:
        """Emit P and dS, in register tiles of qk_keys x qk_vectors; keys past the end repeat the last, and are not
        read."""
        t = self.tiles
        with T.serial(tirx.ceildiv(self.keys, T.int64(t.qk_keys))) as block, T.serial(self.panels) as panel:
            keys = [let(tirx.min(block * t.qk_keys + n, self.keys - 1)) for n in range(t.qk_keys)]
            positions = [let(block * t.qk_keys + n) for n in range(t.qk_keys)]
            column = [let(panel * self.panel + c * self.W) for c in range(t.qk_vectors)]
            s = self.matmul.transposed("k", self.D, self.memory["Qt"], keys, panel)
            for n, j in enumerate(keys):
                for c, r in enumerate(column):
                    self.store_probability(let(s[n][c].value), r, j, positions[n], masked)
            dp = self.matmul.transposed("v", self.Dv, self.memory["dYt"], keys, panel)
            for n, j in enumerate(keys):
                for c, r in enumerate(column):
                    self.store_score_gradient(let(dp[n][c].value), r, j, positions[n], masked)
        if self.bound.reads:
            self.tables()

    def store_probability(self, s: Expr, r: Expr, j: Expr, key: Expr, masked: bool) -> None:
        """Store P := exp(score - lse), 0 where masked; and temporarily dS := ds'/ds, which is a function of s."""
        offset, pair = key * self.tiles.q + r, self.pair(r, j)
        score = self.bound.bound.scores.apply_score_mod(s, *pair, tanh=tanh)
        p = exp2(let(score) * splat_like(LOG2_E, s) - load(self.memory["lse"], self.W, r))
        if masked:
            p = let(self.where_visible(p, r, j))
        store(self.memory["P"], p, offset)
        if self.bound.reads:
            store(self.memory["S"], s, offset)
        if self.bound.has_score_mod:
            slope = self.bound.slope(*pair, s)
            slope = slope.astype(self.acc) if lanes_of(slope) == 1 else convert(slope, self.acc, self.cpu)
            store(self.memory["dS"], slope if lanes_of(slope) > 1 else splat_like(slope, s), offset)

    def store_score_gradient(self, dp: Expr, r: Expr, j: Expr, key: Expr, masked: bool) -> None:
        """Store dz := P (dP - delta), dS := dz ds'/ds; 0 where masked."""
        offset = key * self.tiles.q + r
        dz = let(load(self.memory["P"], self.W, offset) * (dp - load(self.memory["delta"], self.W, r)))
        if masked:
            dz = let(self.where_visible(dz, r, j))
        ds = dz
        if self.bound.has_score_mod:
            ds = let(dz * load(self.memory["dS"], self.W, offset))
            if masked:
                ds = let(self.where_visible(ds, r, j))
        store(self.memory["dS"], ds, offset)
        if self.bound.reads:
            store(self.memory["dz"], dz, offset)

    def pair(self, r: Expr, j: Expr) -> tuple[Expr, Expr, Expr, Expr]:
        """Return (b, h, rows, key) of the vector at row r of the tile."""
        return self.b, self.h, T.ramp(self.i0 + r, 1, self.W), self.j0 + j

    def where_visible(self, x: Expr, r: Expr, j: Expr) -> Expr:
        """Return x, or 0 where a key is not visible, or the row does not exist."""
        b, h, i, key = self.pair(r, j)
        is_visible = i < splat_like(self.bound.bound.S, i)
        if self.bound.bound.scores.has_mask:
            shown = self.bound.bound.scores.is_unmasked(b, h, i, key)
            is_visible = tirx.all(is_visible, shown if lanes_of(shown) > 1 else splat_like(shown, is_visible))
        return tirx.Select(is_visible, x, splat_like(0.0, x))

    def tables(self) -> None:
        """Add the pairs' gradients to the tables; pairs that read the same element are added up first."""
        zero = tirx.const(0, self.acc)
        for read in self.bound.reads:
            if "i" in read.index_names:
                with T.serial(self.keys) as j, T.serial(self.here) as r:
                    self.add_to_table(read, r, j, self.table_gradient(read, r, j, 1))
                continue
            total = Register(zero)
            with T.serial(self.keys) as j:
                by_lane = Register(splat(0.0, self.W, self.acc))
                with T.serial(self.panels * self.tiles.qk_vectors) as n:
                    by_lane.value += self.table_gradient(read, let(n * self.W), j, self.W)
                total.value += reduce_lanes(by_lane.value, lambda x, y: x + y)
                if "j" in read.index_names:
                    self.add_to_table(read, T.int64(0), j, total.value)
                    total.value = zero
            if "j" not in read.index_names:
                self.add_to_table(read, T.int64(0), T.int64(0), total.value)

    def table_gradient(self, read: TableRead, r: Expr, j: Expr, width: int) -> Expr:
        """Return the gradient of `width` rows of pairs for a table; 0 where dz is 0, whatever the derivative is."""
        offset = j * self.tiles.q + r
        rows = T.ramp(self.i0 + r, 1, width) if width > 1 else self.i0 + r
        dz, s = (let(load(self.memory[name], width, offset)) for name in ("dz", "S"))
        derivative = read.derivative(self.b, self.h, rows, self.j0 + j, s)
        derivative = convert(
            derivative if lanes_of(derivative) == width else splat(derivative, width, element_type(derivative)),
            self.acc,
            self.cpu,
        )
        return let(tirx.Select(dz == splat_like(0.0, dz), splat_like(0.0, dz), dz * derivative))

    def add_to_table(self, read: TableRead, r: Expr, j: Expr, value: Expr) -> None:
        s = self.memory["S"][j * self.tiles.q + r]
        add_to_table(self.bound, read, (self.b, self.h, self.i0 + r, self.j0 + j), s, value)

    # Accumulation over rows, and over keys.

    def emit_matmuls(self, leave_out: bool) -> None:
        """Emit dV_j, dK_j and dQ_i, to which the pairs of this tile add."""
        scale, keys = self.bound.bound.scores.scale, (self.b, self.hk, self.j0)
        by_key = self.memory["P"], self.tiles.q, 1
        self.matmul.add(by_key, ("dy", self.Dv), self.bound.buffers["dv"], keys, (self.keys, self.here), leave_out)
        by_key = self.memory["dS"], self.tiles.q, 1
        dk = self.bound.buffers["dk"]
        self.matmul.add(by_key, ("q", self.D), dk, keys, (self.keys, self.here), leave_out, scale)
        by_row = self.memory["dS"], 1, self.tiles.q
        self.matmul.add(by_row, ("k", self.D), self.memory["dQ"], None, (self.here, self.keys), leave_out)
