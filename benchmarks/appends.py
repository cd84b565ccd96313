"""The cost of writing new tokens into a cache, in bytes a second, compared with NumPy's copy of the same rows."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from functools import partial

import numpy as np
import tvm
import tvm_ffi
from rich.console import Console
from rich.table import Table

from lowering.attention.kv_write import KvWrite, write_in_place
from lowering.attention.record.cache_layout import CacheLayout, KvQuantization, Pages
from lowering.passes.tvm_workarounds.guard_divisions import guard_divisions
from lowering.target import resolve

from .timing import interleaved, timed

HEADS, DIM, PAGE, CAPACITY, LAYERS = 32, 128, 16, 64, 4
STORES = {
    "float32": CacheLayout(),
    "float32 in pages": CacheLayout("phtd", Pages(PAGE)),
    "int8, a scale, in pages": CacheLayout("phtd", Pages(PAGE), quantization=KvQuantization("int8", 0)),
    "int8, scales of 8, in pages": CacheLayout("phtd", Pages(PAGE), quantization=KvQuantization("int8", 8)),
    "int8, a scale a token, in pages": CacheLayout("phtd", Pages(PAGE), quantization=KvQuantization("int8", DIM)),
}
BATCHES = (1, 8, 64)
"""Requests, each of which has one new token."""


def run(threads: int, turns: int, seconds: float) -> None:
    """Print the second table of the command `stores`."""
    title = f"KV write of one token to {HEADS} heads, {threads} thread(s)"
    table = Table("requests", "contender", "us", "spread", "GB/s", title=title)
    for batch in BATCHES:
        contenders = {"NumPy's copy of the rows": _copy(batch)}
        contenders |= {name: _append(_record(layout), batch) for name, layout in STORES.items()}
        timings = interleaved({name: partial(timed, call) for name, (call, _) in contenders.items()}, turns, seconds)
        for name, t in timings.items():
            spread = f"{t.low * 1e6:.2f} to {t.high * 1e6:.2f}"
            table.add_row(
                str(batch), name, f"{t.median * 1e6:.2f}", spread, f"{contenders[name][1] / t.median * 1e-9:.1f}"
            )
    Console().print(table)


def _copy(batch: int) -> tuple[Callable[[], None], int]:
    """Return a copy of new rows to memory that is not in a cache, and how many bytes it reads and writes."""
    rows = np.ones((batch, HEADS, 2, DIM), np.float32)
    pools = np.ones((LAYERS, CAPACITY, *rows.shape), np.float32)
    targets = itertools.cycle(pools.reshape(-1, *rows.shape))
    return lambda: np.copyto(next(targets), rows), 2 * rows.nbytes


def _record(layout: CacheLayout) -> KvWrite:
    return KvWrite(None, HEADS, DIM, DIM, "float32", layout)


def _append(record: KvWrite, batch: int) -> tuple[Callable[[], None], int]:
    target = resolve("cpu")[0].tvm
    function = write_in_place(record).with_attr("global_symbol", "kv_write")
    kernel = tvm.compile(guard_divisions(tvm.IRModule({"kv_write": function})), target=target)["kv_write"]
    layers = [_arguments(record, batch) for _ in range(LAYERS)]
    read = sum(x.nbytes for name, x in layers[0].items() if name.startswith("new"))
    written = sum(x.nbytes for name, x in layers[0].items() if name in record.caches()) // CAPACITY
    calls = itertools.cycle([[tvm_ffi.from_dlpack(x) for x in layer.values()] for layer in layers])
    return lambda: kernel(*next(calls)), read + written


def _arguments(record: KvWrite, batch: int) -> dict[str, np.ndarray]:
    """Return arguments by name, in order. Pages are shuffled, and requests have different lengths."""
    rng, layout = np.random.default_rng(0), record.layout
    pages_each = CAPACITY // PAGE
    sizes = {"b": batch, "h": HEADS, "t": CAPACITY, "d": DIM}
    if isinstance(layout.slots, Pages):
        sizes |= {"p": batch * pages_each, "t": PAGE}
    shape = [sizes[axis] for axis in layout.axes]
    arrays = {
        "pages": rng.permutation(batch * pages_each).reshape(batch, pages_each),
        "factor": np.full(2, 30, np.float32),
        "row_starts": np.arange(batch),
        "row_counts": np.ones(batch, np.int64),
        "starts": rng.integers(0, CAPACITY, batch),
    }
    group = DIM if layout.quantization is None else layout.quantization.group or DIM
    for name in "kv":
        arrays[name] = np.ones(shape, "float32" if layout.quantization is None else layout.quantization.dtype)
        arrays[f"{name}_scale"] = np.ones([*shape[:-1], DIM // group], np.float32)
        arrays[f"new_{name}"] = rng.standard_normal((batch, HEADS, DIM), np.float32)
    return {name: arrays[name] for name in record.inputs()}
