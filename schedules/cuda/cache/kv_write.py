"""KvWrite: new keys and values are written to their slots by a thread for each group of elements that share a scale.

Without group scales, a thread writes one element.

    for each batch and share of its new rows, in blocks:
        for each row of the share, for each group of K and of V, in threads:
            the group with bias and rotation, its scale, its quantized values
"""

from __future__ import annotations

from dataclasses import dataclass

import tvm
from tvm import tirx
from tvm.ir import Expr
from tvm.script.ir_builder import IRBuilder
from tvm.script.ir_builder import tirx as T

from lowering.attention.cache_elements import compute_group_scale, quantize_in_group, round_to_dtype
from lowering.attention.expr.emit import cast
from lowering.attention.kv_write import ATTRIBUTE, BoundKvWrite, KvWrite

from ...tiles import Space, Tiles
from ...variant import Variant
from ..primitives.device import Device, device
from ..primitives.ptx import let


@dataclass(frozen=True)
class KvWriteTiles(Tiles):
    """Tiles of the KV write."""

    threads: int = 256
    """Threads per block."""
    shares: int = 32
    """Blocks to which the new rows of a batch are distributed."""

    @classmethod
    def space(cls, problem: KvWrite, device: Device) -> Space:
        return {"threads": (64, 128, 256, 512), "shares": (1, 8, 32, 128)}

    def rules(self, problem: KvWrite, device: Device) -> dict[str, bool]:
        return {
            f"threads = {self.threads} must be 32 to 1024, by 32": self.threads in range(32, 1025, 32),
            f"shares = {self.shares} must be 1 to 65535": self.shares in range(1, 65536),
        }


def kv_write(func: tirx.PrimFunc, target: tvm.target.Target) -> list[Variant] | None:
    """Return the variant for a KV write (lowering/attention/kv_write.py) in place; None for anything else."""
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
        quantization = record.quantization
        group = 1 if quantization is None else quantization.group or quantization.packing
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
                with T.serial(let(steps)) as step, T.serial(T.int64(rounds)) as iteration:
                    i = let(share + step * tiles.shares)
                    unit = let(iteration * tiles.threads + thread.astype("int64"))
                    with T.If(bound.is_last_in_slot(b, i)), T.Then():
                        with T.If(unit < keys), T.Then():
                            _Group(bound, b, i, 0, dims[0], group, unit).emit()
                        if values:
                            with T.If(tirx.all(unit >= keys, unit < keys + values)), T.Then():
                                _Group(bound, b, i, 1, dims[1], group, let(unit - keys)).emit()
    return builder.get()


class _Group:
    """The code for one group of keys (kind 0) or values (kind 1) of new row i of batch b."""

    def __init__(self, bound: BoundKvWrite, b: Expr, i: Expr, kind: int, dim: int, group: int, unit: Expr) -> None:
        self.bound, self.kind, self.dim, self.group = bound, kind, dim, group
        self.b, self.n = b, let(bound.buffers["row_starts"][b] + i)
        self.t = let(bound.key(b, i))
        self.h, self.g = let(unit // (dim // group)), let(unit % (dim // group))

    def emit(self) -> None:
        bound, quantization = self.bound, self.bound.record.quantization
        with bound.slot(self.kind, self.b, self.t) as (buffer, where):

            def store(d: Expr, value: Expr) -> None:
                T.buffer_store(buffer, value, bound.index(where, self.h, d, self.dim))

            if quantization is None:
                store(self.g, cast(self.value(self.g), buffer.dtype))
            elif not quantization.group:
                at = bound.index(where, self.h, self.g, self.dim // quantization.packing)
                T.buffer_store(buffer, bound.quantize_element(self.kind, self.h, self.g, self.value), at)
            else:
                scale = self.store_scale(quantization.group)
                with T.serial(T.int64(quantization.group)) as e:
                    d = let(self.g * quantization.group + e)
                    store(d, quantize_in_group(round_to_dtype(self.value(d) / scale, bound.record.dtype)))

    def store_scale(self, group: int) -> Expr:
        """Store the group's scale, and return it."""
        bound = self.bound
        largest = T.alloc_buffer((1,), "float32", scope="local")
        T.buffer_store(largest, tirx.const(0.0, "float32"), [0])
        with T.serial(T.int64(group)) as e:
            T.buffer_store(largest, tirx.max(largest[0], tirx.abs(self.value(let(self.g * group + e)))), [0])
        scale = let(compute_group_scale(largest[0], bound.record.dtype))
        with bound.slot(self.kind, self.b, self.t, scale=True) as (scales, where):
            T.buffer_store(
                scales, cast(scale, scales.dtype), bound.index(where, self.h, self.g, self.dim // self.group)
            )
        return scale

    def value(self, d: Expr) -> Expr:
        """Return element d of the head, rounded to the type of the rows, as a float32 variable."""
        bound, rotary = self.bound, self.bound.record.rotary
        x = bound.element(self.kind, self.n, self.h, d)
        if rotary is not None and self.kind == 0:
            half = rotary.dim // 2
            pair, is_second = (d // 2, d % 2 != 0) if rotary.interleaved else (d % half, d >= half)
            pair = let(tirx.Select(d < rotary.dim, pair, T.int64(0)))
            first, second = (bound.element(0, self.n, self.h, index) for index in bound.pair(pair))
            rotated = bound.rotate_pair(self.n, pair, let(first), let(second))
            x = tirx.Select(d < rotary.dim, tirx.Select(is_second, rotated[1], rotated[0]), x)
        return let(round_to_dtype(let(x), bound.record.dtype))
