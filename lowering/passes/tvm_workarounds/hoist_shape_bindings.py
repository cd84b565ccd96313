"""Moves definitions of symbolic sizes before their uses, and checks of requests before everything else.

A size that depends on data is defined by a match_cast. TVM's FuseOps orders bindings by the tensors they read and not
by the symbols in their shapes: a fused kernel may end up before the match_cast that its shape needs.

Tables of a later layer are checked before an earlier layer writes to a cache: a rejected call writes nothing.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import tvm
import tvm_ffi
from tvm import relax

from ...importing.checks import REQUESTS, read_callee_name


def hoist_shape_bindings(mod: tvm.IRModule) -> tvm.IRModule:
    """Return the module with the bindings of Relax functions in an order in which symbols are defined before use."""
    for variable, function in mod.functions_items():
        if isinstance(function, relax.Function):
            defined = {s for p in function.params for s in _list_definable(p.ty)}
            body = _order_sequence(function.body, defined)
            if body is not function.body:
                mod = mod.clone()
                mod[variable] = relax.Function(function.params, body, function.ret_ty, function.is_pure, function.attrs)
    return mod


def _order_sequence(body: relax.SeqExpr, defined: set[Any]) -> relax.SeqExpr:
    """Return the ordered body, or the body itself if it is ordered. `defined` are symbols defined outside."""
    defined = set(defined)
    blocks, is_changed = [], False
    for block in body.blocks:
        ordered = _order_bindings(block.bindings, defined)
        ordered = [_order_branches(b, defined) for b in ordered]
        is_same = all(a is b or a.same_as(b) for a, b in zip(block.bindings, ordered))
        is_changed = is_changed or not is_same
        kind = relax.DataflowBlock if isinstance(block, relax.DataflowBlock) else relax.BindingBlock
        blocks.append(block if is_same else kind(ordered))
    return relax.SeqExpr(blocks, body.body) if is_changed else body


def _order_bindings(bindings: Iterable[relax.Binding], defined: set[Any]) -> list[relax.Binding]:
    """Return the bindings in order, except that checks of requests come first, and definitions before their uses."""
    bindings = list(bindings)
    definitions: dict[Any, int] = {binding.var: k for k, binding in enumerate(bindings)}
    candidates: dict[Any, list[int]] = {}
    for k, binding in enumerate(bindings):
        for symbol in _list_defined_symbols(binding) - defined:
            candidates.setdefault(symbol, []).append(k)
    definitions |= {
        symbol: _find_definition(symbol, match_casts, bindings, definitions)
        for symbol, match_casts in candidates.items()
    }
    result: list[relax.Binding] = []
    done: set[int] = set()

    def visit(k: int) -> None:
        if k in done:
            return
        done.add(k)
        for variable in _list_used(bindings[k]):
            if variable in definitions:
                visit(definitions[variable])
        result.append(bindings[k])

    checks = (k for k, binding in enumerate(bindings) if read_callee_name(binding.value) in REQUESTS)
    for k in (*checks, *range(len(bindings))):
        visit(k)
    defined.update(definitions)
    return result


def _find_definition(
    symbol: Any, candidates: list[int], bindings: list[relax.Binding], definitions: Mapping[Any, int]
) -> int:
    """Return the match_cast that defines a symbol: other ones that mention it read values computed from it."""
    for k in candidates:
        pending, seen = _list_variables(bindings[k].value), {k}
        while pending:
            variable = pending.pop()
            if variable.same_as(symbol):
                break
            definition = definitions.get(variable)
            if definition is not None and definition not in seen:
                seen.add(definition)
                pending += _list_used(bindings[definition])
        else:
            return k
    return candidates[0]


def _order_branches(binding: relax.Binding, defined: set[Any]) -> relax.Binding:
    """Return the binding with ordered branches of an If."""
    branch = binding.value
    if not isinstance(branch, relax.If):
        return binding
    then, otherwise = (_order_sequence(b, defined) for b in (branch.true_branch, branch.false_branch))
    if then is branch.true_branch and otherwise is branch.false_branch:
        return binding
    return relax.VarBinding(binding.var, relax.BlockBuilder().normalize(relax.If(branch.cond, then, otherwise)))


def _list_defined_symbols(binding: relax.Binding) -> set[Any]:
    """Return the symbols that the binding may define."""
    return set(_list_definable(binding.ty)) if isinstance(binding, relax.MatchCast) else set()


def _list_definable(kind: Any) -> list[Any]:
    return list(relax.analysis.definable_tir_vars_in_type(kind))


def _list_used(binding: relax.Binding) -> list[Any]:
    """Return all variables, of tensors and of sizes, that the binding reads or its type mentions."""
    return [*_list_variables(binding.value), *relax.analysis.tir_vars_in_type(binding.var.ty)]


def _list_variables(value: relax.Expr) -> list[Any]:
    variables: list[Any] = []
    tvm_ffi.structural_walk(value, (tvm.ir.Var, variables.append))
    return variables
