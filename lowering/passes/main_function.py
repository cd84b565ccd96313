"""Passes that rewrite the body of `main`, and may add functions to the module."""

from __future__ import annotations

import tvm
from tvm import relax
from tvm.relax.expr_functor import PyExprMutator


def rewritten(mod: tvm.IRModule, mutator: PyExprMutator) -> tvm.IRModule:
    """The module with what a mutator of it makes of main's body, without what nobody reads then."""
    main = mod["main"]
    body = mutator.visit_expr(main.body)
    mod = mutator.builder_.get()
    mod["main"] = relax.Function(main.params, body, main.ret_ty, main.is_pure, main.attrs)
    return relax.transform.DeadCodeElimination()(mod)
