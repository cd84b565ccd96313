"""The cost of the KV cache for the kernels: pages, offsets and quantization compared with a dense cache.

No model is compiled: kernels are those of the CPU rule for a record, called with arrays of their own. Every
answer is compared with float64 before it is timed.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import tvm
import tvm_ffi
from rich.console import Console
from rich.table import Table

import schedules
from lowering.attention.codegen.plain import build_plain_attention
from lowering.attention.record.cache_layout import CacheLayout, KvQuantization, Offset, Pages
from lowering.attention.record.problem import AttentionProblem, Window
from lowering.attention.reference import compute_reference
from lowering.errors import LoweringError
from lowering.target import resolve

from .cases.case import error
from .in_process import provide
from .timing import Timing, interleaved, timed

HEADS, DIM, PAGE, LAYERS = 32, 128, 16, 4
TOLERANCE = 1e-5
CAUSAL = Window(right=0, offset="lengths")


@dataclass(frozen=True)
class Call:
    """A record, and the rows and keys of each batch of one call of it."""

    problem: AttentionProblem
    rows: tuple[int, ...]
    keys: tuple[int, ...]


@dataclass(frozen=True)
class Comparison:
    """Calls that are timed in turns. The first is what the others are compared with, all calls of a contender together;
    bars are the ratios of times that they should reach."""

    name: str
    contenders: dict[str, tuple[Call, ...]]
    bars: dict[str, float]


def comparisons() -> list[Comparison]:
    all_comparisons = []
    for kv_heads, keys in ((32, 1024), (32, 4096), (8, 1024), (8, 4096), (8, 16384)):
        stores = {
            "dense": CacheLayout(),
            "offsets": CacheLayout("thd", Offset()),
            f"pages of {PAGE}": CacheLayout("phtd", Pages(PAGE)),
            "pages of 128": CacheLayout("phtd", Pages(128)),
            "int8, a scale": CacheLayout("bhtd", quantization=KvQuantization("int8", 0)),
            "int8, scales of 8": CacheLayout("bhtd", quantization=KvQuantization("int8", 8)),
            "int8, a scale a token": CacheLayout("bhtd", quantization=KvQuantization("int8", DIM)),
            f"the same in pages of {PAGE}": CacheLayout("phtd", Pages(PAGE), quantization=KvQuantization("int8", DIM)),
            "float8, a scale": CacheLayout("bhtd", quantization=KvQuantization("float8_e4m3fn", 0)),
        }
        calls = {name: (Call(problem(kv_heads, layout), (1,), (keys,)),) for name, layout in stores.items()}
        bars = {"offsets": 0.95, f"pages of {PAGE}": 0.95, "pages of 128": 0.95}
        if keys == 4096:
            bars |= {name: 2.5 for name, layout in stores.items() if layout.quantization is not None}
            bars["float8, a scale"] = 1.5
        all_comparisons.append(Comparison(f"decode, {HEADS} heads on {kv_heads}, {keys} keys", calls, bars))
    rows = (300, 1, 77, 512, 1, 1, 130, 1)
    keys = tuple(n + past for n, past in zip(rows, (0, 900, 0, 0, 333, 2047, 64, 15)))
    packed = dataclasses.replace(problem(8, CacheLayout()), row_axes="te", window=CAUSAL)
    unpacked = dataclasses.replace(packed, row_axes="bte")
    contenders = {
        "one by one": tuple(Call(unpacked, (n,), (m,)) for n, m in zip(rows, keys)),
        "packed": (Call(packed, rows, keys),),
    }
    return [*all_comparisons, Comparison("a ragged batch of 8", contenders, {"packed": 0.95})]


def problem(kv_heads: int, layout: CacheLayout) -> AttentionProblem:
    heads: dict[str, Any] = {"q_heads": HEADS, "kv_heads": kv_heads, "head_dim": DIM, "v_head_dim": DIM}
    types = {"dtype": "float32", "v_dtype": "float32", "acc_dtype": "float32"}
    return AttentionProblem(None, None, None, **heads, **types, scale=DIM**-0.5, layout=layout, lengths=True)


def run(threads: int, turns: int, seconds: float) -> None:
    """The first table of the command `stores`."""
    table = Table("comparison", "contender", "ms", "spread", "of the first", "bar", title=f"{threads} thread(s)")
    for comparison in comparisons():
        timers = {name: _timer(calls) for name, calls in comparison.contenders.items()}
        timings = interleaved(timers, turns, seconds)
        first = next(iter(timings.values())).median
        for name, timing in timings.items():
            table.add_row(comparison.name, name, *_row(timing, first), f"{comparison.bars.get(name, '')}")
    Console().print(table)


def _row(timing: Timing, first: float) -> tuple[str, str, str]:
    spread = f"{timing.low * 1e3:.3f} to {timing.high * 1e3:.3f}"
    return f"{timing.median * 1e3:.3f}", spread, f"{first / timing.median:.2f}x"


def _timer(calls: tuple[Call, ...]) -> Callable[[int], tuple[float, float]]:
    bound = [_bound(call) for call in calls]

    def all_of_them() -> None:
        for call in bound:
            call()

    return partial(timed, all_of_them)


def _bound(call: Call) -> Callable[[], None]:
    """The call, with the arrays of another layer each time: where one array happens to lie counts for little then."""
    kernel, names, inputs = _kernel(call.problem), call.problem.parameters(), _inputs(call)
    layers = [{name: x if isinstance(x, int) else _tensor(x) for name, x in inputs.items()} for _ in range(LAYERS)]
    kernel(*(layers[0][name] for name in names))
    expected = compute_reference(call.problem, **{name: x for name, x in inputs.items() if name != "y"})["y"]
    if (off := error(layers[0]["y"].numpy(), expected)) > TOLERANCE:
        raise LoweringError("run.result_mismatch", f"Y of {call} is off by {off:.1e} of its range.")
    arguments = itertools.cycle([[tensors[name] for name in names] for tensors in layers])

    def run() -> None:
        kernel(*next(arguments))

    return run


_kernels: dict[AttentionProblem, Any] = {}


def _kernel(p: AttentionProblem) -> Any:
    if p not in _kernels:
        target = resolve("cpu")[0].tvm
        provide()
        module = schedules.apply_schedules(tvm.IRModule({"attention": build_plain_attention(p)}), target)
        _kernels[p] = tvm.compile(module, target=target)["attention"]
    return _kernels[p]


def _inputs(call: Call) -> dict[str, Any]:
    """Draw arrays and numbers by parameter name, and an array for Y. Pages are shuffled."""
    p, rng = call.problem, np.random.default_rng(0)
    batch, max_keys = len(call.rows), max(call.keys)
    arrays: dict[str, Any] = {"lengths": np.array(call.keys), "most_keys": max_keys, "most_rows": max(call.rows)}
    sizes = {"b": batch, "h": p.kv_heads, "t": max_keys, "d": DIM}
    if isinstance(p.layout.slots, Pages):
        pages_each = -(-max_keys // p.layout.slots.size)
        sizes |= {"p": batch * pages_each, "t": p.layout.slots.size}
        arrays["pages"] = rng.permutation(batch * pages_each).reshape(batch, pages_each)
    elif isinstance(p.layout.slots, Offset):
        sizes["t"], arrays["slot_starts"] = batch * max_keys, np.arange(batch) * max_keys
    shape = [sizes[axis] for axis in p.layout.axes]
    for name in "kv":
        arrays[name] = _quantize(rng, shape, p.layout.quantization)
        if p.layout.quantization is not None:
            group = p.layout.quantization.group
            arrays[f"{name}_scale"] = np.full([*shape[:-1], DIM // group] if group else [1], 0.02, np.float32)
    rows = sum(call.rows) if p.is_ragged else max(call.rows)
    arrays["row_starts"] = np.concatenate([[0], np.cumsum(call.rows)])
    width = {"te": (rows, HEADS * DIM), "bte": (batch, rows, HEADS * DIM), "bhtd": (batch, HEADS, rows, DIM)}
    arrays["q"] = rng.standard_normal(width[p.row_axes], np.float32)
    arrays["y"] = np.empty_like(arrays["q"])
    return {name: arrays[name] for name in p.parameters()}


def _quantize(rng: np.random.Generator, shape: list[int], quantization: KvQuantization | None) -> np.ndarray:
    values = rng.standard_normal(shape, np.float32)
    return values if quantization is None else (values * 30).astype(quantization.dtype)


def _tensor(array: np.ndarray) -> Any:
    """A copy that begins with a cache line, in memory of NumPy's, which asks for pages of 2 MiB: with pages of 4 KiB it
    is their tables that decoding waits for, and the more the less of a cache lies together."""
    memory = np.empty(array.nbytes + 64, np.uint8)
    start = -memory.ctypes.data % 64
    copy = memory[start : start + array.nbytes].view(array.dtype).reshape(array.shape)
    copy[...] = array
    if array.dtype.name == "float8_e4m3fn":
        return tvm_ffi.from_dlpack(copy.view(np.uint8))
    return tvm_ffi.from_dlpack(copy)
