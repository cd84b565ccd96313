"""For passes that change which kernels a scheduled module without dataflow blocks calls, and in which order."""

from __future__ import annotations

import abc
from collections.abc import Iterable, Sequence

import tvm
from tvm import ir, relax

import schedules

from ..importing.checks import checked
from ..importing.origins import bindings
from ..manifest import CallSpec
from .kernels import Scheduled

_CALL, _IN_PLACE = map(ir.Op.get, ("relax.call_tir", "relax.call_tir_inplace"))


class CallRewriter(abc.ABC):
    """Writes the blocks of `main` anew by `rewritten`, which has to keep kernels, calls and unscheduled right."""

    def __init__(self, scheduled: Scheduled) -> None:
        self.mod, self.unscheduled = scheduled.module, dict(scheduled.unscheduled)
        self.builder = relax.BlockBuilder(self.mod)
        self.kernels = {kernel.name: kernel for kernel in scheduled.kernels}
        called = [binding.var for binding in bindings(self.mod["main"].body) if kernel_of(binding) is not None]
        self.calls: dict[relax.Var, CallSpec] = dict(zip(called, scheduled.calls, strict=True))
        """By the variable of the result."""

    @abc.abstractmethod
    def rewritten(self, given: Sequence[relax.Binding]) -> list[relax.Binding]:
        """The bindings of a block, in their order of execution."""

    def result(self) -> Scheduled:
        """What comes out, without functions that are not called any more."""
        main = self.mod["main"]
        blocks = [relax.BindingBlock(self.rewritten(block.bindings)) for block in main.body.blocks]
        body = relax.SeqExpr(blocks, main.body.body)
        mod = self.builder.get()
        mod["main"] = relax.Function(main.params, body, main.ret_ty, main.is_pure, main.attrs)
        calls = tuple(self.calls[binding.var] for binding in bindings(body) if binding.var in self.calls)
        called = {call.kernel for call in calls}
        gone = self.kernels.keys() - called
        functions = {variable: func for variable, func in mod.functions_items() if variable.name_hint not in gone}
        kernels = tuple(kernel for kernel in self.kernels.values() if kernel.name in called)
        return Scheduled(tvm.IRModule(functions, attrs=mod.attrs), kernels, calls, self.unscheduled)

    def rule(self, binding: relax.Binding) -> str | None:
        """The one that made the kernel which a binding calls, "" for none; None where it calls none."""
        kernel = kernel_of(binding)
        return None if kernel is None else str(self.mod[kernel].attrs.get(schedules.ATTRIBUTE, ""))


class Memory:
    """What bindings touch, asked for in the order of execution.

    A piece of memory goes by the variable that it was allocated or given for; a variable may be a view of several.
    """

    def __init__(self) -> None:
        self._names: dict[relax.Var, set[relax.Var]] = {}

    def touched(self, binding: relax.Binding) -> tuple[set[relax.Var], set[relax.Var]]:
        """The names of what a binding reads, and of what it writes."""
        read = self.names(relax.analysis.free_vars(binding.value))
        if kernel_of(binding) is None:
            self._names[binding.var] = {binding.var, *read}
            return read, set()
        written = {binding.var, *self.names(_updated(binding.value))}
        self._names[binding.var] = written
        return read, written

    def names(self, variables: Iterable[relax.Var]) -> set[relax.Var]:
        return {name for var in variables for name in self._names.get(var, {var})}


def kernel_of(binding: relax.Binding) -> ir.GlobalVar | None:
    """What a binding calls that is a kernel."""
    value = binding.value
    return value.args[0] if isinstance(value, relax.Call) and value.op in (_CALL, _IN_PLACE) else None


def places_in(value: relax.Expr) -> list[int]:
    """Which arguments a call of a kernel works on in place, by result; [] where all results are new."""
    return [int(place) for place in value.attrs.inplace_indices] if value.op == _IN_PLACE else []


def _updated(value: relax.Expr) -> list[relax.Var]:
    """The variables whose memory a call writes to, beside that of new results."""
    if not isinstance(value, relax.Call) or value.op != _IN_PLACE:
        return []
    return [value.args[1].fields[place] for place in places_in(value) if place >= 0]


def is_view(binding: relax.Binding) -> bool:
    """Whether a binding gives memory another name, having checked it or not, and does nothing else."""
    value = binding.value
    if isinstance(binding, relax.MatchCast):
        return False
    is_reshape = isinstance(value, relax.Call) and value.op == ir.Op.get("relax.reshape")
    return is_reshape or isinstance(value, relax.Var | relax.TupleGetItem) or checked(value) is not None
