"""Epilogue fusion: RoPE and KV-cache stores are fused into the matmul, if the target has a kernel for both, on GPUs.

The keys of a decoder are rotated and stored in a cache, its values are stored there, its queries are rotated: in a
decode step a launch that reads three small tensors from memory and writes them again. With few rows the thread blocks
of the matmul do it (schedules/cuda/fusion/fused_epilogues.py); with more, a launch after the matmul.

A result has an epilogue if a single function reads it: an in-place update of a cache, or an element-wise function,
whose result may in turn be used by such an update. The matmul moves to the position of the last of them, unless a
binding in between accesses the same memory.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

import tvm
from tvm import ir, relax, tirx
from tvm.ir import prim
from tvm.relax.expr_functor import mutator

import schedules
from schedules.reading.epilogues import EPILOGUES, EpilogueSpec, EpilogueUpdate, to_json
from schedules.reading.matmul import read_matmul
from schedules.reading.row_segments import SEGMENTS
from schedules.reading.stages import Axis, Stage

from ...importing.checks import read_checked_tensor, replace_checked_tensor
from ...importing.origins import Origins, iterate_bindings
from ...tensorir.scatter import ATTRIBUTE, CacheUpdate
from ..compile_state import CompileState
from ..main_function import BlockMutator, rewrite_main
from .kernel_calls import Memory, is_view, read_inplace_arguments, read_kernel
from .stage_calls import FunctionMemo, StageCall, StageCalls, list_reads

_MIN_EPILOGUES = 2  # a single one may not save a launch


def fuse_epilogues(state: CompileState) -> CompileState:
    """Fuse RoPE and KV-cache stores into matmuls of a module without dataflow blocks."""
    fuser = _EpilogueFuser(state.module, state.target.tvm, state.origins)
    return replace(state, module=rewrite_main(state.module, fuser), origins=fuser.calls.origins)


@dataclass(frozen=True)
class _FusedEpilogue:
    """The epilogue of output `number` of a matmul.

    elementwise and update are the positions of the element-wise function and of the cache update in the block, None if
    absent; `views` are the bindings between them.
    """

    number: int
    elementwise: int | None
    update: int | None
    views: tuple[int, ...]

    @property
    def positions(self) -> list[int]:
        return [position for position in (self.elementwise, self.update) if position is not None]


@mutator
class _EpilogueFuser(BlockMutator):
    def __init__(self, mod: tvm.IRModule, target: tvm.target.Target, origins: Origins) -> None:
        super().__init__(mod)
        self.mod, self.calls = mod, StageCalls(mod, origins)
        self.variants = FunctionMemo(lambda function: schedules.find_variants(function, target))
        body = mod["main"].body
        self.uses: dict[relax.Var, int] = {}
        for value in (body.body, *(binding.value for binding in iterate_bindings(body))):
            for var in list_reads(value):
                self.uses[var] = self.uses.get(var, 0) + 1

    def rewrite_block(self, bindings: Sequence[relax.Binding], kind: type[relax.Var]) -> list[relax.Binding]:
        memory = Memory()
        block = _BlockAccesses(bindings, [memory.record_accesses(binding) for binding in bindings], self.uses)
        replacements: dict[int, list[relax.Binding]] = {}
        for n, binding in enumerate(bindings):
            stages = self.calls.find_stages(binding)
            if stages is not None and any(map(read_matmul, stages)):
                replacements |= self.fuse_matmul(block, n, stages, kind)
        return [new for n, binding in enumerate(bindings) for new in replacements.get(n, [binding])]

    # -- analysis -----------------------------------------------------------------------------------------------------

    def fuse_matmul(
        self, block: _BlockAccesses, n: int, stages: list[Stage], kind: type[relax.Var]
    ) -> dict[int, list[relax.Binding]]:
        """Return the replacements of bindings for matmul n with its epilogues; {} if it has none."""
        epilogues = [
            epilogue
            for views in block.find_single_reads(n)
            if (epilogue := self.read_epilogue(block, *views)) is not None
        ]
        if len(epilogues) < _MIN_EPILOGUES or not any(self.does_arithmetic(block, epilogue) for epilogue in epilogues):
            return {}
        fused = {n, *(position for epilogue in epilogues for position in (*epilogue.positions, *epilogue.views))}
        last = max(position for epilogue in epilogues for position in epilogue.positions)
        trailing = block.find_trailing_views(fused, last)
        if trailing is None or not block.are_independent(n, epilogues, fused):
            return {}
        call = self.emit_fused_call(block, n, stages, epilogues, kind)
        if not call:
            return {}
        removed: dict[int, list[relax.Binding]] = {position: [] for position in (*fused, *trailing)}
        return removed | {last: [*call, *(block.bindings[position] for position in trailing)]}

    def read_epilogue(
        self, block: _BlockAccesses, number: int, views: Sequence[int], reader: int
    ) -> _FusedEpilogue | None:
        """Return the epilogue of an output, or of a view of it, that a single binding reads; None if it is not one."""
        if self.is_update(block, reader):
            return _FusedEpilogue(number, None, reader, tuple(views))
        stages = self.calls.find_stages(block.bindings[reader])
        is_tensor = isinstance(block.bindings[reader].var.ty, relax.TensorType)
        if stages is None or not is_tensor or any(stage.reduce for stage in stages):
            return None
        variant = self.variants(self.mod[read_kernel(block.bindings[reader])])
        if variant is None or variant[0] != "elementwise":
            return None
        sole_reader = block.find_sole_reader(block.bindings[reader].var)
        if sole_reader is not None and self.is_update(block, sole_reader[1]):
            return _FusedEpilogue(number, reader, sole_reader[1], (*views, *sole_reader[0]))
        return _FusedEpilogue(number, reader, None, tuple(views))

    def does_arithmetic(self, block: _BlockAccesses, epilogue: _FusedEpilogue) -> bool:
        """Return whether an epilogue does more than transpose.

        Encoders only transpose results, have many rows, and would gain nothing.
        """
        stages = (
            [] if epilogue.elementwise is None else self.calls.find_stages(block.bindings[epilogue.elementwise]) or []
        )
        return epilogue.update is not None or any(not isinstance(stage.value, ir.TensorLoad) for stage in stages)

    def is_update(self, block: _BlockAccesses, position: int) -> bool:
        """Return whether the binding is an in-place update of a cache."""
        kernel = read_kernel(block.bindings[position])
        attributes = None if kernel is None else self.mod[kernel].attrs
        return (
            attributes is not None
            and ATTRIBUTE in attributes
            and bool(read_inplace_arguments(block.bindings[position].value))
        )

    # -- the fused call -----------------------------------------------------------------------------------------------

    def emit_fused_call(
        self,
        block: _BlockAccesses,
        n: int,
        stages: list[Stage],
        epilogues: Sequence[_FusedEpilogue],
        kind: type[relax.Var],
    ) -> list[relax.Binding]:
        """Return the call of the matmul with its epilogues, and the bindings of its results.

        Return [] if the target has no kernel for it.
        """
        matmul = block.bindings[n]
        attributes = self.mod[read_kernel(matmul)].attrs
        call = self.calls.read_call(matmul, stages, kind)
        stage_counts = [int(count) for count in attributes.get(SEGMENTS, (len(stages),))]
        all_stages, outputs = list(call.stages), list(call.outputs)
        names, nodes = [call.name], dict.fromkeys(call.nodes)
        updates: list[EpilogueUpdate | None] = []
        for epilogue in epilogues:
            rows = call.outputs[epilogue.number]
            if epilogue.elementwise is not None:
                elementwise = block.bindings[epilogue.elementwise]
                elementwise_call = self.calls.read_call(elementwise, self.calls.find_stages(elementwise) or [], kind)
                heads = self.make_heads_stage(rows, block.find_view(n, epilogue))
                if heads is None:
                    return []
                all_stages += [heads, *elementwise_call.stages]
                stage_counts.append(1 + len(elementwise_call.stages))
                names.append(elementwise_call.name)
                nodes |= dict.fromkeys(elementwise_call.nodes)
                rows = elementwise_call.stages[-1].output
                if epilogue.update is None:
                    outputs += elementwise_call.outputs
            update = None if epilogue.update is None else self.read_update(block.bindings[epilogue.update], rows)
            if epilogue.update is not None:
                if update is None:
                    return []
                nodes |= dict.fromkeys(self.calls.origins.get(block.bindings[epilogue.update].var.name, ()))
            updates.append(update)
        item = StageCall("_".join(names), all_stages, outputs, tuple(nodes), call.matmul_mode, None,
                         tuple(stage_counts), tuple(update for update in updates if update is not None))  # fmt: skip
        return self.emit_call(block, n, item, call, list(zip(epilogues, updates)), kind)

    def read_update(self, binding: relax.Binding, rows: tirx.Buffer) -> EpilogueUpdate | None:
        """Return the update of a cache with these rows, of which its own are a view; None if the rows are different."""
        kernel, (cache, own_rows, *indices) = binding.value.args[0], binding.value.args[1].fields
        record = CacheUpdate.from_json(str(self.mod[kernel].attrs[ATTRIBUTE]))
        axis = record.row_axis
        if len(rows.shape) <= axis or not prim.expr_deep_equal(own_rows.ty.shape.values[axis], rows.shape[axis]):
            return None
        write_indices = self.calls.get_buffer(indices[0], "write_indices") if indices else None
        return EpilogueUpdate(record, rows, self.calls.get_buffer(cache, "cache"), write_indices)

    def make_heads_stage(self, rows: tirx.Buffer, shown: relax.Expr) -> Stage | None:
        """Return a stage that views a result [..., N] as heads [..., H, D]; None for another view."""
        heads = self.calls.get_buffer(shown, "heads")
        *lead, H, D = heads.shape
        *outer, N = rows.shape
        has_same_outer = len(lead) == len(outer) and all(map(prim.expr_deep_equal, lead, outer))
        splits_columns = all(isinstance(size, tirx.IntImm) for size in (H, D, N)) and int(H) * int(D) == int(N)
        if heads.same_as(rows) or not has_same_outer or not splits_columns:
            return None
        axes = tuple(Axis(tirx.Var(f"v{k}", "int64"), extent) for k, extent in enumerate(heads.shape))
        *row, h, d = (axis.var for axis in axes)
        return Stage(heads, axes, (), None, tirx.BufferLoad(rows, [*row, h * D + d]))

    def emit_call(
        self,
        block: _BlockAccesses,
        n: int,
        item: StageCall,
        matmul: StageCall,
        epilogues: Sequence[tuple[_FusedEpilogue, EpilogueUpdate | None]],
        kind: type[relax.Var],
    ) -> list[relax.Binding]:
        function, parameters = item.build_function()
        numbers: Mapping[tirx.Var, int] = {param: k for k, param in enumerate([*parameters, *item.outputs])}
        described, caches = [], []
        for epilogue, update in epilogues:
            rows, has_stages = numbers[matmul.outputs[epilogue.number]], epilogue.elementwise is not None
            if epilogue.update is None or update is None:
                described.append(EpilogueSpec(rows, has_stages))
                continue
            positions = [numbers[buffer] for buffer in update.inputs()]
            described.append(EpilogueSpec(rows, has_stages, update.record.to_json(), *positions))
            caches.append((positions[0], block.bindings[epilogue.update].var))
        function = function.with_attr(EPILOGUES, to_json(described))
        variant = self.variants(function)
        if variant is None or variant[0] != schedules.EPILOGUE_MATMUL:
            return []
        results = [self.calls.names[buffer] for buffer in item.outputs]
        arguments = [self.calls.names.get(var, var) for var in parameters]
        new_bindings = list(self.move_checks(block, [epilogue for epilogue, _ in epilogues], arguments))
        variable = self.builder_.add_func(function, item.name)
        result_vars = [*results, *(var for _, var in caches)]
        types = [var.ty for var in result_vars]
        call_arguments = relax.Tuple(arguments)
        if caches:
            positions = [*[-1] * len(results), *(position for position, _ in caches)]
            value = relax.op.call_tir_inplace(variable, call_arguments, positions, types)
        else:
            value = relax.call_tir(variable, call_arguments, types)
        results_tuple = kind("_".join(var.name for var in result_vars), relax.TupleType(types))
        self.calls.origins[results_tuple.name] = item.nodes
        new_bindings.append(relax.VarBinding(results_tuple, self.builder_.normalize(value)))
        for k, var in enumerate(result_vars):
            new_bindings.append(relax.VarBinding(var, self.builder_.normalize(relax.TupleGetItem(results_tuple, k))))
        var = block.bindings[n].var
        if var not in results:
            self.fields[var] = results[: len(matmul.outputs)]
        return new_bindings

    def move_checks(
        self, block: _BlockAccesses, epilogues: Sequence[_FusedEpilogue], arguments: list[relax.Expr]
    ) -> Iterator[relax.Binding]:
        """Yield checks of sizes of removed tensors, as checks of the first tensor argument."""
        for position in sorted({position for epilogue in epilogues for position in epilogue.views}):
            binding = block.bindings[position]
            if read_checked_tensor(binding.value) is None:
                continue
            checked_index = next(k for k, x in enumerate(arguments) if isinstance(x.ty, relax.TensorType))
            value = arguments[checked_index]
            call = replace_checked_tensor(binding.value, value)
            arguments[checked_index] = relax.Var(f"{value.name}_{binding.var.name}", value.ty)
            yield relax.VarBinding(arguments[checked_index], self.builder_.normalize(call))


class _BlockAccesses:
    """The bindings of a block in execution order, their memory accesses, and the number of uses of each variable."""

    def __init__(
        self,
        bindings: Sequence[relax.Binding],
        accesses: Sequence[tuple[set[relax.Var], set[relax.Var]]],
        uses: Mapping[relax.Var, int],
    ) -> None:
        self.bindings, self.accesses, self.uses = bindings, accesses, uses
        self.readers: dict[relax.Var, list[int]] = {}
        for n, binding in enumerate(bindings):
            for var in list_reads(binding.value):
                self.readers.setdefault(var, []).append(n)

    def find_single_reads(self, n: int) -> Iterator[tuple[int, tuple[int, ...], int]]:
        """Yield the outputs of call n with a single reader: output number, views in between, reader's position."""
        for number, views, var in self.outputs(n):
            sole_reader = self.find_sole_reader(var)
            if sole_reader is not None:
                yield number, (*views, *sole_reader[0]), sole_reader[1]

    def outputs(self, n: int) -> Iterator[tuple[int, tuple[int, ...], relax.Var]]:
        """Yield the tensors that a call returns by number, and the single binding that reads each off its tuple."""
        var = self.bindings[n].var
        if isinstance(var.ty, relax.TensorType):
            yield 0, (), var
            return
        positions = self.readers.get(var, [])
        numbers = [value.index for value in (self.bindings[position].value for position in positions)
                 if isinstance(value, relax.TupleGetItem)]  # fmt: skip
        if len(numbers) == self.uses.get(var, 0):
            for position, number in zip(positions, numbers):
                if numbers.count(number) == 1:
                    yield int(number), (position,), self.bindings[position].var

    def find_sole_reader(self, var: relax.Var) -> tuple[tuple[int, ...], int] | None:
        """Return the views between a tensor and its sole reader, and the reader's position; None if it has several."""
        views: tuple[int, ...] = ()
        while self.uses.get(var, 0) == 1 and len(self.readers.get(var, [])) == 1:
            (position,) = self.readers[var]
            binding = self.bindings[position]
            if not is_view(binding):
                return views, position
            if not isinstance(binding.var.ty, relax.TensorType):
                return None
            views, var = (*views, position), binding.var
        return None

    def find_view(self, n: int, epilogue: _FusedEpilogue) -> relax.Expr:
        """Return the tensor that an epilogue's function reads of the results of matmul n."""
        assert epilogue.elementwise is not None
        read = list_reads(self.bindings[epilogue.elementwise].value)
        return next(var for position in (n, *epilogue.views) if (var := self.bindings[position].var) in read)

    def are_independent(self, n: int, epilogues: Sequence[_FusedEpilogue], fused: set[int]) -> bool:
        """Return whether each epilogue reads one fused tensor, and no other fused binding accesses a cache."""
        inner = {self.bindings[position].var for position in fused}
        positions = [position for epilogue in epilogues for position in epilogue.positions]
        if any(sum(var in inner for var in list_reads(self.bindings[position].value)) != 1 for position in positions):
            return False
        updates = [epilogue.update for epilogue in epilogues if epilogue.update is not None]
        written = [name for position in updates for name in self.accesses[position][1] - {self.bindings[position].var}]
        producers = [n, *(epilogue.elementwise for epilogue in epilogues if epilogue.elementwise is not None)]
        read = set().union(*(self.accesses[position][0] for position in producers))
        return len(written) == len(set(written)) and not read & set(written)

    def find_trailing_views(self, fused: set[int], last: int) -> list[int] | None:
        """Return the positions of views that must follow these bindings when they run together at the last position.

        Return None if they cannot be moved, as another binding accesses the same memory.
        """
        trailing: list[int] = []
        read, written = set[relax.Var](), set[relax.Var]()
        for position in range(min(fused), last):
            reads, writes = self.accesses[position]
            if position in fused:
                read, written = read | reads, written | writes
            elif is_view(self.bindings[position]) and reads & written:
                trailing.append(position)
            elif (reads | writes) & written or writes & read:
                return None
        return trailing
