"""Donation: cache updates that start from a donated input are done in its own memory, where that is proved safe.

`call_tir_inplace` checks neither aliasing nor liveness: a later reader of the old cache would see the new rows. So, for
each cache update on the way from a donated input to its output, in the final order of execution:

1. Readers of the old value behind the update that do not depend on it are moved in front of it.
2. Any other reader behind it (a second update of the same cache, an output that is the old cache itself) gets a copy
   made before the update, and `notes` says so.
3. An update tensor that shares the cache's memory is copied first.

Donated or not, the pass ends with two more. 4: kernels that append to several caches at once, and those that carry a
state on (lowering/attention/kv_write.py, linear.py), work in place, on copies of what is not donated. 5: an output that
would be an input's, a weight's or another output's own memory is a copy, since the caller may write to either.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import tvm
from tvm import relax, te, tirx

from ..attention import kv_write, linear
from ..importing.checks import checked
from ..tensorir import scatter


@dataclass(frozen=True)
class _Kind:
    """A kind of cache updates: their in-place form, how many of their results are caches (None: all), and whether
    they work in place even where nothing is donated."""

    in_place: Callable[[tirx.PrimFunc], tirx.PrimFunc]
    caches: int | None
    always: bool


_KINDS = {
    scatter.ATTRIBUTE: _Kind(scatter.in_place, caches=1, always=False),
    kv_write.ATTRIBUTE: _Kind(kv_write.in_place, caches=None, always=True),
    linear.ATTRIBUTE: _Kind(linear.in_place, caches=1, always=True),
}

_VIEWS = ("relax.reshape", "relax.memory.view", "relax.memory.ensure_zero_offset")


def donate(mod: tvm.IRModule, donated: dict[int, int], notes: list[str]) -> tvm.IRModule:
    """The module with donated caches updated in place.

    donated: position of an input -> position of its output.
        `main` must hold no dataflow blocks: their order is not the order of execution.
    """
    editor = _Editor(mod)
    chains = [editor.chain(parameter, output) for parameter, output in donated.items()]
    for chain in chains:
        editor.update_in_place(chain, [step for other in chains for step in other.steps], notes)
    editor.rest_in_place()
    editor.copy_shared_outputs(donated)
    return editor.finish()


@dataclass(frozen=True)
class _Step:
    """One cache update: the variable of its call, which of its caches is meant, and the variable of the result."""

    call: relax.Var
    number: int
    result: relax.Var


@dataclass(frozen=True)
class _Chain:
    """The updates on the way from a donated parameter to its output, in order."""

    cache: relax.Var
    steps: list[_Step]


class _Editor:
    """`main` as a flat list of bindings and a list of outputs, both open to change."""

    def __init__(self, mod: tvm.IRModule) -> None:
        self.mod = mod
        self.main = mod["main"]
        self.bindings: list[Any] = [b for block in self.main.body.blocks for b in block.bindings]
        result = self.main.body.body
        while isinstance(result, relax.Var):
            result = self._definition(result).value
        self.outputs = list(result.fields)
        self.builder = relax.BlockBuilder(mod)

    # -- questions ----------------------------------------------------------------------------------------------------

    def _position(self, var: relax.Var) -> int:
        return next(k for k, b in enumerate(self.bindings) if b.var.same_as(var))

    def _definition(self, var: relax.Var) -> Any:
        return self.bindings[self._position(var)]

    def _root(self, expr: Any) -> Any:
        """The variable whose memory `expr` is: views, casts and names of it are followed."""
        while True:
            source = next((_viewed(b) for b in self.bindings if b.var.same_as(expr)), None)
            if source is None:
                return expr
            expr = source

    def _reads(self, expr: Any, root: Any) -> bool:
        return any(self._root(v).same_as(root) for v in relax.analysis.free_vars(expr))

    def _depends(self, start: int) -> set[int]:
        """Positions of the bindings that use the result of binding `start`, directly or not."""
        tainted = [self.bindings[start].var]
        found = set()
        for k in range(start + 1, len(self.bindings)):
            used = relax.analysis.free_vars(self.bindings[k].value)
            if any(u.same_as(t) for u in used for t in tainted):
                found.add(k)
                tainted.append(self.bindings[k].var)
        return found

    def _update(self, binding: Any) -> tirx.PrimFunc | None:
        """The cache update that the binding calls, if it is one (still copying)."""
        value = binding.value
        if not (isinstance(value, relax.Call) and value.op == tvm.ir.Op.get("relax.call_tir")):
            return None
        function = self.mod[value.args[0]]
        return function if _kind(function) is not None else None

    def _step(self, result: relax.Var) -> _Step:
        """The update that gives the variable: the first arguments of its call are its caches, in the order of its
        results."""
        value = self._definition(result).value
        if isinstance(value, relax.TupleGetItem):
            return _Step(value.tuple_value, value.index, result)
        return _Step(result, 0, result)

    def _cache(self, step: _Step) -> relax.Expr:
        return self._definition(step.call).value.args[1].fields[step.number]

    # -- edits --------------------------------------------------------------------------------------------------------

    def chain(self, parameter: int, output: int) -> _Chain:
        """What leads from that parameter to that output."""
        cache = self.main.params[parameter]
        steps: list[_Step] = []
        var = self._root(self.outputs[output])
        while not var.same_as(cache):
            steps.append(self._step(var))
            var = self._root(self._cache(steps[-1]))
        return _Chain(cache, steps[::-1])

    def update_in_place(self, chain: _Chain, donated: list[_Step], notes: list[str]) -> None:
        """Makes every update of the chain write into the parameter's memory. donated are the steps of all chains."""
        for step in chain.steps:
            self._make_room(chain.cache, step, notes)
            if self._update(self._definition(step.call)) is not None:
                self._convert(step.call, {other.number for other in donated if other.call.same_as(step.call)})

    def rest_in_place(self) -> None:
        """Makes what is left of the updates that always work in place write into copies."""
        for binding in [b for b in self.bindings if (kind := _kind(self._update(b))) and kind.always]:
            self._convert(binding.var, set())

    def _make_room(self, cache: relax.Var, step: _Step, notes: list[str]) -> None:
        """Sees to it that nobody needs the old value of a cache when the step writes to it."""
        old = self._root(self._cache(step))
        position = self._hoist_readers(self._position(step.call), old)
        late = [b for b in self.bindings[position + 1 :] if _viewed(b) is None and self._reads(b.value, old)]
        late_outputs = [k for k, o in enumerate(self.outputs) if self._root(o).same_as(old)]
        if late or late_outputs:
            copied = self._insert_copy(position, old)
            position += 1
            self._redirect(position + 1, old, copied)
            what = "is also an output" if late_outputs else "is read after it was updated"
            notes.append(f"the donated cache '{cache.name}' {what}: its old value is copied on every call.")
        arguments = list(self.bindings[position].value.args[1].fields)
        for k, argument in enumerate(arguments):
            shared = isinstance(argument, relax.Var) and self._root(argument).same_as(old)
            if shared and k != step.number:
                arguments[k] = self._insert_copy(position, argument)
                position += 1
        self._call_with(position, arguments)

    def _convert(self, var: relax.Var, donated: set[int]) -> None:
        """Makes a call write into its caches: those of these numbers, and copies of the others."""
        position = self._position(var)
        function = self._update(self.bindings[position])
        kind = _kind(function)
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
        places = [k if k < caches else -1 for k in range(len(outputs))]  # -1: an array of its own
        call = relax.op.call_tir_inplace(new, relax.Tuple(arguments), places, outputs)
        self.bindings[position] = relax.VarBinding(var, call)

    def _call_with(self, position: int, arguments: list[Any]) -> None:
        """Gives a call other arguments."""
        binding = self.bindings[position]
        call = binding.value
        new = relax.Call(call.op, [call.args[0], relax.Tuple(arguments), *call.args[2:]], call.attrs, call.ty_args)
        self.bindings[position] = relax.VarBinding(binding.var, new)

    def _hoist_readers(self, position: int, old: Any) -> int:
        """Moves what reads the old value and does not depend on the update in front of it; returns the update's
        place."""
        dependent = self._depends(position)
        later = range(position + 1, len(self.bindings))
        readers = [k for k in later if k not in dependent and self._reads(self.bindings[k].value, old)]
        moved: set[int] = set()
        pending = readers
        while pending:
            k = pending.pop()
            if k in moved or k <= position:
                continue
            if _writes(self.bindings[k]):
                return position  # an update of another cache stays where its own readers were ordered around it
            moved.add(k)
            used = relax.analysis.free_vars(self.bindings[k].value)
            pending += [j for j in later if any(self.bindings[j].var.same_as(u) for u in used)]
        front = [self.bindings[k] for k in sorted(moved)]
        rest = [self.bindings[k] for k in later if k not in moved]
        self.bindings = self.bindings[:position] + front + [self.bindings[position]] + rest
        return position + len(front)

    def _insert_copy(self, position: int, source: relax.Expr) -> relax.Var:
        call = self.builder.call_te(_copied, source, primfunc_name_hint="copy")
        self.mod = self.builder.get()
        name = source.name if isinstance(source, relax.Var) else "constant"
        copied = relax.Var(f"{name}_copy", source.ty)
        self.bindings.insert(position, relax.VarBinding(copied, call))
        return copied

    def _redirect(self, start: int, old: Any, new: relax.Var) -> None:
        """Lets everything from `start` on, and the outputs, read `new` where they read `old` or a view of it."""
        twins: list[tuple[Any, Any]] = [(old, new)]

        def twin(var: Any) -> Any:
            known = next((t for v, t in twins if v.same_as(var)), None)
            if known is None:
                binding = self._definition(var)
                source = _viewed(binding)
                known = relax.Var(var.name, var.ty)
                made = _rebound(binding, known, source, twin(source))
                self.bindings.insert(start + len(twins) - 1, made)
                twins.append((var, known))
            return known

        readers = [b for b in self.bindings[start:] if _viewed(b) is None and self._reads(b.value, old)]
        for reader in readers:
            for used in relax.analysis.free_vars(reader.value):
                if self._root(used).same_as(old):
                    replacement = twin(used)
                    at = self._position(reader.var)
                    self.bindings[at] = _rebound(self.bindings[at], reader.var, used, replacement)
        self.outputs = [twin(o) if self._root(o).same_as(old) else o for o in self.outputs]

    def copy_shared_outputs(self, donated: dict[int, int]) -> None:
        taken = {donated_output: self.main.params[p] for p, donated_output in donated.items()}
        owners: list[Any] = list(self.main.params)
        for k, output in enumerate(self.outputs):
            if not isinstance(output, relax.Var):
                continue
            root = self._root(output)
            if k in taken:
                continue
            if any(root.same_as(o) for o in owners):
                self.outputs[k] = self._insert_copy(len(self.bindings), output)
            else:
                owners.append(root)

    def finish(self) -> tvm.IRModule:
        body = relax.SeqExpr([relax.BindingBlock(self.bindings)], relax.Tuple(self.outputs))
        main = relax.Function(self.main.params, body, self.main.ret_ty, self.main.is_pure, self.main.attrs)
        self.mod["main"] = main
        # Of what works in place now, the copying form is not called any more.
        called: set[tvm.ir.GlobalVar] = set()
        for _, function in self.mod.functions_items():
            if isinstance(function, relax.Function):
                relax.analysis.post_order_visit(
                    function, lambda e: called.add(e) if isinstance(e, tvm.ir.GlobalVar) else None
                )
        left = {var: f for var, f in self.mod.functions_items() if var in called or not isinstance(f, tirx.PrimFunc)}
        return tvm.IRModule(left, attrs=self.mod.attrs)


def _kind(function: tirx.PrimFunc | None) -> _Kind | None:
    attributes = (function.attrs if function is not None else None) or {}
    return next((kind for attribute, kind in _KINDS.items() if attribute in attributes), None)


def _viewed(binding: Any) -> Any:
    """What the binding is a view of, or None if it owns its memory."""
    value = binding.value
    if isinstance(binding, relax.MatchCast) or isinstance(value, relax.Var):
        return value
    if isinstance(value, relax.Call) and getattr(value.op, "name", "") in _VIEWS:
        return value.args[0]
    return checked(value)


def _writes(binding: Any) -> bool:
    value = binding.value
    return isinstance(value, relax.Call) and getattr(value.op, "name", "") == "relax.call_tir_inplace"


def _rebound(binding: Any, var: Any, old: Any, new: Any) -> Any:
    """The binding with another result variable, reading `new` where it read `old`."""
    value = _Rename(old, new).visit_expr(binding.value)
    if isinstance(binding, relax.MatchCast):
        return relax.MatchCast(var, value, binding.ty)
    return relax.VarBinding(var, value)


@relax.expr_functor.mutator
class _Rename(relax.PyExprMutator):
    def __init__(self, old: Any, new: Any) -> None:
        super().__init__()
        self.old, self.new = old, new

    def visit_var_(self, var: Any) -> Any:
        return self.new if var.same_as(self.old) else var


def _copied(source: te.Tensor) -> te.Tensor:
    return te.compute(source.shape, lambda *i: source(*i), "copy")
