"""Base of passes that rewrite the body of `main`, or of all Relax functions, and may add functions to the module."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Sequence

import tvm
from tvm import ir, relax
from tvm.relax.expr_functor import PyExprMutator


def rewrite_main(mod: tvm.IRModule, mutator: PyExprMutator) -> tvm.IRModule:
    """Return the module with main's body rewritten by a mutator, without dead code."""
    main = mod["main"]
    body = mutator.visit_expr(main.body)
    mod = mutator.builder_.get()
    mod["main"] = relax.Function(main.params, body, main.ret_ty, main.is_pure, main.attrs)
    return relax.transform.DeadCodeElimination()(mod)


def rewrite_functions(mod: tvm.IRModule, mutator: PyExprMutator) -> tvm.IRModule:
    """Return the module with the bodies of all Relax functions rewritten by a mutator, without dead code."""
    functions = {variable: func for variable, func in mod.functions_items() if isinstance(func, relax.Function)}
    bodies = {variable: mutator.visit_expr(func.body) for variable, func in functions.items()}
    mod = mutator.builder_.get()
    for variable, func in functions.items():
        mod[variable] = relax.Function(func.params, bodies[variable], func.ret_ty, func.is_pure, func.attrs)
    return relax.transform.DeadCodeElimination()(mod)


def emit_call(
    builder: relax.BlockBuilder,
    function: ir.GlobalVar,
    arguments: Sequence[relax.Expr],
    *,
    inplace_indices: Sequence[int],
    results: Sequence[relax.Var],
    kind: type[relax.Var] = relax.Var,
) -> list[relax.Binding]:
    """Return the bindings of the results of a TensorIR function's call: of their tuple first, if there are several.

    inplace_indices are the arguments that the results alias, -1 for a new array; a new variable is of that kind.
    """
    types = [result.ty for result in results]
    if max(inplace_indices) < 0:
        call = relax.call_tir(function, relax.Tuple(arguments), types if types[1:] else types[0])
    else:
        call = relax.op.call_tir_inplace(function, relax.Tuple(arguments), list(inplace_indices), types)
    call = builder.normalize(call)
    if len(results) == 1:
        return [relax.VarBinding(results[0], call)]
    results_tuple = kind("_".join(result.name for result in results), relax.TupleType(types))
    fields = [builder.normalize(relax.TupleGetItem(results_tuple, n)) for n in range(len(results))]
    return [relax.VarBinding(results_tuple, call), *map(relax.VarBinding, results, fields)]


class BlockMutator(PyExprMutator):
    """Rewrites the bindings of a block all at once. Its subclasses are decorated with `mutator`.

    `fields` are those of tuples that calls returned before; bindings that read one of them off the tuple get it
    directly.
    """

    def __init__(self, mod: tvm.IRModule) -> None:
        super().__init__(mod)
        self.fields: dict[relax.Var, Sequence[relax.Expr]] = {}

    @abstractmethod
    def rewrite_block(self, bindings: Sequence[relax.Binding], kind: type[relax.Var]) -> list[relax.Binding]:
        """Return the replacement of these bindings; new variables are of that kind."""

    def visit_binding_block_(self, block: relax.BindingBlock) -> relax.BindingBlock:
        return relax.BindingBlock(
            self._replace_fields(self.rewrite_block(super().visit_binding_block_(block).bindings, relax.Var))
        )

    def visit_dataflow_block_(self, block: relax.DataflowBlock) -> relax.DataflowBlock:
        bindings = self.rewrite_block(super().visit_dataflow_block_(block).bindings, relax.DataflowVar)
        return relax.DataflowBlock(self._replace_fields(bindings))

    def _replace_fields(self, bindings: Sequence[relax.Binding]) -> list[relax.Binding]:
        return [
            relax.VarBinding(binding.var, self.fields[binding.value.tuple_value][binding.value.index])
            if isinstance(binding.value, relax.TupleGetItem) and binding.value.tuple_value in self.fields
            else binding
            for binding in bindings
        ]
