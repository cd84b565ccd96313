"""Puts what defines a symbolic size before what uses it, and checks of requests before everything else.

A size that depends on data is defined by a match_cast. TVM's FuseOps orders bindings by the tensors they read and not
by the symbols in their shapes: a fused kernel may end up before the match_cast that its shape needs.

Tables of a later layer are looked at before an earlier one writes to a cache: a call that is refused writes nothing.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import tvm
import tvm_ffi
from tvm import relax

from ..importing.checks import REQUESTS, called


def hoist_shape_bindings(mod: tvm.IRModule) -> tvm.IRModule:
    """The module with every Relax function's bindings in an order in which symbols are defined before they are used."""
    for variable, function in mod.functions_items():
        if isinstance(function, relax.Function):
            known = {s for p in function.params for s in _defined_by(p.ty)}
            body = _sequence(function.body, known)
            if body is not function.body:
                mod = mod.clone()
                mod[variable] = relax.Function(function.params, body, function.ret_ty, function.is_pure, function.attrs)
    return mod


def _sequence(body: relax.SeqExpr, known: set[Any]) -> relax.SeqExpr:
    """The body itself where its order is right already. `known` are symbols defined outside; it grows."""
    known = set(known)
    blocks, changed = [], False
    for block in body.blocks:
        ordered = _ordered(block.bindings, known)
        ordered = [_with_branches(b, known) for b in ordered]
        same = all(a is b or a.same_as(b) for a, b in zip(block.bindings, ordered))
        changed = changed or not same
        kind = relax.DataflowBlock if isinstance(block, relax.DataflowBlock) else relax.BindingBlock
        blocks.append(block if same else kind(ordered))
    return relax.SeqExpr(blocks, body.body) if changed else body


def _ordered(bindings: Iterable[relax.Binding], known: set[Any]) -> list[relax.Binding]:
    """The bindings in their order, but for checks of requests, which come first, and for what others need, which comes
    before them."""
    bindings = list(bindings)
    maker: dict[Any, int] = {binding.var: k for k, binding in enumerate(bindings)}
    candidates: dict[Any, list[int]] = {}
    for k, binding in enumerate(bindings):
        for symbol in _symbols(binding) - known:
            candidates.setdefault(symbol, []).append(k)
    maker |= {symbol: _definition(symbol, of, bindings, maker) for symbol, of in candidates.items()}
    result: list[relax.Binding] = []
    done: set[int] = set()

    def place(k: int) -> None:
        if k in done:
            return
        done.add(k)
        for variable in _used(bindings[k]):
            if variable in maker:
                place(maker[variable])
        result.append(bindings[k])

    checks = (k for k, binding in enumerate(bindings) if called(binding.value) in REQUESTS)
    for k in (*checks, *range(len(bindings))):
        place(k)
    known.update(maker)
    return result


def _definition(symbol: Any, candidates: list[int], bindings: list[relax.Binding], maker: Mapping[Any, int]) -> int:
    """Which of the match_casts that mention a symbol defines it: others look at what was computed with it."""
    for k in candidates:
        waiting, seen = _variables(bindings[k].value), {k}
        while waiting:
            variable = waiting.pop()
            if variable.same_as(symbol):
                break
            made = maker.get(variable)
            if made is not None and made not in seen:
                seen.add(made)
                waiting += _used(bindings[made])
        else:
            return k
    return candidates[0]


def _with_branches(binding: relax.Binding, known: set[Any]) -> relax.Binding:
    """The binding with the branches of an If in order."""
    branch = binding.value
    if not isinstance(branch, relax.If):
        return binding
    then, otherwise = (_sequence(b, known) for b in (branch.true_branch, branch.false_branch))
    if then is branch.true_branch and otherwise is branch.false_branch:
        return binding
    return relax.VarBinding(binding.var, relax.BlockBuilder().normalize(relax.If(branch.cond, then, otherwise)))


def _symbols(binding: relax.Binding) -> set[Any]:
    """The symbols that the binding may define."""
    return set(_defined_by(binding.ty)) if isinstance(binding, relax.MatchCast) else set()


def _defined_by(kind: Any) -> list[Any]:
    return list(relax.analysis.definable_tir_vars_in_type(kind))


def _used(binding: relax.Binding) -> list[Any]:
    """All variables, of tensors and of sizes, that the binding reads or that its type mentions."""
    return [*_variables(binding.value), *relax.analysis.tir_vars_in_type(binding.var.ty)]


def _variables(value: relax.Expr) -> list[Any]:
    found: list[Any] = []
    tvm_ffi.structural_walk(value, (tvm.ir.Var, found.append))
    return found
