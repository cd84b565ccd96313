"""K_j and V_j: a tile of keys and values of one head, as the kernels of this folder read them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import ExitStack

from tvm import DataType, tirx
from tvm.ir import Expr
from tvm.script.ir_builder import tirx as T

from lowering.attention.codegen.addressing import convert_quantized, unpack_int4
from lowering.attention.codegen.bound import BoundAttention

from ..matmul.dot_bf16 import (
    dot,
    interleave_halves,
    interleave_rows,
    mask_zero_weights,
    pack_vector,
    restore_order,
)
from ..primitives.vector import (
    LINE,
    Buffer,
    CpuFeatures,
    Register,
    convert,
    cover_row,
    let,
    load,
    prefetch,
    splat,
    splat_like,
    store,
)
from .kv_form import copies_values, cover_values, uses_bf16_pairs

_STREAMS = 4
"""Ranges of rows of the next tile that are prefetched in turns. Eight are slower: they are shorter than a page."""


def load_query(
    bound: BoundAttention, cpu: CpuFeatures, position: tuple[Expr, Expr, Expr], d: Expr | int, lanes: int
) -> Expr:
    """Load elements [d, d + lanes) of q at (b, h, i), in the accumulator type."""
    buffer, indices = bound.addressing.at("q", *position, T.int64(1) * d)
    return convert(load(buffer, lanes, *indices), bound.problem.acc_dtype, cpu)


class KeyValueTile:
    """Rows [start, end) of K and V of key/value head hk in batch b, in the accumulator type.

    float32 (float64) is read in place, unless `copies_values`. Other types are unpacked into scratch tiles of `size`
    rows, once per tile; `scratch` holds their sizes. With size = 0 they are read in place too, and widened at each use.
    Rows are counted from the start of the tile. A row of V consists of `vectors` vectors of Wv lanes, of which the last
    may overlap the previous one.

    If finding a key takes tables, the tile stores the offsets of its `max_rows` rows. Quantized values are multiplied
    by their scales. A scale common to all of K, or of V, is a `factor` of scores, or of O, which the kernel applies.

    On machines with bfloat16 pair matmuls (`pairs`), tiles hold packed lanes: K pairs of neighbors in a row, V pairs of
    neighboring rows. Then d counts packed lanes of a key, and j pairs of values. Packed lanes of V that are built at
    each use (`zips`) come in a shuffled order, which `restore_order` undoes in O.
    """

    def __init__(self, bound: BoundAttention, cpu: CpuFeatures, size: int, max_rows: int, b: Expr, hk: Expr) -> None:
        self.bound, self.cpu, self.b, self.hk = bound, cpu, b, hk
        self.next: tuple[Expr, Expr, Expr] | None = None
        self.rows_per_stream: Expr = T.int64(0)
        p = bound.problem
        W = cpu.lanes(p.acc_dtype)
        self.pairs = uses_bf16_pairs(p, cpu, in_place=size == 0)
        self.zips = self.pairs and size == 0
        self.D = p.head_dim // 2 if self.pairs else p.head_dim
        self.Wk, self.k_starts = cover_row(self.D, W)
        self.Wv, self.v_starts = cover_values(p, cpu, in_place=size == 0)
        self.vectors = len(self.v_starts)
        self.unpacks_k, self.unpacks_v = (size > 0 and dtype != p.acc_dtype for dtype in p.stored_types)
        self.unpacks_v = self.unpacks_v or (size > 0 and copies_values(bound, cpu))
        self.by_offset = bound.addressing.has_lookup
        self.scratch = {
            "K": (self.unpacks_k * size * self.D, p.acc_dtype),
            "V": (self.unpacks_v * size * self.vectors * self.Wv, p.acc_dtype),
        } | {f"{name}_{which}": (self.by_offset * max_rows, "int64") for name in "kv" for which in ("rows", "next")}

    def open(
        self, start: Expr, end: Expr, memory: dict[str, Buffer], next: tuple[Expr, Expr, Expr] | None = None
    ) -> None:
        """Set the tile to [start, end), and unpack the types that need it.

        next is (b, hk, start) of the following tile, whose rows `prefetch` fetches.
        """
        self.start, self.end, self.next = start, end, next
        if next is not None:
            self.rows_per_stream = let((end - start) // _STREAMS)
        self.K, self.V, self.memory = memory["K"], memory["V"], memory
        if self.by_offset:
            self.compute_offsets("rows", (self.b, self.hk, start))
            if next is not None:
                self.compute_offsets("next", next)
        if not (self.unpacks_k or self.unpacks_v):
            return
        if self.pairs:
            self.unpack_pairs()
            return
        with T.serial(end - start) as j:
            for d in self.k_starts if self.unpacks_k else ():
                store(self.K, self.load("k", j, d, self.Wk), j * self.D + d)
            for n, d in enumerate(self.v_starts) if self.unpacks_v else ():
                store(self.V, self.load("v", j, d, self.Wv), (j * self.vectors + n) * self.Wv)

    def compute_offsets(self, which: str, tile: tuple[Expr, Expr, Expr]) -> None:
        """Compute, run by run, the offsets of as many rows as this tile has, from (b, hk, start) on."""
        b, hk, start = tile
        count, run = let((self.end - self.start).astype("int64")), self.bound.addressing.run("k")

        def offset(name: str, j: Expr) -> Expr:
            return let(self.bound.addressing.offset(name, b, hk, let(start + j)))

        def one_by_one(name: str, first: Expr, stop: Expr) -> None:
            with T.serial(stop - first) as n:
                T.buffer_store(self.memory[f"{name}_{which}"], offset(name, let(first + n)), [first + n])

        if run == 1:
            for name in "kv":
                one_by_one(name, T.int64(0), count)
            return
        skipped = T.int64(0) if run is None else let(start % run)  # keys of the first run before the tile
        runs = T.int64(1) if run is None else let((skipped + count + (run - 1)) // run)
        with T.serial(runs) as n:
            first = let(tirx.max(n * run - skipped, 0)) if run is not None else T.int64(0)
            stop = let(tirx.min((n + 1) * run - skipped, count)) if run is not None else count
            for name in "kv":
                _, _, stride = self.bound.addressing.strides(name)
                base, last = offset(name, first), offset(name, stop - 1)
                # If tables name rows that do not exist, each offset is clamped individually.
                with T.If(tirx.EQ(last - base, (stop - 1 - first) * stride)):
                    with T.Then(), T.serial(stop - first) as j:
                        T.buffer_store(self.memory[f"{name}_{which}"], base + j * stride, [first + j])
                    with T.Else():
                        one_by_one(name, first, stop)

    def row_offset(self, name: str, j: Expr) -> Expr | None:
        """Return the offset of row j of k or v if it comes from tables: for `k` and `v`, to compute it once."""
        return let(self.memory[f"{name}_rows"][j]) if self.by_offset else None

    def unpack_pairs(self) -> None:
        """Unpack the tile's packed lanes. A missing value after the last one is 0."""
        w, starts = cover_row(self.D, self.cpu.lanes("float32"))
        with T.serial(self.end - self.start) as j:
            for d in starts:
                store(self.K, pack_vector(self.load_raw("k", j, 2 * d, 2 * w)), j * self.D + d)
        with T.serial(tirx.ceildiv(self.end - self.start, 2)) as pair:
            low, high = let(pair * 2), let(tirx.min(pair * 2 + 1, self.end - self.start - 1))
            for n, d in enumerate(self.v_starts):
                full = interleave_rows(self.load_raw("v", low, d, self.Wv), self.load_raw("v", high, d, self.Wv))
                half_filled = interleave_rows(self.load_raw("v", low, d, self.Wv), None)
                is_full = splat(low < high, self.Wv, "bool")
                store(self.V, tirx.Select(is_full, full, half_filled), (pair * self.vectors + n) * self.Wv)

    def load_raw(self, name: str, j: Expr, d: Expr | int, lanes: int, row_offset: Expr | None = None) -> Expr:
        """Load elements [d, d + lanes) of row j of k or v, in their storage type; bytes if values share bytes."""
        packing = self.bound.addressing.packing
        if self.by_offset:
            row_offset = self.memory[f"{name}_rows"][j] if row_offset is None else row_offset
            buffer, indices = self.bound.addressing.flat(name, row_offset + (d // packing if packing > 1 else d))
            return load(buffer, max(lanes // packing, 1), *indices)
        buffer, indices = self.bound.addressing.at(name, self.b, self.hk, self.start + j, T.int64(1) * d)
        return load(buffer, max(lanes // packing, 1), *indices)

    def dequantize(self, raw: Expr, d: Expr | int, lanes: int) -> Expr:
        """Dequantize values [d, d + lanes) of a row, except for their scales.

        If two values share a byte, d and lanes are even, or there is one lane.
        """
        acc = self.bound.problem.acc_dtype
        if self.bound.addressing.packing == 1:
            return convert_quantized(raw, acc)
        if lanes == 1:
            return unpack_int4(raw, T.int64(1) * d, acc)
        bytes_ = let(raw)
        return unpack_int4(tirx.Shuffle([bytes_] * 2, [lane // 2 for lane in range(lanes)]), T.ramp(0, 1, lanes), acc)

    def k(self, j: Expr, d: Expr, lanes: int = 1, row_offset: Expr | None = None) -> Expr:
        """Load elements [d, d + lanes) of key j."""
        if self.unpacks_k:
            return load(self.K, lanes, j * self.D + d)
        if self.pairs:
            return pack_vector(self.load_raw("k", j, d * 2, lanes * 2, row_offset))
        return self.load("k", j, d, lanes, row_offset)

    def v(self, j: Expr, n: int, is_half: bool = False, row_offset: Expr | None = None) -> Expr:
        """Load vector n of value j, or of a pair of values; is_half: the pair has only its first value."""
        if self.unpacks_v:
            return load(self.V, self.Wv, (j * self.vectors + n) * self.Wv)
        if self.zips:
            rows = (j * 2,) if is_half else (j * 2, j * 2 + 1)
            return interleave_halves(
                [self.load_raw("v", row, self.v_starts[n - n % 2], 2 * self.Wv) for row in rows], n % 2
            )
        return self.load("v", j, self.v_starts[n], self.Wv, row_offset)

    def restore_order(self, o: list[Expr]) -> list[Expr]:
        """Return the vectors of a row of O, each with its elements in memory order."""
        if not self.zips:
            return o
        return [x for n in range(0, self.vectors, 2) for x in restore_order(o[n], o[n + 1])]

    def load(self, name: str, j: Expr, d: Expr | int, lanes: int, row_offset: Expr | None = None) -> Expr:
        """Load elements [d, d + lanes) of row j of k or v, in the accumulator type, without a `factor`."""
        raw, acc, addressing = (
            self.load_raw(name, j, d, lanes, row_offset),
            self.bound.problem.acc_dtype,
            self.bound.addressing,
        )
        if not self.bound.problem.is_quantized:
            return convert(raw, acc, self.cpu)
        if addressing.channels:
            buffer, indices = addressing.channel_scales(name, self.hk, d)
            return let(self.dequantize(raw, d, lanes) * convert(load(buffer, lanes, *indices), acc, self.cpu))
        if not addressing.group():
            return let(self.dequantize(raw, d, lanes))
        if self.by_offset:
            offset = (self.memory[f"{name}_rows"][j] if row_offset is None else row_offset) + d
        else:
            offset = addressing.offset(name, self.b, self.hk, self.start + j, d)
        scaled, narrow = let(convert_quantized(raw, acc) * self.scale(name, offset, lanes)), addressing.scaled_dtype()
        if narrow == acc:
            return scaled
        return convert(let(convert(scaled, narrow, self.cpu)), acc, self.cpu)

    def tensor_scale(self, name: str) -> Expr | None:
        """Return the common scale of k or of v, if there is one."""
        factor = self.bound.addressing.tensor_scale(name)
        return None if factor is None else let(factor)

    def apply_factor(self, o: Sequence[Expr]) -> list[Expr]:
        """Multiply vectors of O by the factor of v. An O of 0, without any value, does not depend on the factor."""
        factor = self.tensor_scale("v")
        if factor is None:
            return list(o)
        return [let(tirx.Select(x == splat_like(0.0, x), x, x * splat_like(factor, x))) for x in o]

    def scale(self, name: str, offset: Expr, lanes: int) -> Expr:
        """Load the scales of `lanes` neighbors of one row.

        A row consists of whole groups. A vector consists of whole groups, or a group of whole vectors; otherwise the
        scales are loaded one by one.
        """
        addressing, acc = self.bound.addressing, self.bound.problem.acc_dtype
        group = addressing.group()
        if group % lanes == 0:
            return splat(addressing.scale(name, offset), lanes, acc)
        if lanes % group:
            lane_scales = [addressing.scale(name, offset + lane) for lane in range(lanes)]
            return tirx.Shuffle(lane_scales, list(range(lanes)))
        buffer, indices = addressing.scales(name, tirx.floordiv(offset, group))
        group_scales = let(convert(load(buffer, lanes // group, *indices), acc, self.cpu))
        # TVM requires as many result lanes as operand lanes.
        return tirx.Shuffle([group_scales] * group, [lane // group for lane in range(lanes)])

    def prefetch(self, name: str, j: Expr, d: Expr | int) -> None:
        """Prefetch the line of element d (or packed lane of a key) of row j of k or v in the next tile, if it is set.

        One prefetch serves all the vectors in a line. The hardware prefetcher follows a stream within a page and loses
        it where reading switches from K to V. Rows take turns among parts of the tile, since a core has more reads in
        flight from several pages.
        """
        if self.next is None:
            return
        count = self.rows_per_stream
        j = let(tirx.Select(j < count * _STREAMS, j % _STREAMS * count + j // _STREAMS, T.int64(1) * j))
        self.prefetch_scale(name, j, d)
        b, hk, start = self.next
        is_packed = self.pairs and name == "k"
        line = LINE // DataType(self.bound.problem.stored_types[name == "v"]).itemsize // (2 if is_packed else 1)
        has_several_vectors = (self.Wk if name == "k" else self.Wv) < line
        if has_several_vectors and isinstance(d, int) and d % line:
            return
        with ExitStack() as inside:
            if has_several_vectors and not isinstance(d, int):
                inside.enter_context(T.If(tirx.EQ(d % line, T.int64(0))))
                inside.enter_context(T.Then())
            d = T.int64(2 if is_packed else 1) * d
            if self.by_offset:
                packing = self.bound.addressing.packing
                position = self.memory[f"{name}_next"][j] + (d // packing if packing > 1 else d)
                buffer, indices = self.bound.addressing.flat(name, position)
            else:
                buffer, indices = self.bound.addressing.at(name, b, hk, start + j, d)
            prefetch(buffer, *indices, level=1)

    def prefetch_scale(self, name: str, j: Expr, d: Expr | int) -> None:
        """Prefetch the line of the scale of such a value, once for all values whose scales are in it.

        The scales of a page, or of a few tokens, are in a line far from any other.
        """
        p, addressing = self.bound.problem, self.bound.addressing
        if not p.is_quantized or not addressing.group():
            return
        assert self.next is not None
        b, hk, start = self.next
        row = p.head_dim if name == "k" else p.v_head_dim
        memory, _ = addressing.scales(name, T.int64(0))
        values = LINE // DataType(memory.dtype).itemsize * addressing.group()
        once = tirx.EQ(T.int64(1) * d % min(values, row), T.int64(0))
        if values > row:
            once = tirx.all(once, tirx.EQ(T.int64(1) * j % (values // row), T.int64(0)))
        with T.If(once), T.Then():
            offset = (
                self.memory[f"{name}_next"][j] + d if self.by_offset else addressing.offset(name, b, hk, start + j, d)
            )
            buffer, indices = addressing.scales(name, tirx.floordiv(offset, addressing.group()))
            prefetch(buffer, *indices)

    def add_pv(
        self,
        rows: Sequence[Expr],
        columns: range,
        keys: Expr | int,
        state: tuple[Buffer, Buffer],
        p: Callable[[Expr, Expr], Expr],
        leave_out: bool,
    ) -> None:
        """Emit O = diag(alpha) O + P V for one register tile: these rows and vectors of O, over the first `keys` keys.

        state is (O, alpha), p(row, key) an element of P. leave_out skips pairs with P = 0, whatever V holds.
        """
        O, alpha = state
        acc = self.bound.problem.acc_dtype
        o = []
        for r in rows:
            scale = T.bind(splat(alpha[r], self.Wv, acc))
            o.append([Register(load(O, self.Wv, (r * self.vectors + n) * self.Wv) * scale) for n in columns])

        def add(j: Expr, is_half: bool = False) -> None:
            row_offset = self.row_offset("v", j)
            v = [T.bind(self.v(j, n, is_half, row_offset)) for n in columns]
            for k, r in enumerate(rows):
                weight = T.bind(splat(p(r, j), self.Wv, acc))
                for n, register in enumerate(o[k]):
                    register.value = self.add_matmul(register.value, weight, v[n], leave_out)

        with T.serial(keys // 2 if self.zips else (keys + 1) // 2 if self.pairs else keys) as j:
            for n in columns:
                self.prefetch("v", j * 2 + n % 2 if self.zips else j, self.v_starts[n - n % 2 if self.zips else n])
            add(j)
        if self.zips:
            with T.If(keys % 2 != 0), T.Then():
                add(let(keys // 2), is_half=True)
        for k, r in enumerate(rows):
            for n, register in zip(columns, o[k]):
                store(O, register.value, (r * self.vectors + n) * self.Wv)

    def add_matmul(self, total: Expr, weight: Expr, v: Expr, leave_out: bool) -> Expr:
        """Return total + weight * v, of one key or of the two of a packed lane."""
        if self.pairs:
            return dot(total, weight, mask_zero_weights(v, weight) if leave_out else v)
        new = let(total + weight * v)
        return let(tirx.Select(weight == splat_like(0.0, weight), total, new)) if leave_out else new


def store_y(
    bound: BoundAttention, cpu: CpuFeatures, b: Expr, h: Expr, i: Expr, vectors: list[Expr], starts: list[int]
) -> None:
    """Store the vectors to Y at (b, h, i), rounded to its type."""
    for d, y in zip(starts, vectors):
        buffer, indices = bound.addressing.at("y", b, h, i, T.int64(d))
        store(buffer, convert(y, buffer.dtype, cpu), *indices)
