"""New rows that are computed for a cache are stored there at once, on GPUs (schedules/cuda/cache_rows.py).

The keys of a decoder are rotated, written, read again and moved to their slots: two small kernels, of which one waits
for the other. Where an update in place is all that reads what an element-wise kernel made, one kernel does both, at the
place of the update. What it reads must not be written before that, nor by the update.
"""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Sequence
from typing import Any

from tvm import ir, relax, tirx

import schedules
from schedules.cuda.cache_rows import emit_cache_rows
from schedules.cuda.fused_launches import read_launch
from schedules.cuda.threads import ThreadTiles

from ..importing.checks import checked, checked_instead
from ..importing.origins import bindings
from ..manifest import CallSpec
from ..tensorir.scatter import ATTRIBUTE, CacheUpdate
from .costs import kernel_spec
from .kernel_calls import CallRewriter, Memory, is_view, places_in
from .kernels import Scheduled

_UPDATE = "cache_update"  # the rule


def fuse_cache_writes(scheduled: Scheduled) -> Scheduled:
    """The module, without dataflow blocks, whose updates in place compute their rows."""
    return _Storer(scheduled).result()


class _Storer(CallRewriter):
    def __init__(self, scheduled: Scheduled) -> None:
        super().__init__(scheduled)
        body = self.mod["main"].body
        self.readers: Counter[relax.Var] = Counter()
        for expr in (body.body, *(binding.value for binding in bindings(body))):
            self.readers.update(relax.analysis.free_vars(expr))
        self.known: dict[tuple[ir.GlobalVar, ir.GlobalVar], ir.GlobalVar | None] = {}

    def rewritten(self, given: Sequence[relax.Binding]) -> list[relax.Binding]:
        memory = Memory()
        touched = [memory.touched(binding) for binding in given]
        place = {binding.var: n for n, binding in enumerate(given)}
        new: dict[int, relax.Binding | None] = {}  # by place: what is there now
        for at, updated in enumerate(given):
            if not self.is_update(updated):
                continue
            rows, views = updated.value.args[1].fields[1], list[relax.Binding]()
            while rows in place and self.readers[rows] == 1 and is_view(given[place[rows]]):
                views.insert(0, given[place[rows]])
                rows = _viewed(views[0].value)
            first = place.get(rows, at)
            written = set().union(*(touched[n][1] for n in range(first + 1, at + 1)))
            if self.is_computed(given[first]) and not touched[first][0] & written:
                stored = self.in_one(given[first], views, updated)
                new |= dict.fromkeys([first, *(place[view.var] for view in views)] if stored else [])
                new |= {place[old.var]: binding for old, binding in stored}
        return [b for n, binding in enumerate(given) if (b := new.get(n, binding)) is not None]

    def is_update(self, binding: relax.Binding) -> bool:
        """Whether it is one in place."""
        return self.rule(binding) == _UPDATE and bool(places_in(binding.value))

    def is_computed(self, binding: relax.Binding) -> bool:
        """Whether an element-wise kernel makes one tensor, which is read once."""
        is_one = isinstance(binding.var.ty, relax.TensorType) and self.readers[binding.var] == 1
        return self.rule(binding) == "elementwise" and is_one

    def in_one(
        self, made: relax.Binding, views: list[relax.Binding], updated: relax.Binding
    ) -> list[tuple[relax.Binding, relax.Binding]]:
        """What stands in the place of which binding, the call for both last; [] where they stay two. Checks of the rows
        become checks of what these are made of."""
        arguments, (cache, rows, *others) = list(made.value.args[1].fields), updated.value.args[1].fields
        kernel = self.kernel(made.value.args[0], updated.value.args[0])
        checks = [view for view in views if checked(view.value) is not None]
        tensors = [
            n for n, x in enumerate(arguments) if isinstance(x, relax.Var) and isinstance(x.ty, relax.TensorType)
        ]
        held = tensors[0] if tensors else -1
        if kernel is None or (checks and held < 0):
            return []
        stored: list[tuple[relax.Binding, relax.Binding]] = []
        for check in checks:
            value = arguments[held]
            call = checked_instead(check.value, value)
            arguments[held] = relax.Var(f"{value.name}_{check.var.name}", value.ty)
            stored.append((check, relax.VarBinding(arguments[held], self.builder.normalize(call))))
        update = _update_of(self.mod[updated.value.args[0]])
        length = [] if update.length is not None else [rows.ty.shape.values[update.row_axis]]
        taken = relax.Tuple([*arguments, cache, *others, *length])
        call = relax.op.call_tir_inplace(kernel, taken, [len(arguments)], [updated.var.ty])
        nodes = dict.fromkeys((*self.calls.pop(made.var).nodes, *self.calls[updated.var].nodes))
        self.calls[updated.var] = CallSpec(kernel.name_hint, tuple(nodes))
        return [*stored, (updated, relax.VarBinding(updated.var, self.builder.normalize(call)))]

    def kernel(self, made: ir.GlobalVar, updated: ir.GlobalVar) -> ir.GlobalVar | None:
        """The function that does what both do, if there is one."""
        if (made, updated) not in self.known:
            self.known[made, updated] = self.both(made, updated)
        return self.known[made, updated]

    def both(self, made: ir.GlobalVar, updated: ir.GlobalVar) -> ir.GlobalVar | None:
        update, launch = _update_of(self.mod[updated]), read_launch(self.mod[made])
        plain, then = self.unscheduled[made.name_hint], self.unscheduled[updated.name_hint]
        func = None if launch is None else emit_cache_rows(plain, update, ThreadTiles(launch.threads))
        if func is None:
            return None
        variable = self.builder.add_func(func.with_attr(schedules.ATTRIBUTE, _UPDATE), f"{made.name_hint}_into_cache")
        cache, rows, *others = then.params
        length = [] if update.length is not None else [rows.shape[update.row_axis]]
        parameters, name = [*plain.params[:-1], cache, *others, *length], variable.name_hint
        self.unscheduled[name] = tirx.PrimFunc(parameters, tirx.stmt_seq(plain.body, then.body))
        spec = kernel_spec(name, self.unscheduled[name], _UPDATE)
        self.kernels[name] = dataclasses.replace(spec, source=self.kernels[made.name_hint].source)
        return variable


def _update_of(func: tirx.PrimFunc) -> CacheUpdate:
    return CacheUpdate.from_json(str(func.attrs[ATTRIBUTE]))


def _viewed(value: relax.Expr) -> Any:
    """What a view is one of."""
    if isinstance(value, relax.Var):
        return value
    if isinstance(value, relax.TupleGetItem):
        return value.tuple_value
    return checked(value) if checked(value) is not None else value.args[0]
