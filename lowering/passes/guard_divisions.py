"""Divisions in indices that TVM 0.27 would simplify wrongly are held back from its simplifier.

FlattenBuffer rewrites indices as sums of loop variables (IterMapSimplify). Where a variable has a negative factor it
then divides by the negative of the divisor and rounds the other way: x[(99 - j) // 8] becomes x[j // -8 + 12], and
x[(n - j) % 8] loses its n. Reversing a tiled or repeated tensor is such an index.
"""

from __future__ import annotations

from typing import TypeAlias

import tvm
import tvm_ffi
from tvm import ir, tirx
from tvm.ir import prim

_Division: TypeAlias = prim.FloorDiv | prim.FloorMod


def guard_divisions(mod: tvm.IRModule) -> tvm.IRModule:
    """The module with `| 0`, which costs nothing and hides a sum, around dividends that take something away."""
    mod = mod.clone()
    for name, func in mod.functions_items():
        if isinstance(func, tirx.PrimFunc) and _any(func):
            mod.update_func(name, _held(func))
    return mod


def _any(func: tirx.PrimFunc) -> bool:
    found: list[bool] = []

    def divide(node: _Division) -> None:
        found.append(_falls(node))

    tvm_ffi.structural_walk(func, [(prim.FloorDiv, divide), (prim.FloorMod, divide)])
    return any(found)


def _held(func: tirx.PrimFunc) -> tirx.PrimFunc:
    def load(node: ir.TensorLoad) -> ir.Expr:
        return node.source[tuple(map(_index, node.indices))]

    def store(node: tirx.BufferStore) -> tirx.BufferStore:
        return tirx.BufferStore(node.buffer, node.value, list(map(_index, node.indices)))

    return tvm_ffi.structural_map(func, [(ir.TensorLoad, load), (tirx.BufferStore, store)])


def _index(index: ir.Expr) -> ir.Expr:
    def divide(node: _Division) -> _Division:
        return type(node)(tirx.bitwise_or(node.a, tirx.const(0, node.a.ty.dtype)), node.b) if _falls(node) else node

    return tvm_ffi.structural_map(index, [(prim.FloorDiv, divide), (prim.FloorMod, divide)])


def _falls(node: _Division) -> bool:
    """Whether something is taken away in the dividend, that is no vector."""
    if node.ty.dtype.lanes > 1:
        return False
    found: list[bool] = []

    def subtract(part: prim.Sub) -> None:
        found.append(not isinstance(part.b, prim.IntImm))

    def multiply(part: prim.Mul) -> None:
        found.append(any(isinstance(x, prim.IntImm) and x.value < 0 for x in (part.a, part.b)))

    tvm_ffi.structural_walk(node.a, [(prim.Sub, subtract), (prim.Mul, multiply)])
    return any(found)
