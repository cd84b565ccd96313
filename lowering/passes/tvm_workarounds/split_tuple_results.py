"""Splits tuple results of a call into separate variables.

`call_tir` returns them as a tuple, whose fields are read after it. Memory planning would keep all of them live as long
as any is read, and permanently if one is an output of the model.
"""

from __future__ import annotations

import tvm
from tvm import relax


def split_tuple_results(mod: tvm.IRModule) -> tvm.IRModule:
    """Return the module, whose `main` reads no fields of tuples that it built itself."""
    main = mod["main"]
    bindings = [binding for block in main.body.blocks for binding in block.bindings]
    fields = {binding.var: binding.value.fields for binding in bindings if isinstance(binding.value, relax.Tuple)}
    split = [_replace_field(binding, fields) for binding in bindings]
    read = {var for expr in (main.body.body, *(b.value for b in split)) for var in relax.analysis.free_vars(expr)}
    remaining = [binding for binding in split if binding.var not in fields or binding.var in read]
    body = relax.SeqExpr([relax.BindingBlock(remaining)], main.body.body)
    mod = mod.clone()
    mod["main"] = relax.Function(main.params, body, main.ret_ty, main.is_pure, main.attrs)
    return mod


def _replace_field(binding: relax.Binding, fields: dict[relax.Var, list[relax.Expr]]) -> relax.Binding:
    value = binding.value
    if not isinstance(value, relax.TupleGetItem) or value.tuple_value not in fields:
        return binding
    return relax.VarBinding(binding.var, fields[value.tuple_value][value.index])
