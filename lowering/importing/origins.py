"""Which ONNX nodes a kernel computes, for those who read a profile.

The importer names each Relax variable after the node that it lowers and keeps the list; passes keep the names. Fusion
takes them away, so its groups are read again beside the module that it got. What a pass made anew has no origin.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import tvm
import tvm_ffi
from tvm import ir, relax

Origins = dict[str, tuple[str, ...]]
"""ONNX nodes by the name of the variable that they compute."""


class Builder(relax.BlockBuilder):
    """A BlockBuilder that notes for every variable which node it was emitted for."""

    def __init__(self) -> None:
        super().__init__()
        self.origins: Origins = {}
        self._node: tuple[str, str] | None = None

    @contextmanager
    def lowering(self, op_type: str, name: str) -> Iterator[None]:
        """What is emitted inside belongs to this node."""
        before, self._node = self._node, (op_type, name)
        try:
            yield
        finally:
            self._node = before

    def emit(self, expr: relax.Expr, name_hint: str = "") -> relax.Var:
        if self._node is None:
            return super().emit(expr, name_hint)
        op_type, name = self._node
        var = super().emit(expr, name_hint or op_type)
        self.origins[var.name] = (f"{op_type} {name}",)
        return var


def bindings(body: relax.Expr) -> Iterator[relax.Binding]:
    """All bindings of a function's body in the order of execution, those of both branches of an If included."""
    if isinstance(body, relax.SeqExpr):
        for block in body.blocks:
            for binding in block.bindings:
                if isinstance(binding.value, relax.If):
                    yield from bindings(binding.value.true_branch)
                    yield from bindings(binding.value.false_branch)
                yield binding


def after_fusion(before: tvm.IRModule, after: tvm.IRModule, origins: Origins) -> Origins:
    """The origins in the module `after`, which FuseOps made of `before`: a group has those of all that is in it."""
    known: dict[object, str] = {}
    for binding in bindings(before["main"].body):
        known.setdefault(_key(binding.value, {}), binding.var.name)
    result: Origins = {}
    names: dict[relax.Var, object] = {}  # of variables in `after`, what the same value is called in `before`
    for binding in bindings(after["main"].body):
        function = _group(after, binding.value)
        if function is None:
            inner, values = {}, [binding]
        else:
            inner = {p: _key(a, names) for p, a in zip(function.params, binding.value.args)}
            values = list(bindings(function.body))
        found: list[str] = []
        for value in values:
            name = known.get(_key(value.value, {**names, **inner}), value.var.name)
            inner[value.var] = names[binding.var] = name
            found += [node for node in origins.get(name, ()) if node not in found]
        if found:  # others may have the name of a variable that fusion made
            result[binding.var.name] = tuple(found)
    return result


def _group(mod: tvm.IRModule, value: relax.Expr) -> relax.Function | None:
    """The function that a call of a fused group calls."""
    if not isinstance(value, relax.Call) or not isinstance(value.op, ir.GlobalVar):
        return None
    function = mod[value.op]
    return function if isinstance(function, relax.Function) else None


def _key(expr: relax.Expr, names: dict[relax.Var, object]) -> object:
    """What is computed, from what: equal for equal expressions, whatever their variables are called."""
    if isinstance(expr, relax.Call):
        callee = expr.op.name_hint if isinstance(expr.op, ir.GlobalVar) else expr.op.name
        return callee, *(_key(argument, names) for argument in expr.args)
    if isinstance(expr, relax.Tuple):
        return tuple(_key(field, names) for field in expr.fields)
    if isinstance(expr, relax.TupleGetItem):
        return _key(expr.tuple_value, names), expr.index
    if isinstance(expr, relax.Var):
        return names.get(expr, expr.name)
    return expr.name_hint if isinstance(expr, ir.GlobalVar) else tvm_ffi.structural_hash(expr, map_free_vars=True)
