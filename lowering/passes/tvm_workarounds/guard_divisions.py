"""Guard index divisions that TVM 0.27 would simplify incorrectly against its simplifier.

FlattenBuffer rewrites indices as sums of loop variables (IterMapSimplify). For a variable with a negative factor it
divides by the negative of the divisor and rounds the other way: x[(99 - j) // 8] becomes x[j // -8 + 12], and x[(n - j)
% 8] loses its n. Reversing a tiled or repeated tensor is such an index.
"""

from __future__ import annotations

from typing import TypeAlias

import tvm
import tvm_ffi
from tvm import ir, tirx
from tvm.ir import prim

_Division: TypeAlias = prim.FloorDiv | prim.FloorMod


def guard_divisions(mod: tvm.IRModule) -> tvm.IRModule:
    """Return the module with `| 0`, which is free and hides the sum, around dividends with negative terms."""
    mod = mod.clone()
    for name, func in mod.functions_items():
        if isinstance(func, tirx.PrimFunc) and _has_negative_dividend(func):
            mod.update_func(name, _guard_function(func))
    return mod


def _has_negative_dividend(func: tirx.PrimFunc) -> bool:
    results: list[bool] = []

    def divide(node: _Division) -> None:
        results.append(_has_negative_term(node))

    tvm_ffi.structural_walk(func, [(prim.FloorDiv, divide), (prim.FloorMod, divide)])
    return any(results)


def _guard_function(func: tirx.PrimFunc) -> tirx.PrimFunc:
    def load(node: ir.TensorLoad) -> ir.Expr:
        return node.source[tuple(map(_guard_index, node.indices))]

    def store(node: tirx.BufferStore) -> tirx.BufferStore:
        return tirx.BufferStore(node.buffer, node.value, list(map(_guard_index, node.indices)))

    return tvm_ffi.structural_map(func, [(ir.TensorLoad, load), (tirx.BufferStore, store)])


def _guard_index(index: ir.Expr) -> ir.Expr:
    def divide(node: _Division) -> _Division:
        return (
            type(node)(tirx.bitwise_or(node.a, tirx.const(0, node.a.ty.dtype)), node.b)
            if _has_negative_term(node)
            else node
        )

    return tvm_ffi.structural_map(index, [(prim.FloorDiv, divide), (prim.FloorMod, divide)])


def _has_negative_term(node: _Division) -> bool:
    """Return whether the scalar dividend has a negative term."""
    if node.ty.dtype.lanes > 1:
        return False
    results: list[bool] = []

    def subtract(term: prim.Sub) -> None:
        results.append(not isinstance(term.b, prim.IntImm))

    def multiply(term: prim.Mul) -> None:
        results.append(any(isinstance(x, prim.IntImm) and x.value < 0 for x in (term.a, term.b)))

    tvm_ffi.structural_walk(node.a, [(prim.Sub, subtract), (prim.Mul, multiply)])
    return any(results)
