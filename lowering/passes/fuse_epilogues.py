"""What becomes of a matmul's results is computed by the matmul, where the target has a kernel for both, on GPUs.

The keys of a decoder are rotated and stored in a cache, its values are stored there, its queries are rotated: in a
decode step a launch that reads three small tensors from memory and writes them again. With few rows the blocks of the
matmul do it (schedules/cuda/fused_epilogues.py); with more, a launch behind the matmul.

A result has an epilogue where one function alone reads it: an update of a cache in place, or an element-wise one, whose
result may go to such an update. The matmul moves to the place of the last of them, unless what stands between touches
the same memory.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import tvm
from tvm import ir, relax, tirx
from tvm.ir import prim
from tvm.relax.expr_functor import mutator

import schedules
from schedules.reading.epilogues import EPILOGUES, EpilogueSpec, Update, to_json
from schedules.reading.matmul import read_matmul
from schedules.reading.row_parts import PARTS
from schedules.reading.stages import Axis, Stage

from ..importing.checks import checked, checked_instead
from ..importing.origins import Origins, bindings
from ..tensorir.scatter import ATTRIBUTE, CacheUpdate
from .kernel_calls import Memory, is_view, kernel_of, places_in
from .main_function import BlockMutator, rewritten
from .stage_calls import Asked, StageCall, StageCalls, variables

_FEWEST = 2  # epilogues: of one alone there may be no launch less


def fuse_epilogues(mod: tvm.IRModule, target: tvm.target.Target, origins: Origins) -> tuple[tvm.IRModule, Origins]:
    """The module, without dataflow blocks, and where its calls come from."""
    fuser = _Fuser(mod, target, origins)
    return rewritten(mod, fuser), fuser.calls.origins


@dataclass(frozen=True)
class _FusedEpilogue:
    """Of output `number` of a matmul: the place in the block of what is made of it, and of the update, None for none;
    `views` are what stands between."""

    number: int
    made: int | None
    update: int | None
    views: tuple[int, ...]

    @property
    def places(self) -> list[int]:
        return [place for place in (self.made, self.update) if place is not None]


@mutator
class _Fuser(BlockMutator):
    def __init__(self, mod: tvm.IRModule, target: tvm.target.Target, origins: Origins) -> None:
        super().__init__(mod)
        self.mod, self.calls = mod, StageCalls(mod, origins)
        self.asked = Asked(lambda function: schedules.variants(function, target))
        body = mod["main"].body
        self.uses: dict[relax.Var, int] = {}
        for value in (body.body, *(binding.value for binding in bindings(body))):
            for var in variables(value):
                self.uses[var] = self.uses.get(var, 0) + 1

    def block(self, given: Sequence[relax.Binding], kind: type[relax.Var]) -> list[relax.Binding]:
        memory = Memory()
        block = _Block(given, [memory.touched(binding) for binding in given], self.uses)
        instead: dict[int, list[relax.Binding]] = {}
        for n, binding in enumerate(given):
            stages = self.calls.stages(binding)
            if stages is not None and any(map(read_matmul, stages)):
                instead |= self.joined(block, n, stages, kind)
        return [new for n, binding in enumerate(given) for new in instead.get(n, [binding])]

    # -- what can be joined -------------------------------------------------------------------------------------------

    def joined(
        self, block: _Block, n: int, stages: list[Stage], kind: type[relax.Var]
    ) -> dict[int, list[relax.Binding]]:
        """What stands in the place of which bindings where matmul n has epilogues; {} where it has none."""
        epilogues = [epilogue for views in block.results(n) if (epilogue := self.epilogue(block, *views)) is not None]
        if len(epilogues) < _FEWEST or not any(self.does_more(block, epilogue) for epilogue in epilogues):
            return {}
        mine = {n, *(place for epilogue in epilogues for place in (*epilogue.places, *epilogue.views))}
        last = max(place for epilogue in epilogues for place in epilogue.places)
        behind = block.moved_along(mine, last)
        if behind is None or not block.are_apart(n, epilogues, mine):
            return {}
        bound = self.bound(block, n, stages, epilogues, kind)
        if not bound:
            return {}
        gone: dict[int, list[relax.Binding]] = {place: [] for place in (*mine, *behind)}
        return gone | {last: [*bound, *(block.given[place] for place in behind)]}

    def epilogue(self, block: _Block, number: int, views: Sequence[int], reader: int) -> _FusedEpilogue | None:
        """Of an output, or of what is viewed of it, that one binding alone reads."""
        if self.is_update(block, reader):
            return _FusedEpilogue(number, None, reader, tuple(views))
        stages = self.calls.stages(block.given[reader])
        one = isinstance(block.given[reader].var.ty, relax.TensorType)
        if stages is None or not one or any(stage.reduce for stage in stages):
            return None
        found = self.asked(self.mod[kernel_of(block.given[reader])])
        if found is None or found[0] != "elementwise":
            return None
        alone = block.alone(block.given[reader].var)
        if alone is not None and self.is_update(block, alone[1]):
            return _FusedEpilogue(number, reader, alone[1], (*views, *alone[0]))
        return _FusedEpilogue(number, reader, None, tuple(views))

    def does_more(self, block: _Block, epilogue: _FusedEpilogue) -> bool:
        """Whether it does more than to transpose: that is all that becomes of results in encoders, where rows are many
        and nothing would be gained."""
        made = [] if epilogue.made is None else self.calls.stages(block.given[epilogue.made]) or []
        return epilogue.update is not None or any(not isinstance(stage.value, ir.TensorLoad) for stage in made)

    def is_update(self, block: _Block, place: int) -> bool:
        """Whether it is one of a cache, in place."""
        kernel = kernel_of(block.given[place])
        attributes = None if kernel is None else self.mod[kernel].attrs
        return attributes is not None and ATTRIBUTE in attributes and bool(places_in(block.given[place].value))

    # -- the call of all ----------------------------------------------------------------------------------------------

    def bound(
        self, block: _Block, n: int, stages: list[Stage], epilogues: Sequence[_FusedEpilogue], kind: type[relax.Var]
    ) -> list[relax.Binding]:
        """The call of the matmul with its epilogues, and what is taken of it; [] where the target has no kernel for
        it."""
        matmul = block.given[n]
        attributes = self.mod[kernel_of(matmul)].attrs
        call = self.calls.read(matmul, stages, kind)
        parts = [int(count) for count in attributes.get(PARTS, (len(stages),))]
        all_stages, outputs = list(call.stages), list(call.outputs)
        names, nodes = [call.name], dict.fromkeys(call.nodes)
        updates: list[Update | None] = []
        for epilogue in epilogues:
            rows = call.outputs[epilogue.number]
            if epilogue.made is not None:
                made = block.given[epilogue.made]
                read = self.calls.read(made, self.calls.stages(made) or [], kind)
                heads = self.heads(rows, block.shown(n, epilogue))
                if heads is None:
                    return []
                all_stages += [heads, *read.stages]
                parts.append(1 + len(read.stages))
                names.append(read.name)
                nodes |= dict.fromkeys(read.nodes)
                rows = read.stages[-1].output
                if epilogue.update is None:
                    outputs += read.outputs
            update = None if epilogue.update is None else self.update(block.given[epilogue.update], rows)
            if epilogue.update is not None:
                if update is None:
                    return []
                nodes |= dict.fromkeys(self.calls.origins.get(block.given[epilogue.update].var.name, ()))
            updates.append(update)
        item = StageCall("_".join(names), all_stages, outputs, tuple(nodes), call.multiplied, None, tuple(parts),
                         tuple(update for update in updates if update is not None))  # fmt: skip
        return self.called(block, n, item, call, list(zip(epilogues, updates)), kind)

    def update(self, binding: relax.Binding, rows: tirx.Buffer) -> Update | None:
        """The update of a cache, with these rows for its own, in which they are viewed; None where they are others."""
        kernel, (cache, own, *indices) = binding.value.args[0], binding.value.args[1].fields
        record = CacheUpdate.from_json(str(self.mod[kernel].attrs[ATTRIBUTE]))
        axis = record.row_axis
        if len(rows.shape) <= axis or not prim.expr_deep_equal(own.ty.shape.values[axis], rows.shape[axis]):
            return None
        at = self.calls.tensor(indices[0], "write_indices") if indices else None
        return Update(record, rows, self.calls.tensor(cache, "cache"), at)

    def heads(self, rows: tirx.Buffer, shown: relax.Expr) -> Stage | None:
        """A stage that shows a result [..., N] as heads [..., H, D]; None for another view."""
        heads = self.calls.tensor(shown, "heads")
        *lead, H, D = heads.shape
        *outer, N = rows.shape
        same = len(lead) == len(outer) and all(map(prim.expr_deep_equal, lead, outer))
        whole = all(isinstance(size, tirx.IntImm) for size in (H, D, N)) and int(H) * int(D) == int(N)
        if heads.same_as(rows) or not same or not whole:
            return None
        axes = tuple(Axis(tirx.Var(f"v{k}", "int64"), extent) for k, extent in enumerate(heads.shape))
        *place, h, d = (axis.var for axis in axes)
        return Stage(heads, axes, (), None, tirx.BufferLoad(rows, [*place, h * D + d]))

    def called(
        self,
        block: _Block,
        n: int,
        item: StageCall,
        matmul: StageCall,
        epilogues: Sequence[tuple[_FusedEpilogue, Update | None]],
        kind: type[relax.Var],
    ) -> list[relax.Binding]:
        function, given = item.function()
        number: Mapping[tirx.Var, int] = {param: k for k, param in enumerate([*given, *item.outputs])}
        described, caches = [], []
        for epilogue, update in epilogues:
            rows, has_stages = number[matmul.outputs[epilogue.number]], epilogue.made is not None
            if epilogue.update is None or update is None:
                described.append(EpilogueSpec(rows, has_stages))
                continue
            places = [number[buffer] for buffer in update.inputs()]
            described.append(EpilogueSpec(rows, has_stages, update.record.to_json(), *places))
            caches.append((places[0], block.given[epilogue.update].var))
        function = function.with_attr(EPILOGUES, to_json(described))
        found = self.asked(function)
        if found is None or found[0] != schedules.EPILOGUE_MATMUL:
            return []
        results = [self.calls.names[buffer] for buffer in item.outputs]
        arguments = [self.calls.names.get(var, var) for var in given]
        bound = list(self.moved_checks(block, [epilogue for epilogue, _ in epilogues], arguments))
        variable = self.builder_.add_func(function, item.name)
        variables_ = [*results, *(var for _, var in caches)]
        types = [var.ty for var in variables_]
        taken = relax.Tuple(arguments)
        if caches:
            places = [*[-1] * len(results), *(place for place, _ in caches)]
            value = relax.op.call_tir_inplace(variable, taken, places, types)
        else:
            value = relax.call_tir(variable, taken, types)
        every = kind("_".join(var.name for var in variables_), relax.TupleType(types))
        self.calls.origins[every.name] = item.nodes
        bound.append(relax.VarBinding(every, self.builder_.normalize(value)))
        for k, var in enumerate(variables_):
            bound.append(relax.VarBinding(var, self.builder_.normalize(relax.TupleGetItem(every, k))))
        var = block.given[n].var
        if var not in results:
            self.fields[var] = results[: len(matmul.outputs)]
        return bound

    def moved_checks(
        self, block: _Block, epilogues: Sequence[_FusedEpilogue], arguments: list[relax.Expr]
    ) -> Iterator[relax.Binding]:
        """Checks of sizes of what is not there any more, as checks of the first tensor that is taken."""
        for place in sorted({place for epilogue in epilogues for place in epilogue.views}):
            binding = block.given[place]
            if checked(binding.value) is None:
                continue
            held = next(k for k, x in enumerate(arguments) if isinstance(x.ty, relax.TensorType))
            value = arguments[held]
            call = checked_instead(binding.value, value)
            arguments[held] = relax.Var(f"{value.name}_{binding.var.name}", value.ty)
            yield relax.VarBinding(arguments[held], self.builder_.normalize(call))


class _Block:
    """The bindings of a block in their order of execution, what each touches, and how often each variable is used."""

    def __init__(
        self,
        given: Sequence[relax.Binding],
        touched: Sequence[tuple[set[relax.Var], set[relax.Var]]],
        uses: Mapping[relax.Var, int],
    ) -> None:
        self.given, self.touched, self.uses = given, touched, uses
        self.readers: dict[relax.Var, list[int]] = {}
        for n, binding in enumerate(given):
            for var in variables(binding.value):
                self.readers.setdefault(var, []).append(n)

    def results(self, n: int) -> Iterator[tuple[int, tuple[int, ...], int]]:
        """Of call n, the outputs that one binding alone reads: number, views between, place of that."""
        for number, views, var in self.outputs(n):
            alone = self.alone(var)
            if alone is not None:
                yield number, (*views, *alone[0]), alone[1]

    def outputs(self, n: int) -> Iterator[tuple[int, tuple[int, ...], relax.Var]]:
        """By number, the tensors that a call gives, and where they are taken from its tuple, if only once."""
        var = self.given[n].var
        if isinstance(var.ty, relax.TensorType):
            yield 0, (), var
            return
        places = self.readers.get(var, [])
        taken = [value.index for value in (self.given[place].value for place in places)
                 if isinstance(value, relax.TupleGetItem)]  # fmt: skip
        if len(taken) == self.uses.get(var, 0):
            for place, number in zip(places, taken):
                if taken.count(number) == 1:
                    yield int(number), (place,), self.given[place].var

    def alone(self, var: relax.Var) -> tuple[tuple[int, ...], int] | None:
        """The views between a tensor and the binding that alone reads it, and the place of that."""
        views: tuple[int, ...] = ()
        while self.uses.get(var, 0) == 1 and len(self.readers.get(var, [])) == 1:
            (place,) = self.readers[var]
            binding = self.given[place]
            if not is_view(binding):
                return views, place
            if not isinstance(binding.var.ty, relax.TensorType):
                return None
            views, var = (*views, place), binding.var
        return None

    def shown(self, n: int, epilogue: _FusedEpilogue) -> relax.Expr:
        """What an epilogue's function reads of what matmul n makes."""
        assert epilogue.made is not None
        read = variables(self.given[epilogue.made].value)
        return next(var for place in (n, *epilogue.views) if (var := self.given[place].var) in read)

    def are_apart(self, n: int, epilogues: Sequence[_FusedEpilogue], mine: set[int]) -> bool:
        """Whether each epilogue reads one thing that is made here, and nothing else reads or writes a cache."""
        inner = {self.given[place].var for place in mine}
        places = [place for epilogue in epilogues for place in epilogue.places]
        if any(sum(var in inner for var in variables(self.given[place].value)) != 1 for place in places):
            return False
        updates = [epilogue.update for epilogue in epilogues if epilogue.update is not None]
        written = [name for place in updates for name in self.touched[place][1] - {self.given[place].var}]
        others = [n, *(epilogue.made for epilogue in epilogues if epilogue.made is not None)]
        read = set().union(*(self.touched[place][0] for place in others))
        return len(written) == len(set(written)) and not read & set(written)

    def moved_along(self, mine: set[int], last: int) -> list[int] | None:
        """The places of views that have to follow these bindings, when they run together at the last place; None where
        they may not, as another touches memory that one in front of it does."""
        behind: list[int] = []
        read, written = set[relax.Var](), set[relax.Var]()
        for place in range(min(mine), last):
            reads, writes = self.touched[place]
            if place in mine:
                read, written = read | reads, written | writes
            elif is_view(self.given[place]) and reads & written:
                behind.append(place)
            elif (reads | writes) & written or writes & read:
                return None
        return behind
