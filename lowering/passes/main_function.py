"""Passes that rewrite the body of `main`, and may add functions to the module."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Sequence

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


class BlockMutator(PyExprMutator):
    """Writes the bindings of a block anew, all at once. Its classes are decorated with `mutator`.

    `fields` are those of tuples that calls gave before; who takes one of them out of the tuple has it directly.
    """

    def __init__(self, mod: tvm.IRModule) -> None:
        super().__init__(mod)
        self.fields: dict[relax.Var, Sequence[relax.Expr]] = {}

    @abstractmethod
    def block(self, given: Sequence[relax.Binding], kind: type[relax.Var]) -> list[relax.Binding]:
        """What stands in the place of these; new variables are of that kind."""

    def visit_binding_block_(self, block: relax.BindingBlock) -> relax.BindingBlock:
        return relax.BindingBlock(self._apart(self.block(super().visit_binding_block_(block).bindings, relax.Var)))

    def visit_dataflow_block_(self, block: relax.DataflowBlock) -> relax.DataflowBlock:
        found = self.block(super().visit_dataflow_block_(block).bindings, relax.DataflowVar)
        return relax.DataflowBlock(self._apart(found))

    def _apart(self, bindings: Sequence[relax.Binding]) -> list[relax.Binding]:
        return [
            relax.VarBinding(binding.var, self.fields[binding.value.tuple_value][binding.value.index])
            if isinstance(binding.value, relax.TupleGetItem) and binding.value.tuple_value in self.fields
            else binding
            for binding in bindings
        ]
