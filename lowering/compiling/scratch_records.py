"""Scratch memory of cached kernels, as text, for C code that calls kernels which are not scheduled again."""

from __future__ import annotations

from tvm import ir, tirx
from tvm.tirx.buffer import is_buffer_var

from ..emission.kernel_signature import SCRATCH, list_scratch_sizes
from ..tensorir.expressions import Expr, substitute


def write_scratch(kernel: tirx.PrimFunc) -> str:
    """Return the record of a scheduled kernel."""
    sizes = [[tirx.const(itemsize, "int64"), *shape] for shape, itemsize in list_scratch_sizes(kernel)]
    empty = tirx.PrimFunc(kernel.params, tirx.Evaluate(0))
    return str(ir.save_json(empty.with_attr(SCRATCH, sizes)))


def add_scratch(kernel: tirx.PrimFunc, record: str) -> tirx.PrimFunc:
    """Return an unscheduled kernel with the attribute SCRATCH, by the record of the scheduled one."""
    recorded = ir.load_json(record)
    symbols: dict[tirx.Var, Expr] = {}
    for old, new in zip(recorded.params, kernel.params, strict=True):
        if not is_buffer_var(old):
            symbols[old] = new
            continue
        symbols.update((size, other) for size, other in zip(old.shape, new.shape) if isinstance(size, ir.Var))
    sizes = [[substitute(size, symbols) for size in entry] for entry in recorded.attrs[SCRATCH]]
    return kernel.with_attr(SCRATCH, sizes)
