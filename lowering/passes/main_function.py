"""Passes that rewrite the body of `main`, and may add functions to the module."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Sequence

import tvm
from tvm import relax
from tvm.relax.expr_functor import PyExprMutator


def rewritten(mod: tvm.IRModule, mutator: PyExprMutator) -> tvm.IRModule:
    """The module with what a mutator of it makes of main's body, without what nobody reads then; no tuple is put
    together to be taken apart."""
    main = mod["main"]
    body = mutator.visit_expr(main.body)
    mod = mutator.builder_.get()
    mod["main"] = relax.Function(main.params, body, main.ret_ty, main.is_pure, main.attrs)
    mod = relax.transform.CanonicalizeBindings()(mod)
    return relax.transform.DeadCodeElimination()(mod)


class BlockMutator(PyExprMutator):
    """Writes the bindings of a block anew, all at once. Its classes are decorated with `mutator`."""

    @abstractmethod
    def block(self, given: Sequence[relax.Binding], kind: type[relax.Var]) -> list[relax.Binding]:
        """What stands in the place of these; new variables are of that kind."""

    def visit_binding_block_(self, block: relax.BindingBlock) -> relax.BindingBlock:
        return relax.BindingBlock(self.block(super().visit_binding_block_(block).bindings, relax.Var))

    def visit_dataflow_block_(self, block: relax.DataflowBlock) -> relax.DataflowBlock:
        return relax.DataflowBlock(self.block(super().visit_dataflow_block_(block).bindings, relax.DataflowVar))
