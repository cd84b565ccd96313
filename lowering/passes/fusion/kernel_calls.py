"""Base of passes that change the kernel calls of a scheduled module without dataflow blocks, and their order."""

from __future__ import annotations

import abc
from collections.abc import Iterable, Sequence
from dataclasses import replace

import tvm
from tvm import ir, relax

import schedules

from ...importing.checks import read_checked_tensor
from ...importing.origins import iterate_bindings
from ...manifest import CallSpec
from ..compile_state import CompileState

_CALL, _IN_PLACE = map(ir.Op.get, ("relax.call_tir", "relax.call_tir_inplace"))


class CallRewriter(abc.ABC):
    """Rewrites the blocks of `main` by `rewrite_block`, which must maintain kernels, calls and unscheduled."""

    def __init__(self, state: CompileState) -> None:
        self.state, self.mod, self.unscheduled = state, state.module, dict(state.unscheduled)
        self.builder = relax.BlockBuilder(self.mod)
        self.kernels = {kernel.name: kernel for kernel in state.kernels}
        called = [
            binding.var for binding in iterate_bindings(self.mod["main"].body) if read_kernel(binding) is not None
        ]
        self.calls: dict[relax.Var, CallSpec] = dict(zip(called, state.calls, strict=True))
        """By the variable of the result."""

    @abc.abstractmethod
    def rewrite_block(self, bindings: Sequence[relax.Binding]) -> list[relax.Binding]:
        """Return the new bindings of a block, in execution order."""

    def build_result(self) -> CompileState:
        """Return the rewritten module, without functions that are no longer called."""
        main = self.mod["main"]
        blocks = [relax.BindingBlock(self.rewrite_block(block.bindings)) for block in main.body.blocks]
        body = relax.SeqExpr(blocks, main.body.body)
        mod = self.builder.get()
        mod["main"] = relax.Function(main.params, body, main.ret_ty, main.is_pure, main.attrs)
        calls = tuple(self.calls[binding.var] for binding in iterate_bindings(body) if binding.var in self.calls)
        called = {call.kernel for call in calls}
        removed = self.kernels.keys() - called
        functions = {variable: func for variable, func in mod.functions_items() if variable.name_hint not in removed}
        kernels = tuple(kernel for kernel in self.kernels.values() if kernel.name in called)
        return replace(
            self.state,
            module=tvm.IRModule(functions, attrs=mod.attrs),
            kernels=kernels,
            calls=calls,
            unscheduled=self.unscheduled,
        )

    def read_rule(self, binding: relax.Binding) -> str | None:
        """Return the rule that scheduled the kernel of a binding, "" for none; None if the binding calls no kernel."""
        kernel = read_kernel(binding)
        return None if kernel is None else str(self.mod[kernel].attrs.get(schedules.ATTRIBUTE, ""))


class Memory:
    """Memory accesses of bindings, recorded in execution order.

    Each memory region is named by the variable that it was allocated or passed for. A variable may be a view of several
    regions.
    """

    def __init__(self) -> None:
        self._names: dict[relax.Var, set[relax.Var]] = {}

    def record_accesses(self, binding: relax.Binding) -> tuple[set[relax.Var], set[relax.Var]]:
        """Return the names of the memory that a binding reads, and of the memory that it writes."""
        read = self.names(relax.analysis.free_vars(binding.value))
        if read_kernel(binding) is None:
            self._names[binding.var] = {binding.var, *read}
            return read, set()
        written = {binding.var, *self.names(_list_updated(binding.value))}
        self._names[binding.var] = written
        return read, written

    def names(self, variables: Iterable[relax.Var]) -> set[relax.Var]:
        return {name for var in variables for name in self._names.get(var, {var})}


def read_kernel(binding: relax.Binding) -> ir.GlobalVar | None:
    """Return the kernel that a binding calls, None if it calls none."""
    value = binding.value
    return value.args[0] if isinstance(value, relax.Call) and value.op in (_CALL, _IN_PLACE) else None


def read_inplace_arguments(value: relax.Expr) -> list[int]:
    """Return the argument that each result of a kernel call aliases, -1 for a new array; [] if all results are new."""
    return [int(index) for index in value.attrs.inplace_indices] if value.op == _IN_PLACE else []


def _list_updated(value: relax.Expr) -> list[relax.Var]:
    """Return the variables whose memory a call writes to, other than that of new results."""
    if not isinstance(value, relax.Call) or value.op != _IN_PLACE:
        return []
    return [value.args[1].fields[index] for index in read_inplace_arguments(value) if index >= 0]


def is_view(binding: relax.Binding) -> bool:
    """Return whether a binding only renames memory, checked or not."""
    value = binding.value
    if isinstance(binding, relax.MatchCast):
        return False
    is_reshape = isinstance(value, relax.Call) and value.op == ir.Op.get("relax.reshape")
    return is_reshape or isinstance(value, relax.Var | relax.TupleGetItem) or read_checked_tensor(value) is not None
