"""Gather: the keys and values that a cache holds, as packed rows of numbers, one batch behind the other."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from tvm import tirx
from tvm.script.ir_builder import IRBuilder
from tvm.script.ir_builder import tirx as T

from ..tensorir.regions import full_region
from .addressing import Addressing
from .expr.emit import cast
from .parameters import Sizes, matched, store_tables, store_tensors
from .problem import AttentionProblem
from .slots import clamp

_OF_ROWS = ("q", "mask", "row_starts", "most_rows", "most_keys", "free_batches")

_SKIPPING = ("sink_keys", "skips")


def inputs(problem: AttentionProblem, skipping: bool = False) -> tuple[str, ...]:
    """Names of the parameters: those of the problem that say where its keys and values are, with lengths and
    key_starts; and what is skipped."""
    names = [name for name in problem.inputs() if name not in (*_OF_ROWS, "key_starts", *_SKIPPING)]
    return (*names, "key_starts", *(_SKIPPING if skipping else ()))


def gather(problem: AttentionProblem, repeat: int = 1, skipping: bool = False) -> tirx.PrimFunc:
    """PrimFunc (*inputs, keys, values): the keys [rows, Hkv * repeat, D] and values of all batches, lengths[b] of batch
    b from row key_starts[b] on, each head so many times, in the type of Q. Rows of no key are not written.

    With skipping skips[b] keys are left out, behind the first sink_keys[b].
    """
    p = problem
    with IRBuilder() as builder, T.prim_func(s_tir=True, private=True):
        T.func_name("gather")
        T.func_attr({"tirx.noalias": True, "op_pattern": 8})
        names = inputs(p, skipping)
        arguments = {name: T.arg(name, T.handle()) for name in (*names, "keys", "values")}
        size = Sizes()
        batches = size("B") if p.batch is None else p.batch
        dims, heads = (p.head_dim, p.v_head_dim), p.kv_heads * repeat
        shapes = store_tensors(p.layout, p.kv_heads, dims, (p.dtype, p.v_dtype), batches, size("T"), size)
        shapes |= store_tables(p.layout, batches, size)
        shapes |= dict.fromkeys(("lengths", "key_starts", *_SKIPPING), ([batches], "int64"))
        shapes |= {name: ([size("rows"), heads, dim], p.dtype) for name, dim in zip(("keys", "values"), dims)}
        buffers = {name: matched(name, argument, *shapes[name]) for name, argument in arguments.items()}
        addressing = Addressing(_Bound(p, buffers, batches, 1))
        with T.sblock("gather"):
            T.reads([full_region(buffers[name]) for name in names])
            T.writes([full_region(buffers[name]) for name in ("keys", "values")])
            with T.serial(T.int64(1) * batches) as b:
                first, rows = buffers["key_starts"][b], size("rows")
                with T.parallel(clamp(buffers["lengths"][b], T.int64(1) * rows)) as j:
                    n, key = T.bind(first + j), j
                    if skipping:
                        key = T.bind(tirx.Select(j < buffers["sink_keys"][b], j, j + buffers["skips"][b]))
                    with T.If(tirx.all(n >= 0, n < rows)), T.Then():
                        for name, dim, read in zip(("keys", "values"), dims, (addressing.k, addressing.v)):
                            with T.grid(T.int64(heads), T.int64(dim)) as (h, d):
                                value = read(b, h // repeat, key, d)
                                T.buffer_store(buffers[name], cast(value, p.dtype), [n, h, d])
    return builder.get()


@dataclass(frozen=True)
class _Bound:
    """What `Addressing` asks of the parameters of an attention."""

    problem: AttentionProblem
    buffers: dict[str, tirx.Buffer]
    B: Any
    S: Any
