"""KvWrite: new keys and values go to their slots, a thread for each group of elements that share a scale, or for each
element where none do.

    for each batch and share of its new rows, in blocks:
        for each row of the share, for each group of K and of V, in threads:
            the group with bias and rotation, its scale, its codes
"""

from __future__ import annotations

from dataclasses import dataclass

import tvm
from tvm import tirx
from tvm.ir import Expr
from tvm.script.ir_builder import IRBuilder
from tvm.script.ir_builder import tirx as T

from lowering.attention.expr.emit import cast
from lowering.attention.kv_write import ATTRIBUTE, BoundKvWrite, KvWrite, group_code, group_scale, rounded

from ..tiles import Space, Tiles
from ..variant import Variant
from .device import Device, device
from .ptx import let


@dataclass(frozen=True)
class KvWriteTiles(Tiles):
    """Tiles of the KV write."""

    threads: int = 256
    """Per block."""
    shares: int = 32
    """Blocks among which the new rows of a batch are dealt."""

    @classmethod
    def default(cls, problem: KvWrite, device: Device) -> KvWriteTiles:
        return KvWriteTiles()

    @classmethod
    def space(cls, problem: KvWrite, device: Device) -> Space:
        return {"threads": (64, 128, 256, 512), "shares": (1, 8, 32, 128)}

    def rules(self, problem: KvWrite, device: Device) -> dict[str, bool]:
        return {
            f"threads = {self.threads} must be 32 to 1024, by 32": self.threads in range(32, 1025, 32),
            f"shares = {self.shares} must be 1 to 65535": self.shares in range(1, 65536),
        }


def kv_write(func: tirx.PrimFunc, target: tvm.target.Target) -> list[Variant] | None:
    """A KV write (lowering/attention/kv_write.py), in place."""
    if func.attrs is None or ATTRIBUTE not in func.attrs:
        return None
    record, gpu = KvWrite.from_json(str(func.attrs[ATTRIBUTE])), device(target)
    if len(func.params) != len(record.inputs()):
        return None  # the copying form, which donation replaces
    tiles = {"kv_write": KvWriteTiles.default(record, gpu)}
    return [Variant("groups", record, gpu, tiles, lambda tiles: _kernel(record, tiles["kv_write"]))]


def _kernel(record: KvWrite, tiles: KvWriteTiles) -> tirx.PrimFunc:
    with IRBuilder() as builder, T.prim_func(private=True):
        bound = BoundKvWrite(record, copy=False)
        codec = record.layout.codec
        group = codec.group if codec is not None and codec.group else record.layout.packing
        dims = record.dims()
        keys, values = record.heads * record.head_dim // group, record.heads * record.v_head_dim // group
        blocks = tirx.max(T.int64(tiles.shares) * bound.B, T.int64(1))
        with (
            T.launch_thread("blockIdx.x", blocks) as block,
            T.launch_thread("threadIdx.x", tiles.threads) as thread,
        ):
            b, share = (let(x) for x in (block.astype("int64") // tiles.shares, block.astype("int64") % tiles.shares))
            with T.If(b < T.int64(1) * bound.B), T.Then():
                count = let(bound.rows(b))
                steps = tirx.ceildiv(tirx.max(count - share, T.int64(0)), T.int64(tiles.shares))
                rounds = -(-(keys + values) // tiles.threads)
                with T.serial(let(steps)) as step, T.serial(T.int64(rounds)) as turn:
                    i = let(share + step * tiles.shares)
                    unit = let(turn * tiles.threads + thread.astype("int64"))
                    with T.If(bound.stays(b, i)), T.Then():
                        with T.If(unit < keys), T.Then():
                            _Group(bound, b, i, 0, dims[0], group, unit).emit()
                        if values:
                            with T.If(tirx.all(unit >= keys, unit < keys + values)), T.Then():
                                _Group(bound, b, i, 1, dims[1], group, let(unit - keys)).emit()
    return builder.get()


class _Group:
    """The code for one group of keys (part 0) or values (1) of new row i of batch b."""

    def __init__(self, bound: BoundKvWrite, b: Expr, i: Expr, part: int, dim: int, group: int, unit: Expr) -> None:
        self.bound, self.part, self.dim, self.group = bound, part, dim, group
        self.b, self.n = b, let(bound.buffers["row_starts"][b] + i)
        self.t = let(bound.buffers["starts"][b] + i)
        self.h, self.g = let(unit // (dim // group)), let(unit % (dim // group))

    def emit(self) -> None:
        bound, codec = self.bound, self.bound.layout.codec
        with bound.slot(self.part, self.b, self.t) as (buffer, where):

            def put(d: Expr, value: Expr) -> None:
                T.buffer_store(buffer, value, bound.index(where, self.h, d, self.dim))

            if codec is None:
                put(self.g, cast(self.value(self.g), buffer.dtype))
            elif not codec.group:
                at = bound.index(where, self.h, self.g, self.dim // codec.packing)
                T.buffer_store(buffer, bound.coded(self.part, self.h, self.g, self.value), at)
            else:
                scale = self.put_scale(codec.group)
                with T.serial(T.int64(codec.group)) as e:
                    d = let(self.g * codec.group + e)
                    put(d, group_code(rounded(self.value(d) / scale, bound.record.dtype)))

    def put_scale(self, group: int) -> Expr:
        """Stores the group's scale, and gives it."""
        bound = self.bound
        largest = T.alloc_buffer((1,), "float32", scope="local")
        T.buffer_store(largest, tirx.const(0.0, "float32"), [0])
        with T.serial(T.int64(group)) as e:
            T.buffer_store(largest, tirx.max(largest[0], tirx.abs(self.value(let(self.g * group + e)))), [0])
        scale = let(group_scale(largest[0], bound.record.dtype))
        with bound.slot(self.part, self.b, self.t, scale=True) as (scales, where):
            T.buffer_store(
                scales, cast(scale, scales.dtype), bound.index(where, self.h, self.g, self.dim // self.group)
            )
        return scale

    def value(self, d: Expr) -> Expr:
        """Element d of the head, with no more digits than the type of the rows has; a float32 variable."""
        bound, rotary = self.bound, self.bound.record.rotary
        x = bound.element(self.part, self.n, self.h, d)
        if rotary is not None and self.part == 0:
            half = rotary.dim // 2
            pair, second = (d // 2, d % 2 != 0) if rotary.interleaved else (d % half, d >= half)
            pair = let(tirx.Select(d < rotary.dim, pair, T.int64(0)))
            one, other = (bound.element(0, self.n, self.h, place) for place in bound.pair(pair))
            turned = bound.turned(self.n, pair, let(one), let(other))
            x = tirx.Select(d < rotary.dim, tirx.Select(second, turned[1], turned[0]), x)
        return let(rounded(let(x), bound.record.dtype))
