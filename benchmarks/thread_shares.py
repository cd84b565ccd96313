"""How a decoder's work is divided among more threads than this machine has: computed, not measured.

A model is compiled for one size. The tasks of a kernel are the iterations of its parallel loops, of which each thread
takes equally many: long loops come close to that, since a thread takes over shares of slower ones. A kernel without
such a loop runs on one thread. The time of a kernel on one thread is estimated from its operations and bytes.
"""

from __future__ import annotations

import tempfile
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import tvm
import tvm_ffi
from rich.console import Console
from rich.table import Table
from tvm import ir, tirx
from tvm.sym import Analyzer

from lowering.arithmetic import evaluate
from lowering.compiling.compiler import compile_to
from lowering.demo.decoder import DecoderConfig, build_decoder
from lowering.manifest import KernelSpec
from lowering.profiling.expected import seconds
from lowering.profiling.limits import Limits
from lowering.tensorir.expressions import Expr, rewrite

_DECODER = DecoderConfig(2, 2048, 32, 8, 64, 8192, 32768)  # two layers of Llama 3.2 1B, and a quarter of its vocabulary
_CAPACITY = 4096
_WIDTH = 150
_CORE = Limits(flops=100e9, bandwidth=12e9, bytes=0)
"""A core's operations and bytes in a second: their ratio decides which of both limits a kernel."""


@dataclass(frozen=True)
class KernelShare:
    """A kernel of a model: its calls, the seconds of all of them on one thread, the bytes of one, and its tasks."""

    name: str
    calls: int
    seconds: float
    bytes: int
    tasks: int

    def busiest(self, threads: int) -> float:
        """Return the share of the thread that has most."""
        return -(-self.tasks // threads) / self.tasks


def run(rows: Sequence[int], past: int, threads: Sequence[int]) -> None:
    """Print the shares for so many new tokens after `past` others."""
    for count in rows:
        Console(width=_WIDTH).print(
            _make_table(f"{count} new tokens after {past}", compute_shares(count, past), threads)
        )


def compute_shares(rows: int, past: int, config: DecoderConfig = _DECODER) -> list[KernelShare]:
    """Compile a decoder for so many new tokens, and return the shares of its kernels."""
    modules: dict[str, tvm.IRModule] = {}
    with tempfile.TemporaryDirectory() as folder:
        manifest = compile_to(
            Path(folder) / "decoder",
            build_decoder(config),
            dims={"batch": 1, "tokens": rows, "capacity": _CAPACITY},
            dump=lambda name, module: modules.update({name: module}),
        )
    kernels = {
        variable.name_hint: function
        for variable, function in modules["guard_float_arithmetic"].functions_items()
        if isinstance(function, tirx.PrimFunc)
    }
    calls = Counter(call.kernel for call in manifest.calls)
    return [_share(kernel, kernels[kernel.name], calls[kernel.name], config, rows, past) for kernel in manifest.kernels]


def _share(
    kernel: KernelSpec, function: tirx.PrimFunc, calls: int, config: DecoderConfig, rows: int, past: int
) -> KernelShare:
    keys = past + rows
    sizes = {"volume": 0, "pairs": config.heads * rows * (past + (rows + 1) // 2), "unseen": _CAPACITY - keys}
    flops, size = evaluate(kernel.flops, sizes), evaluate(kernel.bytes, sizes)
    if kernel.counter is not None:  # the rows of all keys that are seen, of both caches
        size = 2 * 4 * keys * config.kv_heads * config.head_dim
    if kernel.schedule == "plain":  # in place: the new rows are read and written
        size = 2 * 4 * rows * config.kv_heads * config.head_dim
    tasks = next(iter(count_tasks(function, keys)), 1)  # a second loop merges what the first one computes
    return KernelShare(kernel.name, calls, calls * seconds(kernel, flops, size, _CORE), size, tasks)


def count_tasks(function: tirx.PrimFunc, length: int) -> list[int]:
    """Return the extents of the parallel loops of a function, of whose tensors of integers every element is `length`.

    Sizes are constants; what is computed from them is followed through scalar buffers and variables.
    """
    values: dict[tirx.Var, Expr] = {}
    tasks: list[int] = []
    analyzer = Analyzer()
    parameters = [p for p in function.params if tirx.is_buffer_var(p) and str(p.dtype).startswith("int")]

    def simplify(expr: Expr) -> Expr:
        def replace(node: Expr) -> Expr | None:
            if isinstance(node, ir.TensorLoad):
                if any(node.source.same_as(parameter) for parameter in parameters):
                    return tirx.const(length, node.ty)
                return values.get(node.source)
            return values.get(node) if isinstance(node, tirx.Var) else None

        return analyzer.simplify(rewrite(expr, replace))

    def visit(node: tirx.Stmt) -> None:
        if isinstance(node, tirx.BufferStore | tirx.Bind) and str(node.value.ty) == "int64":
            values[node.buffer if isinstance(node, tirx.BufferStore) else node.var] = simplify(node.value)
        elif isinstance(node, tirx.For) and node.kind == tirx.ForKind.PARALLEL:
            tasks.append(int(simplify(node.extent)))

    tvm_ffi.structural_walk(function.body, (tirx.Stmt, visit), order="pre")
    return tasks


def compute_serial_share(shares: Sequence[KernelShare]) -> float:
    """Return the share of the time on one thread that more threads do not shorten."""
    return sum(share.seconds for share in shares if share.tasks == 1) / sum(share.seconds for share in shares)


def compute_speedup(shares: Sequence[KernelShare], threads: int) -> float:
    """Return the time on one thread by that on so many, each of which reads and computes as fast as one alone."""
    return sum(share.seconds for share in shares) / sum(share.seconds * share.busiest(threads) for share in shares)


def _make_table(title: str, shares: list[KernelShare], threads: Sequence[int]) -> Table:
    table = Table(title=f"{title}: share of the busiest thread, and bytes that it reads and writes in a call")
    for heading in ("kernel", "calls", "of the time", "tasks", *(f"{n} threads" for n in threads)):
        table.add_column(heading, justify="left" if heading == "kernel" else "right")
    total = sum(share.seconds for share in shares)
    for share in sorted(shares, key=lambda share: -share.seconds):
        busiest = [f"{share.busiest(n):.1%} {share.bytes * share.busiest(n) / 1e6:7.3f} MB" for n in threads]
        table.add_row(share.name, str(share.calls), f"{share.seconds / total:.2%}", str(share.tasks), *busiest)
    table.add_section()
    speedups = [f"{compute_speedup(shares, n):.1f}x" for n in threads]
    table.add_row("serial, and speedup", "", f"{compute_serial_share(shares):.2%}", "", *speedups)
    return table
