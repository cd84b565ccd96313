"""Gather a KV cache: copy the keys and values of all sequences, dequantized, to ragged arrays.

It serves operators that need the rows themselves, such as OpenPPL's and StreamingLLM's.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from tvm import tirx
from tvm.script.ir_builder import IRBuilder
from tvm.script.ir_builder import tirx as T

from ..tensorir.regions import full_region
from .codegen.addressing import Addressing
from .codegen.parameters import SymbolicSizes, declare_buffer, describe_cache_tables, describe_cache_tensors
from .codegen.slots import clamp
from .expr.emit import cast
from .record.problem import AttentionProblem

_ROW_PARAMETERS = ("q", "mask", "row_starts", "most_rows", "most_keys", "free_batches")

_SKIP_PARAMETERS = ("sink_keys", "skips")


def list_gather_inputs(problem: AttentionProblem, skipping: bool = False) -> tuple[str, ...]:
    """Return the names of the parameters: those that locate keys and values, lengths, key_starts, and skipped keys."""
    names = [name for name in problem.inputs() if name not in (*_ROW_PARAMETERS, "key_starts", *_SKIP_PARAMETERS)]
    return (*names, "key_starts", *(_SKIP_PARAMETERS if skipping else ()))


def build_gather(problem: AttentionProblem, repeat: int = 1, skipping: bool = False) -> tirx.PrimFunc:
    """Build PrimFunc (*list_gather_inputs, keys, values), which reads the keys and values of all batches.

    Batch b has lengths[b] rows of keys [rows, Hkv * repeat, D] and of values from row key_starts[b] on. Each head is
    repeated `repeat` times, in the type of Q. Rows of no batch are not written. With skipping, skips[b] keys after the
    first sink_keys[b] are left out, those that StreamingLLM evicted.
    """
    p = problem
    with IRBuilder() as builder, T.prim_func(s_tir=True, private=True):
        T.func_name("gather")
        T.func_attr({"tirx.noalias": True, "op_pattern": 8})
        names = list_gather_inputs(p, skipping)
        arguments = {name: T.arg(name, T.handle()) for name in (*names, "keys", "values")}
        size = SymbolicSizes()
        batches = size("B") if p.batch is None else p.batch
        dims, heads = (p.head_dim, p.v_head_dim), p.kv_heads * repeat
        shapes = describe_cache_tensors(p.layout, p.kv_heads, dims, (p.dtype, p.v_dtype), batches, size("T"), size)
        shapes |= describe_cache_tables(p.layout, batches, size)
        shapes |= dict.fromkeys(("lengths", "key_starts", *_SKIP_PARAMETERS), ([batches], "int64"))
        shapes |= {name: ([size("rows"), heads, dim], p.dtype) for name, dim in zip(("keys", "values"), dims)}
        buffers = {name: declare_buffer(name, argument, *shapes[name]) for name, argument in arguments.items()}
        addressing = Addressing(_GatherParameters(p, buffers, batches, 1))
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
class _GatherParameters:
    """The parameters of an attention that `Addressing` needs."""

    problem: AttentionProblem
    buffers: dict[str, tirx.Buffer]
    B: Any
    S: Any
