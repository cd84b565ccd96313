"""Several results of one call are variables of their own.

`call_tir` gives them as a tuple, whose fields are read behind it. Whoever plans memory would keep all of them for as
long as any is read, and beside an output of the model for good.
"""

from __future__ import annotations

import tvm
from tvm import relax


def split_tuple_results(mod: tvm.IRModule) -> tvm.IRModule:
    """The module, whose `main` reads no fields of tuples that it made itself."""
    main = mod["main"]
    bindings = [binding for block in main.body.blocks for binding in block.bindings]
    fields = {binding.var: binding.value.fields for binding in bindings if isinstance(binding.value, relax.Tuple)}
    apart = [_field(binding, fields) for binding in bindings]
    read = {var for expr in (main.body.body, *(b.value for b in apart)) for var in relax.analysis.free_vars(expr)}
    left = [binding for binding in apart if binding.var not in fields or binding.var in read]
    body = relax.SeqExpr([relax.BindingBlock(left)], main.body.body)
    mod = mod.clone()
    mod["main"] = relax.Function(main.params, body, main.ret_ty, main.is_pure, main.attrs)
    return mod


def _field(binding: relax.Binding, fields: dict[relax.Var, list[relax.Expr]]) -> relax.Binding:
    value = binding.value
    if not isinstance(value, relax.TupleGetItem) or value.tuple_value not in fields:
        return binding
    return relax.VarBinding(binding.var, fields[value.tuple_value][value.index])
