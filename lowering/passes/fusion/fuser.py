"""The rewriter of all fusions of stages: it reads calls as groups, asks the target about a group, and writes its call.

A generator finds candidates in a block (Fuser.block) and passes them to `Fuser.fuse`: about forty lines for a fusion.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import replace

from tvm import ir, relax, tirx
from tvm.ir import prim
from tvm.relax.expr_functor import mutator

import schedules
from schedules.reading.epilogues import EpilogueUpdate, FusedEpilogue
from schedules.reading.matmul import MATMULS, Matmul, read_matmul
from schedules.reading.row_segments import split_segments
from schedules.reading.stages import Axis, Stage, read_stages, replace_symbols

from ...importing.checks import read_checked_tensor, replace_checked_tensor
from ...importing.origins import iterate_bindings
from ...tensorir.expressions import Expr
from ...tensorir.memo import Memo
from ...tensorir.scatter import ATTRIBUTE, CacheUpdate
from ..aliases import list_reads, read_inplace_arguments, read_kernel
from ..compile_state import CompileState
from ..main_function import BlockMutator, emit_call, rewrite_main
from .block import Block
from .group import FusionGroup


def fuse_groups(state: CompileState, find_groups: Callable[[Fuser], None]) -> CompileState:
    """Return the state with the groups of each block fused that `find_groups` passes to its argument."""
    fuser = Fuser(state, find_groups)
    return replace(state, module=rewrite_main(state.module, fuser), origins=fuser.origins)


@mutator
class Fuser(BlockMutator):
    """Fuses groups of bindings of `main`; each tensor of `main` is a buffer.

    Attributes:
        block: The current block.
        replacements: The new bindings of the block, by position.
        names: The tensor or integer of `main` that a buffer or variable stands for.
    """

    def __init__(self, state: CompileState, find_groups: Callable[[Fuser], None]) -> None:
        super().__init__(state.module)
        self.mod, self.target, self.origins = state.module, state.target.tvm, dict(state.origins)
        self.find_groups = find_groups
        body = self.mod["main"].body
        values = (body.body, *(binding.value for binding in iterate_bindings(body)))
        self.uses = Counter(var for value in values for var in list_reads(value))
        self.block = Block([], relax.Var, self.uses)
        self.replacements: dict[int, list[relax.Binding]] = {}
        self.tensors: dict[relax.Expr, tirx.Buffer] = {}
        self.names: dict[tirx.Var, relax.Expr] = {}
        self._groups: dict[relax.Var, FusionGroup] = {}
        self._functions: dict[ir.GlobalVar, tuple[list[Stage], list[Matmul]]] = {}
        self._rules = Memo[str]()

    def rewrite_block(self, bindings: Sequence[relax.Binding], kind: type[relax.Var]) -> list[relax.Binding]:
        self.block, self.replacements = Block(bindings, kind, self.uses), {}
        self.find_groups(self)
        return [new for n, binding in enumerate(bindings) for new in self.replacements.get(n, [binding])]

    # -- reading ------------------------------------------------------------------------------------------------------

    def find_rule(self, function: tirx.PrimFunc) -> str:
        """Return the name of the target's rule for a function, "" if it has none."""
        return self._rules(function, lambda function: (schedules.find_variants(function, self.target) or ("",))[0])

    def read_function(self, n: int) -> tuple[list[Stage], list[Matmul]]:
        """Return the stages and the matmuls of the function that binding n calls, none for other bindings."""
        name = read_kernel(self.block.bindings[n])
        if name is None or read_inplace_arguments(self.block.bindings[n].value):
            return [], []
        if name not in self._functions:
            stages = read_stages(self.mod[name]) or []
            self._functions[name] = stages, [matmul for stage in stages if (matmul := read_matmul(stage)) is not None]
        return self._functions[name]

    def get_buffer(self, expr: relax.Expr, name: str) -> tirx.Buffer:
        if expr not in self.tensors:
            self.bind_buffer(tirx.decl_buffer(list(expr.ty.shape.values), str(expr.ty.dtype), name), expr)
        return self.tensors[expr]

    def bind_buffer(self, buffer: tirx.Buffer, expr: relax.Expr) -> None:
        self.tensors[expr], self.names[buffer] = buffer, expr

    def read_group(self, n: int) -> FusionGroup:
        """Return the call of a function of stages as a group."""
        binding = self.block.bindings[n]
        if binding.var not in self._groups:
            self._groups[binding.var] = self._read_group(binding, self.read_function(n)[0])
        return self._groups[binding.var]

    def _read_group(self, binding: relax.Binding, stages: Sequence[Stage]) -> FusionGroup:
        name, arguments = binding.value.args[0], list(binding.value.args[1].fields)
        func, fields = self.mod[name], getattr(binding.var.ty, "fields", None)
        results = [self.block.kind(f"{binding.var.name}_{n}", ty) for n, ty in enumerate(fields or ())]
        results = results or [binding.var]
        symbols: dict[tirx.Var, Expr] = {}
        tensors: dict[tirx.Buffer, tirx.Buffer] = {}
        for param, expr in zip(func.params, (*arguments, *results), strict=True):
            if tirx.is_buffer_var(param):
                tensors[param] = self.get_buffer(expr, param.name)
                symbols.update((a, b) for a, b in zip(param.shape, expr.ty.shape.values) if isinstance(a, tirx.Var))
            else:
                symbols[param] = expr
        for stage in stages:  # calls of one function have separate intermediate buffers
            shape = [replace_symbols(extent, {}, symbols) for extent in stage.output.shape]
            tensors.setdefault(stage.output, tirx.decl_buffer(shape, stage.output.dtype, stage.output.name))
        segments = split_segments(func) or [list(stages)]
        return FusionGroup(
            name.name_hint,
            tuple([_rename_stage(stage, tensors, symbols) for stage in segment] for segment in segments),
            [self.tensors[result] for result in results],
            self.origins.get(binding.var.name, ()),
            str(func.attrs.get(MATMULS, "")),
            binding=binding,
        )

    def is_update(self, n: int) -> bool:
        """Return whether binding n is an in-place update of a cache."""
        kernel = read_kernel(self.block.bindings[n])
        is_in_place = bool(read_inplace_arguments(self.block.bindings[n].value))
        return is_in_place and ATTRIBUTE in (self.mod[kernel].attrs or {})

    def is_elementwise(self, n: int) -> bool:
        """Return whether binding n computes one tensor by an element-wise function."""
        stages, binding = self.read_function(n)[0], self.block.bindings[n]
        if not stages or any(stage.reduce for stage in stages) or not isinstance(binding.var.ty, relax.TensorType):
            return False
        return self.find_rule(self.mod[read_kernel(binding)]) == "elementwise"

    def read_update(self, n: int, rows: tirx.Buffer, stages: list[Stage]) -> FusionGroup:
        """Return the update of a cache by the result of an epilogue's stages on rows, of which its own are a view."""
        binding, result = self.block.bindings[n], stages[-1].output if stages else rows
        kernel, (cache, own_rows, *indices) = binding.value.args[0], binding.value.args[1].fields
        record = CacheUpdate.from_json(str(self.mod[kernel].attrs[ATTRIBUTE]))
        length, axis = own_rows.ty.shape.values[record.row_axis], record.row_axis
        parameter = None
        if len(result.shape) <= axis or not prim.expr_deep_equal(length, result.shape[axis]):
            parameter = tirx.Var("length", "int64")
            self.names[parameter] = length
        write_indices = self.get_buffer(indices[0], "write_indices") if indices else None
        update = EpilogueUpdate(record, result, self.get_buffer(cache, "cache"), write_indices, parameter)
        updated = self.get_buffer(binding.var, "updated")
        epilogues = (FusedEpilogue(rows, stages, update),)
        return FusionGroup("", (), (), self.origins.get(binding.var.name, ()), epilogues=epilogues, updated=(updated,))

    # -- writing ------------------------------------------------------------------------------------------------------

    def fuse(self, rule: str, group: FusionGroup, positions: Collection[int]) -> bool:
        """Replace the bindings at these positions by the group's call, at the last of them.

        Return whether that is possible: the order of bindings allows it, and that rule of the target accepts the
        group's function. Checks of sizes at these positions become checks of the first tensor argument.
        """
        trailing = self.block.find_trailing_views(positions)
        if trailing is None or not self.replacements.keys().isdisjoint((*positions, *trailing)):
            return False
        if self.find_rule(group.build_function()[0]) != rule:
            return False
        bindings = self.block.bindings
        checks = [bindings[n] for n in sorted(positions) if read_checked_tensor(bindings[n].value) is not None]
        new = self.emit_group(group, checks)
        for n in positions:
            if isinstance(bindings[n].var.ty, relax.TupleType) and read_kernel(bindings[n]) is not None:
                new.append(self.bind_tuple(bindings[n].var, self.read_group(n).outputs))
        self.replacements |= {n: [] for n in (*positions, *trailing)}
        self.replacements[max(positions)] = [*new, *(bindings[n] for n in trailing)]
        return True

    def bind_tuple(self, var: relax.Var, outputs: Sequence[tirx.Buffer]) -> relax.Binding:
        """Return the binding of a tuple that a call returned before it was fused; readers get its fields directly."""
        self.fields[var] = [self.names[buffer] for buffer in outputs]
        return relax.VarBinding(var, relax.Tuple(self.fields[var]))

    def emit_group(self, group: FusionGroup, checks: Sequence[relax.Binding] = ()) -> list[relax.Binding]:
        """Return the bindings that compute a group; its function is added to the module."""
        if group.binding is not None:
            return [group.binding]
        function, parameters = group.build_function()
        numbers: Mapping[tirx.Var, int] = {param: n for n, param in enumerate(parameters)}
        arguments = [self.names.get(param, param) for param in parameters]
        results = [self.names[buffer] for buffer in (*group.outputs, *group.updated)]
        inplace_indices = [*[-1] * len(group.outputs), *(numbers[update.cache] for update in group.updates)]
        new = []
        for check in checks:
            number = next(n for n, argument in enumerate(arguments) if isinstance(argument.ty, relax.TensorType))
            call = replace_checked_tensor(check.value, arguments[number])
            arguments[number] = relax.Var(f"{arguments[number].name}_{check.var.name}", arguments[number].ty)
            new.append(relax.VarBinding(arguments[number], self.builder_.normalize(call)))
        variable = self.builder_.add_func(function, group.name)
        new += emit_call(
            self.builder_,
            variable,
            arguments,
            inplace_indices=inplace_indices,
            results=results,
            kind=self.block.kind,
        )
        self.origins[new[len(checks)].var.name] = group.nodes
        return new


def _rename_stage(stage: Stage, tensors: Mapping[tirx.Buffer, tirx.Buffer], symbols: Mapping[tirx.Var, Expr]) -> Stage:
    axes, reduce = (
        tuple(Axis(axis.var, replace_symbols(axis.extent, {}, symbols)) for axis in group)
        for group in (stage.axes, stage.reduce)
    )
    init = None if stage.init is None else replace_symbols(stage.init, tensors, symbols)
    return Stage(tensors[stage.output], axes, reduce, init, replace_symbols(stage.value, tensors, symbols))
