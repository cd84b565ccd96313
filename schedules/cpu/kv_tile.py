"""K_j and V_j: a tile of keys and values of one head, as the kernels of this folder read them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import ExitStack

from tvm import DataType, tirx
from tvm.ir import Expr
from tvm.script.ir_builder import tirx as T

from lowering.attention.addressing import decoded, half_byte
from lowering.attention.bound import Bound
from lowering.attention.problem import AttentionProblem

from .dot_bf16 import LANES, dot, non_zero, shuffled_back, words_of, zip_halves, zip_rows
from .vector import LINE, Buffer, Machine, Register, convert, cover, let, like, load, prefetch, splat, store


def load_query(bound: Bound, cpu: Machine, place: tuple[Expr, Expr, Expr], d: Expr | int, lanes: int) -> Expr:
    """Elements [d, d + lanes) of q at (b, h, i), in the type of the arithmetic."""
    buffer, indices = bound.addressing.at("q", *place, T.int64(1) * d)
    return convert(load(buffer, lanes, *indices), bound.problem.acc_dtype, cpu)


def comes_in_pairs(p: AttentionProblem, cpu: Machine, in_place: bool = False) -> bool:
    """Whether tiles, unpacked or read where they lie, are words for matmuls of pairs (dot_bf16.py)."""
    half = {*p.stored_types} == {"bfloat16"} and p.acc_dtype == "float32"
    wide = p.v_head_dim >= LANES and (not in_place or min(p.head_dim, p.v_head_dim) >= 2 * LANES)
    return cpu.bf16_dot and half and p.head_dim % 2 == 0 and wide


def vectors_of_values(p: AttentionProblem, cpu: Machine, in_place: bool) -> tuple[int, list[int]]:
    """(w, starts) of the vectors of a row of V and O: `cover`, in twos where words are read in place."""
    W = cpu.lanes(p.acc_dtype)
    if not (in_place and comes_in_pairs(p, cpu, in_place)):
        return cover(p.v_head_dim, W)
    return W, [start + half for start in cover(p.v_head_dim, 2 * W)[1] for half in (0, W)]


class KeyValueTile:
    """Rows [start, end) of K and V of key/value head hk in batch b, in the type of the arithmetic.

    float32 (float64) is read where it lies. Anything else is unpacked into scratch tiles of `size` rows, once per tile:
    `scratch` says how large they are. With size = 0 it is read where it lies too, and widened at each use. Rows are
    counted from the start of the tile. A row of V consists of `vectors` vectors of Wv lanes, of which the last may
    overlap the one before.

    Where it takes tables to find a key, the tile keeps the offsets of its `most` rows. Codes are multiplied by their
    scales; one that is all K's, or all V's, is a `factor` of scores, or of O, which the kernel applies.

    On machines with matmuls of bfloat16 pairs (`pairs`), tiles hold words: K pairs of neighbors in a row, V pairs of
    neighboring rows. Then d counts words of a key, and j pairs of values. Words of V that are made at each use
    (`zips`) come in an order of their own, which `in_order` undoes in O.
    """

    def __init__(self, bound: Bound, cpu: Machine, size: int, most: int, b: Expr, hk: Expr) -> None:
        self.bound, self.cpu, self.b, self.hk = bound, cpu, b, hk
        self.next: tuple[Expr, Expr, Expr] | None = None
        p = bound.problem
        W = cpu.lanes(p.acc_dtype)
        self.pairs = comes_in_pairs(p, cpu, in_place=size == 0)
        self.zips = self.pairs and size == 0
        self.D = p.head_dim // 2 if self.pairs else p.head_dim
        self.Wk, self.k_starts = cover(self.D, W)
        self.Wv, self.v_starts = vectors_of_values(p, cpu, in_place=size == 0)
        self.vectors = len(self.v_starts)
        self.unpacks_k, self.unpacks_v = (size > 0 and dtype != p.acc_dtype for dtype in p.stored_types)
        self.by_offset = bound.addressing.looked_up
        self.scratch = {
            "K": (self.unpacks_k * size * self.D, p.acc_dtype),
            "V": (self.unpacks_v * size * self.vectors * self.Wv, p.acc_dtype),
        } | {f"{name}_{which}": (self.by_offset * most, "int64") for name in "kv" for which in ("rows", "next")}

    def open(
        self, start: Expr, end: Expr, memory: dict[str, Buffer], next: tuple[Expr, Expr, Expr] | None = None
    ) -> None:
        """The tile is [start, end) from here on: unpacks what needs it.

        next is (b, hk, start) of the tile that will follow: `prefetch` asks for its rows.
        """
        self.start, self.end, self.next = start, end, next
        self.K, self.V, self.memory = memory["K"], memory["V"], memory
        if self.by_offset:
            self.find("rows", (self.b, self.hk, start))
            if next is not None:
                self.find("next", next)
        if not (self.unpacks_k or self.unpacks_v):
            return
        if self.pairs:
            self.open_pairs()
            return
        with T.serial(end - start) as j:
            for d in self.k_starts if self.unpacks_k else ():
                store(self.K, self.load("k", j, d, self.Wk), j * self.D + d)
            for n, d in enumerate(self.v_starts) if self.unpacks_v else ():
                store(self.V, self.load("v", j, d, self.Wv), (j * self.vectors + n) * self.Wv)

    def find(self, which: str, tile: tuple[Expr, Expr, Expr]) -> None:
        """The offsets of as many rows as this tile has, of the one that starts at (b, hk, key): run by run."""
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
        before = T.int64(0) if run is None else let(start % run)  # keys of the first run that come before the tile
        runs = T.int64(1) if run is None else let((before + count + (run - 1)) // run)
        with T.serial(runs) as n:
            first = let(tirx.max(n * run - before, 0)) if run is not None else T.int64(0)
            stop = let(tirx.min((n + 1) * run - before, count)) if run is not None else count
            for name in "kv":
                _, _, stride = self.bound.addressing.strides(name)
                at, last = offset(name, first), offset(name, stop - 1)
                # Tables may say what is not there; then each place is clamped for itself.
                with T.If(tirx.EQ(last - at, (stop - 1 - first) * stride)):
                    with T.Then(), T.serial(stop - first) as j:
                        T.buffer_store(self.memory[f"{name}_{which}"], at + j * stride, [first + j])
                    with T.Else():
                        one_by_one(name, first, stop)

    def place(self, name: str, j: Expr) -> Expr | None:
        """Where row j of k or v begins, if tables told: for `k` and `v`, computed once."""
        return let(self.memory[f"{name}_rows"][j]) if self.by_offset else None

    def open_pairs(self) -> None:
        """The tile's words. A value behind the last is 0."""
        w, starts = cover(self.D, self.cpu.lanes("float32"))
        with T.serial(self.end - self.start) as j:
            for d in starts:
                store(self.K, words_of(self.raw("k", j, 2 * d, 2 * w)), j * self.D + d)
        with T.serial(tirx.ceildiv(self.end - self.start, 2)) as pair:
            low, high = let(pair * 2), let(tirx.min(pair * 2 + 1, self.end - self.start - 1))
            for n, d in enumerate(self.v_starts):
                words = zip_rows(self.raw("v", low, d, self.Wv), self.raw("v", high, d, self.Wv))
                alone = zip_rows(self.raw("v", low, d, self.Wv), None)
                both = splat(low < high, self.Wv, "bool")
                store(self.V, tirx.Select(both, words, alone), (pair * self.vectors + n) * self.Wv)

    def raw(self, name: str, j: Expr, d: Expr | int, lanes: int, place: Expr | None = None) -> Expr:
        """Elements [d, d + lanes) of row j of k or v, in their own type; of codes that share bytes the bytes."""
        packing = self.bound.addressing.packing
        if self.by_offset:
            place = self.memory[f"{name}_rows"][j] if place is None else place
            buffer, indices = self.bound.addressing.flat(name, place + (d // packing if packing > 1 else d))
            return load(buffer, max(lanes // packing, 1), *indices)
        buffer, indices = self.bound.addressing.at(name, self.b, self.hk, self.start + j, T.int64(1) * d)
        return load(buffer, max(lanes // packing, 1), *indices)

    def decoded(self, raw: Expr, d: Expr | int, lanes: int) -> Expr:
        """The numbers of codes [d, d + lanes) of a row, before their scales; d and lanes are even where two share a
        byte, or it is one lane."""
        acc = self.bound.problem.acc_dtype
        if self.bound.addressing.packing == 1:
            return decoded(raw, acc)
        if lanes == 1:
            return half_byte(raw, T.int64(1) * d, acc)
        bytes_ = let(raw)
        return half_byte(tirx.Shuffle([bytes_] * 2, [lane // 2 for lane in range(lanes)]), T.ramp(0, 1, lanes), acc)

    def k(self, j: Expr, d: Expr, lanes: int = 1, place: Expr | None = None) -> Expr:
        """Elements [d, d + lanes) of key j."""
        if self.unpacks_k:
            return load(self.K, lanes, j * self.D + d)
        if self.pairs:
            return words_of(self.raw("k", j, d * 2, lanes * 2, place))
        return self.load("k", j, d, lanes, place)

    def v(self, j: Expr, n: int, alone: bool = False, place: Expr | None = None) -> Expr:
        """Vector n of value j, or of a pair of values, of which the second is none if the first is alone."""
        if self.unpacks_v:
            return load(self.V, self.Wv, (j * self.vectors + n) * self.Wv)
        if self.zips:
            rows = (j * 2,) if alone else (j * 2, j * 2 + 1)
            return zip_halves([self.raw("v", row, self.v_starts[n - n % 2], 2 * self.Wv) for row in rows], n % 2)
        return self.load("v", j, self.v_starts[n], self.Wv, place)

    def in_order(self, o: list[Expr]) -> list[Expr]:
        """The vectors of a row of O, each with its elements in the order of memory."""
        if not self.zips:
            return o
        return [x for n in range(0, self.vectors, 2) for x in shuffled_back(o[n], o[n + 1])]

    def load(self, name: str, j: Expr, d: Expr | int, lanes: int, place: Expr | None = None) -> Expr:
        """Elements [d, d + lanes) of row j of k or v, in the type of the arithmetic, but for a `factor`."""
        raw, acc, addressing = self.raw(name, j, d, lanes, place), self.bound.problem.acc_dtype, self.bound.addressing
        if not self.bound.problem.coded:
            return convert(raw, acc, self.cpu)
        if addressing.channels:
            buffer, indices = addressing.channel_scales(name, self.hk, d)
            return let(self.decoded(raw, d, lanes) * convert(load(buffer, lanes, *indices), acc, self.cpu))
        if not addressing.group():
            return let(self.decoded(raw, d, lanes))
        if self.by_offset:
            offset = (self.memory[f"{name}_rows"][j] if place is None else place) + d
        else:
            offset = addressing.offset(name, self.b, self.hk, self.start + j, d)
        matmul, narrow = let(decoded(raw, acc) * self.scale(name, offset, lanes)), addressing.product_type()
        if narrow == acc:
            return matmul
        return convert(let(convert(matmul, narrow, self.cpu)), acc, self.cpu)

    def factor(self, name: str) -> Expr | None:
        """What all of k, or all of v, is to be multiplied by, if there is such a number."""
        factor = self.bound.addressing.factor(name)
        return None if factor is None else let(factor)

    def finished(self, o: Sequence[Expr]) -> list[Expr]:
        """Vectors of O times the factor of v. Where no value has a part, no factor has one."""
        factor = self.factor("v")
        if factor is None:
            return list(o)
        return [let(tirx.Select(x == like(0.0, x), x, x * like(factor, x))) for x in o]

    def scale(self, name: str, offset: Expr, lanes: int) -> Expr:
        """The scales of so many neighbors of one row. A row is whole groups, and so is a vector, or a group is whole
        vectors; else they are read one by one."""
        addressing, acc = self.bound.addressing, self.bound.problem.acc_dtype
        group = addressing.group()
        if group % lanes == 0:
            return splat(addressing.scale(name, offset), lanes, acc)
        if lanes % group:
            each = [addressing.scale(name, offset + lane) for lane in range(lanes)]
            return tirx.Shuffle(each, list(range(lanes)))
        buffer, indices = addressing.scales(name, tirx.floordiv(offset, group))
        some = let(convert(load(buffer, lanes // group, *indices), acc, self.cpu))
        # TVM wants as many lanes as it gets.
        return tirx.Shuffle([some] * group, [lane // group for lane in range(lanes)])

    def prefetch(self, name: str, j: Expr, d: Expr | int) -> None:
        """Asks for the line of element d (or word of a key) of row j of k or v in the next tile, where that is known,
        once for all the vectors in it.

        Hardware follows a stream within a page and loses it where reading turns from K to V.
        """
        if self.next is None:
            return
        self.prefetch_scale(name, j, d)
        b, hk, start = self.next
        words = self.pairs and name == "k"
        line = LINE // DataType(self.bound.problem.stored_types[name == "v"]).itemsize // (2 if words else 1)
        several = (self.Wk if name == "k" else self.Wv) < line
        if several and isinstance(d, int) and d % line:
            return
        with ExitStack() as inside:
            if several and not isinstance(d, int):
                inside.enter_context(T.If(tirx.EQ(d % line, T.int64(0))))
                inside.enter_context(T.Then())
            d = T.int64(2 if words else 1) * d
            if self.by_offset:
                packing = self.bound.addressing.packing
                place = self.memory[f"{name}_next"][j] + (d // packing if packing > 1 else d)
                buffer, indices = self.bound.addressing.flat(name, place)
            else:
                buffer, indices = self.bound.addressing.at(name, b, hk, start + j, d)
            prefetch(buffer, *indices)

    def prefetch_scale(self, name: str, j: Expr, d: Expr | int) -> None:
        """Asks for the line of the scale of such a code, once for all codes whose scales are in it: the scales of a
        page, or of a few tokens, are a line far from any other."""
        p, addressing = self.bound.problem, self.bound.addressing
        if not p.coded or not addressing.group():
            return
        assert self.next is not None
        b, hk, start = self.next
        row = p.head_dim if name == "k" else p.v_head_dim
        memory, _ = addressing.scales(name, T.int64(0))
        codes = LINE // DataType(memory.dtype).itemsize * addressing.group()
        once = tirx.EQ(T.int64(1) * d % min(codes, row), T.int64(0))
        if codes > row:
            once = tirx.all(once, tirx.EQ(T.int64(1) * j % (codes // row), T.int64(0)))
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
        """O = diag(alpha) O + P V for one register tile: these rows and vectors of O, over the first `keys` keys.

        state is (O, alpha), p(row, key) an element of P. leave_out skips pairs with P = 0, whatever V holds.
        """
        O, alpha = state
        acc = self.bound.problem.acc_dtype
        o = []
        for r in rows:
            scale = T.bind(splat(alpha[r], self.Wv, acc))
            o.append([Register(load(O, self.Wv, (r * self.vectors + n) * self.Wv) * scale) for n in columns])

        def add(j: Expr, alone: bool = False) -> None:
            place = self.place("v", j)
            v = [T.bind(self.v(j, n, alone, place)) for n in columns]
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
                add(let(keys // 2), alone=True)
        for k, r in enumerate(rows):
            for n, register in zip(columns, o[k]):
                store(O, register.value, (r * self.vectors + n) * self.Wv)

    def add_matmul(self, total: Expr, weight: Expr, v: Expr, leave_out: bool) -> Expr:
        """total + weight * v, of one key or of the two of a word."""
        if self.pairs:
            return dot(total, weight, non_zero(v, weight) if leave_out else v)
        new = let(total + weight * v)
        return let(tirx.Select(weight == like(0.0, weight), total, new)) if leave_out else new


def store_y(bound: Bound, cpu: Machine, b: Expr, h: Expr, i: Expr, vectors: list[Expr], starts: list[int]) -> None:
    """Y at (b, h, i) := the vectors, rounded to its type."""
    for d, y in zip(starts, vectors):
        buffer, indices = bound.addressing.at("y", b, h, i, T.int64(d))
        store(buffer, convert(y, buffer.dtype, cpu), *indices)
