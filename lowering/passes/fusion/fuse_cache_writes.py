"""Kernels that compute new rows of a cache store them directly, on GPUs (schedules/cuda/cache/cache_rows.py).

The keys of a decoder are rotated, written, read again and moved to their slots by two small kernels, of which one waits
for the other. If an in-place update is the only reader of an element-wise kernel's result, one kernel does both, at the
position of the update. Its inputs must not be written before that, nor by the update.
"""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Sequence
from typing import Any

from tvm import ir, relax, tirx

import schedules
from schedules import ThreadTiles, emit_cache_rows, read_launch

from ...importing.checks import read_checked_tensor, replace_checked_tensor
from ...importing.origins import iterate_bindings
from ...manifest import CallSpec
from ...tensorir.scatter import ATTRIBUTE, CacheUpdate
from ..compile_state import CompileState
from ..costs import make_kernel_spec
from .kernel_calls import CallRewriter, Memory, is_view, read_inplace_arguments

_UPDATE = "cache_update"  # name of the rule


def fuse_cache_writes(state: CompileState) -> CompileState:
    """Return the module, without dataflow blocks, with in-place updates that compute their rows."""
    return _CacheWriteFuser(state).build_result()


class _CacheWriteFuser(CallRewriter):
    def __init__(self, state: CompileState) -> None:
        super().__init__(state)
        body = self.mod["main"].body
        self.readers: Counter[relax.Var] = Counter()
        for expr in (body.body, *(binding.value for binding in iterate_bindings(body))):
            self.readers.update(relax.analysis.free_vars(expr))
        self.fused_kernels: dict[tuple[ir.GlobalVar, ir.GlobalVar], ir.GlobalVar | None] = {}

    def rewrite_block(self, bindings: Sequence[relax.Binding]) -> list[relax.Binding]:
        memory = Memory()
        accesses = [memory.record_accesses(binding) for binding in bindings]
        positions = {binding.var: n for n, binding in enumerate(bindings)}
        new: dict[int, relax.Binding | None] = {}  # by position: the new binding
        for position, updated in enumerate(bindings):
            if not self.is_update(updated):
                continue
            rows, views = updated.value.args[1].fields[1], list[relax.Binding]()
            while rows in positions and self.readers[rows] == 1 and is_view(bindings[positions[rows]]):
                views.insert(0, bindings[positions[rows]])
                rows = _get_viewed(views[0].value)
            first = positions.get(rows, position)
            written = set().union(*(accesses[n][1] for n in range(first + 1, position + 1)))
            if self.is_computed(bindings[first]) and not accesses[first][0] & written:
                replacements = self.fuse_update(bindings[first], views, updated)
                new |= dict.fromkeys([first, *(positions[view.var] for view in views)] if replacements else [])
                new |= {positions[old.var]: binding for old, binding in replacements}
        return [b for n, binding in enumerate(bindings) if (b := new.get(n, binding)) is not None]

    def is_update(self, binding: relax.Binding) -> bool:
        """Return whether the binding is an in-place cache update."""
        return self.read_rule(binding) == _UPDATE and bool(read_inplace_arguments(binding.value))

    def is_computed(self, binding: relax.Binding) -> bool:
        """Return whether an element-wise kernel computes one tensor, which is read once."""
        is_one = isinstance(binding.var.ty, relax.TensorType) and self.readers[binding.var] == 1
        return self.read_rule(binding) == "elementwise" and is_one

    def fuse_update(
        self, producer: relax.Binding, views: list[relax.Binding], updated: relax.Binding
    ) -> list[tuple[relax.Binding, relax.Binding]]:
        """Return the replacement of each binding, the call for both last; [] if they cannot be fused.

        Checks of the rows become checks of the kernel's first tensor.
        """
        arguments, (cache, rows, *indices) = list(producer.value.args[1].fields), updated.value.args[1].fields
        kernel = self.get_fused_kernel(producer.value.args[0], updated.value.args[0])
        checks = [view for view in views if read_checked_tensor(view.value) is not None]
        tensors = [
            n for n, x in enumerate(arguments) if isinstance(x, relax.Var) and isinstance(x.ty, relax.TensorType)
        ]
        checked_index = tensors[0] if tensors else -1
        if kernel is None or (checks and checked_index < 0):
            return []
        replacements: list[tuple[relax.Binding, relax.Binding]] = []
        for check in checks:
            value = arguments[checked_index]
            call = replace_checked_tensor(check.value, value)
            arguments[checked_index] = relax.Var(f"{value.name}_{check.var.name}", value.ty)
            replacements.append((check, relax.VarBinding(arguments[checked_index], self.builder.normalize(call))))
        update = _read_update(self.mod[updated.value.args[0]])
        length = [] if update.length is not None else [rows.ty.shape.values[update.row_axis]]
        call_arguments = relax.Tuple([*arguments, cache, *indices, *length])
        call = relax.op.call_tir_inplace(kernel, call_arguments, [len(arguments)], [updated.var.ty])
        nodes = dict.fromkeys((*self.calls.pop(producer.var).nodes, *self.calls[updated.var].nodes))
        self.calls[updated.var] = CallSpec(kernel.name_hint, tuple(nodes))
        return [*replacements, (updated, relax.VarBinding(updated.var, self.builder.normalize(call)))]

    def get_fused_kernel(self, producer: ir.GlobalVar, updated: ir.GlobalVar) -> ir.GlobalVar | None:
        """Return the function that computes both, None if there is none."""
        if (producer, updated) not in self.fused_kernels:
            self.fused_kernels[producer, updated] = self.make_fused_kernel(producer, updated)
        return self.fused_kernels[producer, updated]

    def make_fused_kernel(self, producer: ir.GlobalVar, updated: ir.GlobalVar) -> ir.GlobalVar | None:
        update, launch = _read_update(self.mod[updated]), read_launch(self.mod[producer])
        plain, update_func = self.unscheduled[producer.name_hint], self.unscheduled[updated.name_hint]
        func = None if launch is None else emit_cache_rows(plain, update, ThreadTiles(launch.threads))
        if func is None:
            return None
        variable = self.builder.add_func(
            func.with_attr(schedules.ATTRIBUTE, _UPDATE), f"{producer.name_hint}_into_cache"
        )
        cache, rows, *indices = update_func.params
        length = [] if update.length is not None else [rows.shape[update.row_axis]]
        parameters, name = [*plain.params[:-1], cache, *indices, *length], variable.name_hint
        self.unscheduled[name] = tirx.PrimFunc(parameters, tirx.stmt_seq(plain.body, update_func.body))
        spec = make_kernel_spec(name, self.unscheduled[name], _UPDATE)
        self.kernels[name] = dataclasses.replace(spec, source=self.kernels[producer.name_hint].source)
        return variable


def _read_update(func: tirx.PrimFunc) -> CacheUpdate:
    return CacheUpdate.from_json(str(func.attrs[ATTRIBUTE]))


def _get_viewed(value: relax.Expr) -> Any:
    """Return the source of a view."""
    if isinstance(value, relax.Var):
        return value
    if isinstance(value, relax.TupleGetItem):
        return value.tuple_value
    return read_checked_tensor(value) if read_checked_tensor(value) is not None else value.args[0]
