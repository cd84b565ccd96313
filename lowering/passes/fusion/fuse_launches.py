"""Launch fusion: small independent kernels become one launch (schedules/cuda/fusion/fused_launches.py), on GPUs.

In a decode step most kernels take less time than their launch: rotary embeddings of Q and K, updates of both caches,
computations on masks and positions. Groups are formed in execution order. A small kernel joins the last group, unless
it reads or writes memory that the group writes, or writes memory that the group reads. The group runs at the position
of its last kernel. Bindings between its kernels run before it, and views and checks of its results after it. The group
ends if neither is possible. It also ends before a large kernel, so that no kernel is moved past one.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import tvm_ffi
from tvm import ir, relax, tirx
from tvm.relax.expr_functor import mutator

import schedules
from schedules import KernelLaunch, merge_launches, read_launch

from ..aliases import Accesses, Memory, is_view, read_inplace_arguments, read_kernel
from ..compile_state import CompileState
from ..main_function import BlockMutator, emit_call, rewrite_main

RULE = "several"
"""The name of the rule in kernels of several (schedules.ATTRIBUTE)."""

# Rules of kernels that may be fused, or at least lie between fused kernels.
_SMALL_RULES = ("elementwise", "cache_update", "concat", "reduction", "one_number")
_MAX_KERNELS = 8  # of a launch, which takes the parameters of all


def fuse_launches(state: CompileState) -> CompileState:
    """Return the module, without dataflow blocks, with fewer launches."""
    fuser = _LaunchFuser(state)
    module = rewrite_main(state.module, fuser)
    return replace(state, module=module, origins=fuser.origins, unscheduled=fuser.unscheduled)


@dataclass
class _Group:
    """Kernels that become one launch: their calls, the memory they access, and trailing bindings."""

    members: list[relax.Binding] = field(default_factory=list)
    accesses: Accesses = field(default_factory=Accesses)
    trailing: list[relax.Binding] = field(default_factory=list)


@mutator
class _LaunchFuser(BlockMutator):
    def __init__(self, state: CompileState) -> None:
        super().__init__(state.module)
        self.mod, self.origins, self.unscheduled = state.module, dict(state.origins), dict(state.unscheduled)
        self.memory = Memory()
        self.launches: dict[ir.GlobalVar, KernelLaunch | None] = {}
        self.fused_kernels: dict[tuple[ir.GlobalVar, ...], ir.GlobalVar] = {}

    def visit_if_(self, branches: relax.If) -> relax.Expr:
        """Leave branches as they are: split_tuple_results would not split the results of a launch in them."""
        return branches

    def rewrite_block(self, bindings: Sequence[relax.Binding], kind: type[relax.Var]) -> list[relax.Binding]:
        """Return the new bindings of a block, in execution order."""
        result: list[relax.Binding] = []
        group = _Group()
        for binding in bindings:
            accesses = self.memory.record_accesses(binding)
            has_conflict = group.accesses.has_conflict_with(accesses)
            is_small = self.is_small(binding)
            is_full = is_small and len(group.members) == _MAX_KERNELS
            if is_small and self.can_join(binding, group) and not has_conflict and not is_full:
                self.add(binding, group)
            elif is_view(binding) and has_conflict:
                group.trailing.append(binding)
            elif (is_small or is_view(binding)) and not has_conflict and not is_full:
                result.append(binding)
            else:
                result += self.emit_group(group)
                group = _Group()
                if is_small and self.can_join(binding, group):
                    self.add(binding, group)
                else:
                    result.append(binding)
        return [*result, *self.emit_group(group)]

    # -- analysis -----------------------------------------------------------------------------------------------------

    def is_small(self, binding: relax.Binding) -> bool:
        """Return whether a binding calls a kernel of a rule for small kernels."""
        kernel = read_kernel(binding)
        return kernel is not None and str(self.mod[kernel].attrs.get(schedules.ATTRIBUTE, "")) in _SMALL_RULES

    def get_launch(self, binding: relax.Binding) -> KernelLaunch | None:
        """Return the launch of the kernel that a binding calls, if it has one result."""
        kernel = read_kernel(binding)
        if kernel not in self.launches:
            self.launches[kernel] = read_launch(self.mod[kernel])
        return self.launches[kernel] if isinstance(binding.var.ty, relax.TensorType) else None

    def can_join(self, binding: relax.Binding, group: _Group) -> bool:
        launch = self.get_launch(binding)
        if launch is None:
            return False
        first = self.get_launch(group.members[0]) if group.members else launch
        return first is not None and first.threads == launch.threads

    # -- groups -------------------------------------------------------------------------------------------------------

    def add(self, binding: relax.Binding, group: _Group) -> None:
        group.members.append(binding)
        group.accesses.add(self.memory.record_accesses(binding))

    def emit_group(self, group: _Group) -> list[relax.Binding]:
        """Return the bindings of a group."""
        members = group.members
        if len(members) < 2:
            return [*members, *group.trailing]
        arguments: list[Any] = []
        inplace_indices: list[int] = []
        for member in members:
            inplace_indices += [len(arguments) + n for n in read_inplace_arguments(member.value)] or [-1]
            arguments += member.value.args[1].fields
        kernel = self.make_kernel([member.value.args[0] for member in members], inplace_indices)
        results = [member.var for member in members]
        bindings = emit_call(self.builder_, kernel, arguments, inplace_indices=inplace_indices, results=results)
        nodes = dict.fromkeys(node for member in members for node in self.origins.get(member.var.name, ()))
        self.origins[bindings[0].var.name] = tuple(nodes)
        return [*bindings, *group.trailing]

    def make_kernel(self, kernels: Sequence[ir.GlobalVar], inplace_indices: Sequence[int]) -> ir.GlobalVar:
        """Return the function of these kernels in one launch; it takes their arguments, then their new results."""
        key = tuple(kernels)
        if key not in self.fused_kernels:
            names = [kernel.name_hint for kernel in kernels]
            has_new_result = [index < 0 for index in inplace_indices]
            functions = [_renew_variables(self.mod[kernel]) for kernel in kernels]
            launches = [launch for launch in map(read_launch, functions) if launch is not None]
            sources = dict.fromkeys(str(func.attrs.get(schedules.SOURCE, "")) for func in functions)
            attributes = {"tirx.noalias": True, "op_pattern": 8, schedules.ATTRIBUTE: RULE}
            attributes[schedules.SOURCE] = "; ".join(filter(None, sources))
            func = tirx.PrimFunc(_list_parameters(functions, has_new_result), merge_launches(launches))
            self.fused_kernels[key] = self.builder_.add_func(func.with_attr(attributes), "_and_".join(names))
            plain = [_renew_variables(self.unscheduled[name]) for name in names]
            body = tirx.stmt_seq(*(member.body for member in plain))
            parameters = _list_parameters(plain, has_new_result)
            self.unscheduled[self.fused_kernels[key].name_hint] = tirx.PrimFunc(parameters, body)
        return self.fused_kernels[key]


def _renew_variables(func: tirx.PrimFunc) -> tirx.PrimFunc:
    """Return the function with unique variables, as it may occur twice."""
    return tvm_ffi.get_global_func("s_tir.RenewDefs")(func)


def _list_parameters(functions: Sequence[tirx.PrimFunc], has_new_result: Sequence[bool]) -> list[tirx.Var]:
    """Return the arguments of all functions, then the last parameters of those with a new result."""
    arguments = [
        p for func, is_new in zip(functions, has_new_result) for p in (func.params[:-1] if is_new else func.params)
    ]
    return [*arguments, *(func.params[-1] for func, is_new in zip(functions, has_new_result) if is_new)]
