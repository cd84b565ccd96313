"""Donation: cache updates from a donated input are done in the input's memory, where that is provably safe.

`call_tir_inplace` checks neither aliasing nor liveness: a later reader of the old cache would see the new rows. Each
cache update between a donated input and its output is handled as follows, in the final execution order:

1. Readers of the old value after the update that do not depend on it are moved before it. 2. If there is another reader
after it (a second update of the same cache, an output that is the old cache itself), a
   copy is made for it before the update, and `notes` reports it.
3. An update tensor that shares the cache's memory is copied first.

The pass ends with two more steps for all models. 4: kernels that write to several caches at once, and those that carry
a state (lowering/attention/kv_write.py, linear.py), work in place, on copies of caches that are not donated. 5: an
output that would alias an input, a weight or another output is a copy, since the caller may write to either.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

import tvm
from tvm import relax, te, tirx

from ...attention import kv_write, linear
from ...tensorir import scatter
from ..aliases import get_viewed, read_inplace_arguments, read_kernel
from ..compile_state import CompileState


@dataclass(frozen=True)
class _UpdateKind:
    """A kind of cache updates.

    Fields are the in-place form, the number of results that are caches (None: all), and whether updates of this kind
    always work in place, even without donation.
    """

    in_place: Callable[[tirx.PrimFunc], tirx.PrimFunc]
    caches: int | None
    is_always_in_place: bool


_KINDS = {
    scatter.ATTRIBUTE: _UpdateKind(scatter.in_place, caches=1, is_always_in_place=False),
    kv_write.ATTRIBUTE: _UpdateKind(kv_write.in_place, caches=None, is_always_in_place=True),
    linear.ATTRIBUTE: _UpdateKind(linear.in_place, caches=1, is_always_in_place=True),
}


def donate(state: CompileState) -> CompileState:
    """Update donated caches in place.

    `main` must have no dataflow blocks: their order is not the execution order.
    """
    donated, notes = state.options.donated, list(state.notes)
    editor = _MainEditor(state.module)
    chains = [editor.find_chain(parameter, output) for parameter, output in donated.items()]
    for chain in chains:
        editor.update_in_place(chain, [step for other in chains for step in other.steps], notes)
    editor.convert_remaining()
    editor.copy_shared_outputs(donated)
    return replace(state, module=editor.finish(), notes=tuple(notes))


@dataclass(frozen=True)
class _UpdateStep:
    """One cache update: the variable of its call, the index of the cache in it, and the variable of the result."""

    call: relax.Var
    number: int
    result: relax.Var


@dataclass(frozen=True)
class _UpdateChain:
    """The updates between a donated parameter and its output, in order."""

    cache: relax.Var
    steps: list[_UpdateStep]


class _MainEditor:
    """`main` as a flat list of bindings and a list of outputs, both mutable."""

    def __init__(self, mod: tvm.IRModule) -> None:
        self.mod = mod
        self.main = mod["main"]
        self.bindings: list[Any] = [b for block in self.main.body.blocks for b in block.bindings]
        result = self.main.body.body
        while isinstance(result, relax.Var):
            result = self._find_binding(result).value
        self.outputs = list(result.fields)
        self.builder = relax.BlockBuilder(mod)

    # -- questions ----------------------------------------------------------------------------------------------------

    def _find_position(self, var: relax.Var) -> int:
        return next(k for k, b in enumerate(self.bindings) if b.var.same_as(var))

    def _find_binding(self, var: relax.Var) -> Any:
        return self.bindings[self._find_position(var)]

    def _find_root(self, expr: Any) -> Any:
        """Return the variable that owns the memory of `expr`: views, casts and aliases are followed."""
        while True:
            source = next((get_viewed(b) for b in self.bindings if b.var.same_as(expr)), None)
            if source is None:
                return expr
            expr = source

    def _reads(self, expr: Any, root: Any) -> bool:
        return any(self._find_root(v).same_as(root) for v in relax.analysis.free_vars(expr))

    def _find_dependents(self, start: int) -> set[int]:
        """Return the positions of bindings that use the result of binding `start`, directly or indirectly."""
        tainted, dependents = {self.bindings[start].var}, set()
        for k in range(start + 1, len(self.bindings)):
            if not tainted.isdisjoint(relax.analysis.free_vars(self.bindings[k].value)):
                dependents.add(k)
                tainted.add(self.bindings[k].var)
        return dependents

    def _read_update(self, binding: Any) -> tirx.PrimFunc | None:
        """Return the copying cache update that the binding calls, None if it calls none."""
        kernel = read_kernel(binding)
        if kernel is None or read_inplace_arguments(binding.value):
            return None
        function = self.mod[kernel]
        return function if _find_kind(function) is not None else None

    def _read_step(self, result: relax.Var) -> _UpdateStep:
        """Return the update that computes the variable.

        The first arguments of its call are its caches, in the order of its results.
        """
        value = self._find_binding(result).value
        if isinstance(value, relax.TupleGetItem):
            return _UpdateStep(value.tuple_value, value.index, result)
        return _UpdateStep(result, 0, result)

    def _read_cache(self, step: _UpdateStep) -> relax.Expr:
        return self._find_binding(step.call).value.args[1].fields[step.number]

    # -- edits --------------------------------------------------------------------------------------------------------

    def find_chain(self, parameter: int, output: int) -> _UpdateChain:
        """Return the updates that lead from that parameter to that output."""
        cache = self.main.params[parameter]
        steps: list[_UpdateStep] = []
        var = self._find_root(self.outputs[output])
        while not var.same_as(cache):
            steps.append(self._read_step(var))
            var = self._find_root(self._read_cache(steps[-1]))
        return _UpdateChain(cache, steps[::-1])

    def update_in_place(self, chain: _UpdateChain, donated: list[_UpdateStep], notes: list[str]) -> None:
        """Make every update of the chain write into the parameter's memory. donated are the steps of all chains."""
        for step in chain.steps:
            self._preserve_old_value(chain.cache, step, notes)
            if self._read_update(self._find_binding(step.call)) is not None:
                self._make_in_place(step.call, {other.number for other in donated if other.call.same_as(step.call)})

    def convert_remaining(self) -> None:
        """Make the remaining updates that always work in place write into copies."""
        for binding in [
            b for b in self.bindings if (kind := _find_kind(self._read_update(b))) and kind.is_always_in_place
        ]:
            self._make_in_place(binding.var, set())

    def _preserve_old_value(self, cache: relax.Var, step: _UpdateStep, notes: list[str]) -> None:
        """Ensure that no binding needs the old value of a cache when the step writes to it."""
        old = self._find_root(self._read_cache(step))
        position = self._hoist_readers(self._find_position(step.call), old)
        late = [b for b in self.bindings[position + 1 :] if get_viewed(b) is None and self._reads(b.value, old)]
        late_outputs = [k for k, o in enumerate(self.outputs) if self._find_root(o).same_as(old)]
        if late or late_outputs:
            copied = self._insert_copy(position, old)
            position += 1
            self._redirect(position + 1, old, copied)
            what = "is also an output" if late_outputs else "is read after it was updated"
            notes.append(f"the donated cache '{cache.name}' {what}: its old value is copied on every call.")
        arguments = list(self.bindings[position].value.args[1].fields)
        for k, argument in enumerate(arguments):
            shared = isinstance(argument, relax.Var) and self._find_root(argument).same_as(old)
            if shared and k != step.number:
                arguments[k] = self._insert_copy(position, argument)
                position += 1
        self._replace_arguments(position, arguments)

    def _make_in_place(self, var: relax.Var, donated: set[int]) -> None:
        """Make a call write into its caches: into the donated ones of these numbers, and into copies of the others."""
        position = self._find_position(var)
        function = self._read_update(self.bindings[position])
        kind = _find_kind(function)
        assert kind is not None
        arguments = list(self.bindings[position].value.args[1].fields)
        result = self.bindings[position].var.ty
        outputs = list(result.fields) if isinstance(result, relax.TupleType) else [result]
        caches = len(outputs) if kind.caches is None else kind.caches
        for k in range(caches):
            if k not in donated:
                arguments[k] = self._insert_copy(position, arguments[k])
                position += 1
        new = self.builder.add_func(kind.in_place(function), "update_cache_in_place")
        self.mod = self.builder.get()
        inplace_indices = [k if k < caches else -1 for k in range(len(outputs))]  # -1: a new array
        call = relax.op.call_tir_inplace(new, relax.Tuple(arguments), inplace_indices, outputs)
        self.bindings[position] = relax.VarBinding(var, call)

    def _replace_arguments(self, position: int, arguments: list[Any]) -> None:
        """Replace the arguments of a call."""
        binding = self.bindings[position]
        call = binding.value
        new = relax.Call(call.op, [call.args[0], relax.Tuple(arguments), *call.args[2:]], call.attrs, call.ty_args)
        self.bindings[position] = relax.VarBinding(binding.var, new)

    def _hoist_readers(self, position: int, old: Any) -> int:
        """Move readers of the old value that do not depend on the update before it; return the update's position."""
        dependent = self._find_dependents(position)
        later = range(position + 1, len(self.bindings))
        readers = [k for k in later if k not in dependent and self._reads(self.bindings[k].value, old)]
        moved: set[int] = set()
        pending = readers
        while pending:
            k = pending.pop()
            if k in moved or k <= position:
                continue
            if read_inplace_arguments(self.bindings[k].value):
                return position  # an update of another cache stays where its own readers were ordered around it
            moved.add(k)
            used = relax.analysis.free_vars(self.bindings[k].value)
            pending += [j for j in later if any(self.bindings[j].var.same_as(u) for u in used)]
        front = [self.bindings[k] for k in sorted(moved)]
        rest = [self.bindings[k] for k in later if k not in moved]
        self.bindings = self.bindings[:position] + front + [self.bindings[position]] + rest
        return position + len(front)

    def _insert_copy(self, position: int, source: relax.Expr) -> relax.Var:
        call = self.builder.call_te(_make_copy, source, primfunc_name_hint="copy")
        self.mod = self.builder.get()
        name = source.name if isinstance(source, relax.Var) else "constant"
        copied = relax.Var(f"{name}_copy", source.ty)
        self.bindings.insert(position, relax.VarBinding(copied, call))
        return copied

    def _redirect(self, start: int, old: Any, new: relax.Var) -> None:
        """Make bindings from `start` on, and the outputs, read `new` instead of `old` or a view of it."""
        twins: list[tuple[Any, Any]] = [(old, new)]

        def twin(var: Any) -> Any:
            copy = next((t for v, t in twins if v.same_as(var)), None)
            if copy is None:
                binding = self._find_binding(var)
                source = get_viewed(binding)
                copy = relax.Var(var.name, var.ty)
                rebound = _rebind(binding, copy, source, twin(source))
                self.bindings.insert(start + len(twins) - 1, rebound)
                twins.append((var, copy))
            return copy

        readers = [b for b in self.bindings[start:] if get_viewed(b) is None and self._reads(b.value, old)]
        for reader in readers:
            for used in relax.analysis.free_vars(reader.value):
                if self._find_root(used).same_as(old):
                    replacement = twin(used)
                    position = self._find_position(reader.var)
                    self.bindings[position] = _rebind(self.bindings[position], reader.var, used, replacement)
        self.outputs = [twin(o) if self._find_root(o).same_as(old) else o for o in self.outputs]

    def copy_shared_outputs(self, donated: Mapping[int, int]) -> None:
        donated_outputs = {donated_output: self.main.params[p] for p, donated_output in donated.items()}
        owners: list[Any] = list(self.main.params)
        for k, output in enumerate(self.outputs):
            if not isinstance(output, relax.Var):
                continue
            root = self._find_root(output)
            if k in donated_outputs:
                continue
            if any(root.same_as(o) for o in owners):
                self.outputs[k] = self._insert_copy(len(self.bindings), output)
            else:
                owners.append(root)

    def finish(self) -> tvm.IRModule:
        body = relax.SeqExpr([relax.BindingBlock(self.bindings)], relax.Tuple(self.outputs))
        main = relax.Function(self.main.params, body, self.main.ret_ty, self.main.is_pure, self.main.attrs)
        self.mod["main"] = main
        # The copying form of updates that work in place now is no longer called.
        called: set[tvm.ir.GlobalVar] = set()
        for _, function in self.mod.functions_items():
            if isinstance(function, relax.Function):
                relax.analysis.post_order_visit(
                    function, lambda e: called.add(e) if isinstance(e, tvm.ir.GlobalVar) else None
                )
        remaining = {
            var: f for var, f in self.mod.functions_items() if var in called or not isinstance(f, tirx.PrimFunc)
        }
        return tvm.IRModule(remaining, attrs=self.mod.attrs)


def _find_kind(function: tirx.PrimFunc | None) -> _UpdateKind | None:
    attributes = (function.attrs if function is not None else None) or {}
    return next((kind for attribute, kind in _KINDS.items() if attribute in attributes), None)


def _rebind(binding: Any, var: Any, old: Any, new: Any) -> Any:
    """Return the binding with another result variable, reading `new` instead of `old`."""
    value = _VariableReplacer(old, new).visit_expr(binding.value)
    if isinstance(binding, relax.MatchCast):
        return relax.MatchCast(var, value, binding.ty)
    return relax.VarBinding(var, value)


@relax.expr_functor.mutator
class _VariableReplacer(relax.PyExprMutator):
    def __init__(self, old: Any, new: Any) -> None:
        super().__init__()
        self.old, self.new = old, new

    def visit_var_(self, var: Any) -> Any:
        return self.new if var.same_as(self.old) else var


def _make_copy(source: te.Tensor) -> te.Tensor:
    return te.compute(source.shape, lambda *i: source(*i), "copy")
