"""Small kernels that do not depend on each other are one launch (schedules/cuda/fused_launches.py), on GPUs.

In a decode step most kernels take less time than their launch: rotary embeddings of Q and K, updates of the caches of
both, what is computed of masks and positions. A group is put together along the order of execution: a small kernel
joins the last group, unless it reads or writes what that writes, or writes what that reads. The group runs where its
last kernel stood. What stands between its kernels runs before it, and views and checks of its results behind it; where
neither is possible the group ends, as it does in front of a large kernel, so that none is moved along one.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import tvm_ffi
from tvm import ir, relax, tirx

import schedules
from schedules.cuda.fused_launches import KernelLaunch, merge_launches, read_launch

from ..manifest import CallSpec
from .costs import kernel_spec
from .kernel_calls import CallRewriter, Memory, is_view, kernel_of, places_in
from .kernels import Scheduled

RULE = "several"
"""What stands for a rule in kernels that are several (schedules.ATTRIBUTE)."""

# What may be joined, or at least stand between what is.
_SMALL = ("elementwise", "cache_update", "concat", "reduction", "one_number")
_MOST = 8  # kernels of a launch, which takes the parameters of all


def fuse_launches(scheduled: Scheduled) -> Scheduled:
    """The module, without dataflow blocks, in fewer launches."""
    return _Fuser(scheduled).result()


@dataclass
class _Group:
    """Kernels that are to be one launch: their calls, the variables whose memory they touch, and the bindings that are
    to follow them."""

    members: list[relax.Binding] = field(default_factory=list)
    read: set[relax.Var] = field(default_factory=set)
    written: set[relax.Var] = field(default_factory=set)
    behind: list[relax.Binding] = field(default_factory=list)

    def meets(self, read: set[relax.Var], written: set[relax.Var]) -> bool:
        """Whether what touches this memory must keep its place behind or in front of the group."""
        return bool((read | written) & self.written or written & self.read)


class _Fuser(CallRewriter):
    def __init__(self, scheduled: Scheduled) -> None:
        super().__init__(scheduled)
        self.memory = Memory()
        self.launches: dict[ir.GlobalVar, KernelLaunch | None] = {}
        self.made: dict[tuple[ir.GlobalVar, ...], ir.GlobalVar] = {}

    def rewritten(self, given: Sequence[relax.Binding]) -> list[relax.Binding]:
        result: list[relax.Binding] = []
        group = _Group()
        for binding in given:
            read, written = self.memory.touched(binding)
            meets = group.meets(read, written)
            small = self.rule(binding) in _SMALL
            full = small and len(group.members) == _MOST
            if small and self.fits(binding, group) and not meets and not full:
                self.add(binding, group)
            elif is_view(binding) and meets:
                group.behind.append(binding)
            elif (small or is_view(binding)) and not meets and not full:
                result.append(binding)
            else:
                result += self.bound(group)
                group = _Group()
                if small and self.fits(binding, group):
                    self.add(binding, group)
                else:
                    result.append(binding)
        return [*result, *self.bound(group)]

    # -- questions ----------------------------------------------------------------------------------------------------

    def launch(self, binding: relax.Binding) -> KernelLaunch | None:
        """That of the kernel which a binding calls, for one tensor."""
        kernel = kernel_of(binding)
        if kernel not in self.launches:
            self.launches[kernel] = read_launch(self.mod[kernel])
        return self.launches[kernel] if isinstance(binding.var.ty, relax.TensorType) else None

    def fits(self, binding: relax.Binding, group: _Group) -> bool:
        launch = self.launch(binding)
        if launch is None:
            return False
        first = self.launch(group.members[0]) if group.members else launch
        return first is not None and first.threads == launch.threads

    # -- groups -------------------------------------------------------------------------------------------------------

    def add(self, binding: relax.Binding, group: _Group) -> None:
        read, written = self.memory.touched(binding)
        group.members.append(binding)
        group.read |= read
        group.written |= written

    def bound(self, group: _Group) -> Iterator[relax.Binding]:
        """The bindings of a group."""
        members = group.members
        if len(members) < 2:
            yield from (*members, *group.behind)
            return
        arguments: list[Any] = []
        places: list[int] = []
        for member in members:
            places += [len(arguments) + n for n in places_in(member.value)] or [-1]
            arguments += member.value.args[1].fields
        types = [member.var.ty for member in members]
        kernel = self.kernel([member.value.args[0] for member in members], places)
        if max(places) < 0:
            call = relax.call_tir(kernel, relax.Tuple(arguments), types)
        else:
            call = relax.op.call_tir_inplace(kernel, relax.Tuple(arguments), places, types)
        results = relax.Var("_".join(member.var.name for member in members), relax.TupleType(types))
        yield relax.VarBinding(results, self.builder.normalize(call))
        for n, member in enumerate(members):
            yield relax.VarBinding(member.var, self.builder.normalize(relax.TupleGetItem(results, n)))
        nodes = dict.fromkeys(node for member in members for node in self.calls.pop(member.var).nodes)
        self.calls[results] = CallSpec(kernel.name_hint, tuple(nodes))
        yield from group.behind

    def kernel(self, parts: Sequence[ir.GlobalVar], places: Sequence[int]) -> ir.GlobalVar:
        """The function of these in one launch: it takes what they take, in their order, then what they make anew."""
        key = tuple(parts)
        if key not in self.made:
            names = [part.name_hint for part in parts]
            made = [place < 0 for place in places]
            functions = [_renamed(self.mod[part]) for part in parts]
            launches = [launch for launch in map(read_launch, functions) if launch is not None]
            attributes = {"tirx.noalias": True, "op_pattern": 8, schedules.ATTRIBUTE: RULE}
            func = tirx.PrimFunc(_parameters(functions, made), merge_launches(launches)).with_attr(attributes)
            self.made[key] = self.builder.add_func(func, "_and_".join(names))
            plain = [_renamed(self.unscheduled[name]) for name in names]
            body = tirx.stmt_seq(*(each.body for each in plain))
            name = self.made[key].name_hint
            self.unscheduled[name] = tirx.PrimFunc(_parameters(plain, made), body)
            spec = kernel_spec(name, self.unscheduled[name], RULE)
            sources = dict.fromkeys(self.kernels[each].source for each in names)
            self.kernels[name] = dataclasses.replace(spec, source="; ".join(filter(None, sources)))
        return self.made[key]


def _renamed(func: tirx.PrimFunc) -> tirx.PrimFunc:
    """The function with variables of its own, as it may be there twice."""
    return tvm_ffi.get_global_func("s_tir.RenewDefs")(func)


def _parameters(functions: Sequence[tirx.PrimFunc], made: Sequence[bool]) -> list[tirx.Var]:
    """What all functions take, and then the results of those that make one anew, their last parameters."""
    taken = [p for func, new in zip(functions, made) for p in (func.params[:-1] if new else func.params)]
    return [*taken, *(func.params[-1] for func, new in zip(functions, made) if new)]
