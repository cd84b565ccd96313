"""The ONNX nodes that each kernel computes, for readers of a profile.

The importer names each Relax variable after the node that it lowers and records the list; passes preserve the names.
Fusion drops them, so its groups are compared with the module before fusion. A variable that a pass creates has no
origin.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import onnx_ir
import tvm
import tvm_ffi
from tvm import ir, relax

from ..choices import Scheme
from ..graph.options.weight_schemes import NodeSchemes
from ..graph.rewriting.matching import label

Origins = dict[str, tuple[str, ...]]
"""ONNX nodes by the name of the variable that they compute."""


class OriginBuilder(relax.BlockBuilder):
    """A BlockBuilder that records for every variable the node it was emitted for, and the scheme of its constants.

    A node that another one is made of has the scheme of that one if none is chosen for it.
    """

    def __init__(self, schemes: NodeSchemes | None = None) -> None:
        super().__init__()
        self.origins: Origins = {}
        self.schemes: dict[str, Scheme | None] = {}
        self._node: onnx_ir.Node | None = None
        self._node_schemes = schemes or NodeSchemes()
        self._scheme = self._node_schemes.default

    @contextmanager
    def lowering(self, node: onnx_ir.Node) -> Iterator[None]:
        """Attribute all that is emitted inside to this node."""
        before = self._node, self._scheme
        self._node, self._scheme = node, self._node_schemes.by_node.get(node, self._scheme)
        try:
            yield
        finally:
            self._node, self._scheme = before

    def emit(self, expr: relax.Expr, name_hint: str = "") -> relax.Var:
        if self._node is None:
            return super().emit(expr, name_hint)
        var = super().emit(expr, name_hint or self._node.op_type)
        self.origins[var.name] = (label(self._node),)
        self.schemes[var.name] = self._scheme
        return var


def iterate_bindings(body: relax.Expr) -> Iterator[relax.Binding]:
    """Yield all bindings of a function's body in execution order, those of both branches of an If included."""
    if isinstance(body, relax.SeqExpr):
        for block in body.blocks:
            for binding in block.bindings:
                if isinstance(binding.value, relax.If):
                    yield from iterate_bindings(binding.value.true_branch)
                    yield from iterate_bindings(binding.value.false_branch)
                yield binding


def trace_fusion(before: tvm.IRModule, after: tvm.IRModule, origins: Origins) -> Origins:
    """Return the origins in `after`, which FuseOps made of `before`: a group has the origins of all its bindings."""
    old_names: dict[object, str] = {}
    for binding in iterate_bindings(before["main"].body):
        old_names.setdefault(_structural_key(binding.value, {}), binding.var.name)
    result: Origins = {}
    names: dict[relax.Var, object] = {}  # of variables in `after`: the name of the same value in `before`
    for binding in iterate_bindings(after["main"].body):
        function = _read_group(after, binding.value)
        if function is None:
            inner, values = {}, [binding]
        else:
            inner = {p: _structural_key(a, names) for p, a in zip(function.params, binding.value.args)}
            values = list(iterate_bindings(function.body))
        nodes: list[str] = []
        for value in values:
            name = old_names.get(_structural_key(value.value, {**names, **inner}), value.var.name)
            inner[value.var] = names[binding.var] = name
            nodes += [node for node in origins.get(name, ()) if node not in nodes]
        if nodes:  # other variables may have the name of a variable that fusion created
            result[binding.var.name] = tuple(nodes)
    return result


def _read_group(mod: tvm.IRModule, value: relax.Expr) -> relax.Function | None:
    """Return the function that a call of a fused group calls."""
    if not isinstance(value, relax.Call) or not isinstance(value.op, ir.GlobalVar):
        return None
    function = mod[value.op]
    return function if isinstance(function, relax.Function) else None


def _structural_key(expr: relax.Expr, names: dict[relax.Var, object]) -> object:
    """Return a key of the computation: equal for equal expressions, independent of variable names."""
    if isinstance(expr, relax.Call):
        callee = expr.op.name_hint if isinstance(expr.op, ir.GlobalVar) else expr.op.name
        return callee, *(_structural_key(argument, names) for argument in expr.args)
    if isinstance(expr, relax.Tuple):
        return tuple(_structural_key(field, names) for field in expr.fields)
    if isinstance(expr, relax.TupleGetItem):
        return _structural_key(expr.tuple_value, names), expr.index
    if isinstance(expr, relax.Var):
        return names.get(expr, expr.name)
    return expr.name_hint if isinstance(expr, ir.GlobalVar) else tvm_ffi.structural_hash(expr, map_free_vars=True)
