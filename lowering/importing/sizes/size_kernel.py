"""A kernel that stores symbolic sizes in a tensor."""

from __future__ import annotations

import numpy as np
from tvm import tirx
from tvm.script.ir_builder import IRBuilder
from tvm.script.ir_builder import tirx as T


def make_size_kernel(contents: np.ndarray, dtype: str) -> tuple[tirx.PrimFunc, list[tirx.Var]]:
    """Return a kernel that takes symbols as scalars and stores the contents, and the symbols.

    The contents are numbers and expressions of the symbols.
    """
    symbols: list[tirx.Var] = []
    for entry in contents.flat:
        if not _is_number(entry):
            symbols += [v for v in tirx.analysis.undefined_vars(entry) if not any(v.same_as(w) for w in symbols)]
    with IRBuilder() as ib, T.prim_func(s_tir=True):
        T.func_name("sizes")
        T.func_attr({"op_pattern": 8, "tirx.noalias": True})
        for symbol in symbols:
            T.arg(symbol.name, symbol)
        out = T.arg("out", T.Buffer((contents.size,), dtype))
        for k, size in enumerate(contents.flat):
            T.buffer_store(out, tirx.const(int(size), dtype) if _is_number(size) else size.astype(dtype), [k])
    return ib.get().without_attr("global_symbol"), symbols


def _is_number(entry: object) -> bool:
    return isinstance(entry, (int, bool, np.integer, np.bool_))
