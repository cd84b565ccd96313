"""What a profile needs to know of the kernels: what each computes and costs, who made its code, which nodes call it."""

from __future__ import annotations

import dataclasses
from typing import NamedTuple

import tvm
from tvm import ir, relax, tirx

import schedules
from schedules.reading.matmul import WEIGHTS
from schedules.variant import Choose

from ..attention.pairs import count_pairs
from ..attention.problem import ATTRIBUTE, AttentionProblem
from ..importing.origins import Origins, bindings
from ..manifest import CallSpec, KernelSpec
from .costs import kernel_spec


class Scheduled(NamedTuple):
    """A module with fast kernels, the description of each, the calls in the order of execution, and its functions as
    they were before, by name."""

    module: tvm.IRModule
    kernels: tuple[KernelSpec, ...]
    calls: tuple[CallSpec, ...]
    unscheduled: dict[str, tirx.PrimFunc]


_CALLS = ("relax.call_tir", "relax.call_tir_inplace")


def schedule(
    mod: tvm.IRModule,
    target: tvm.target.Target,
    origins: Origins,
    choose: Choose | None = None,
    known: schedules.Known | None = None,
) -> Scheduled:
    """The module with fast kernels.

    Each kind of attention gets a function beside it that counts what it has to do (lowering/attention/pairs.py).
    """
    calls = tuple(
        CallSpec(binding.value.args[0].name_hint, origins.get(binding.var.name, ()))
        for binding in bindings(mod["main"].body)
        if isinstance(binding.value, relax.Call) and binding.value.op in map(ir.Op.get, _CALLS)
    )
    called = {call.kernel for call in calls}
    scheduled = schedules.apply(_with_weights(mod) if target.kind.name == "cuda" else mod, target, choose, known)
    kernels = []
    for name, func in mod.functions_items():
        if not isinstance(func, tirx.PrimFunc) or name.name_hint not in called:
            continue
        attributes = scheduled[name].attrs
        spec = kernel_spec(name.name_hint, func, str(attributes.get(schedules.ATTRIBUTE, "plain")))
        spec = dataclasses.replace(spec, source=str(attributes.get(schedules.SOURCE, "")))
        if spec.kind == "attention":
            counter = f"{spec.name}_pairs"
            count = count_pairs(AttentionProblem.from_json(func.attrs[ATTRIBUTE]))
            # Of the host's arrays, whatever the target is.
            scheduled[counter] = count if target.host is None else count.with_attr("target", target.host)
            spec = dataclasses.replace(spec, counter=counter)
        kernels.append(spec)
    unscheduled = {name.name_hint: func for name, func in mod.functions_items() if isinstance(func, tirx.PrimFunc)}
    return Scheduled(scheduled, tuple(kernels), calls, unscheduled)


def _with_weights(mod: tvm.IRModule) -> tvm.IRModule:
    """The module whose functions know which of their parameters are weights, in every call."""
    main = mod["main"]
    weights = set(main.params[int(main.attrs["num_input"]) :])
    known: dict[ir.GlobalVar, set[int]] = {}
    callers = [function for _, function in mod.functions_items() if isinstance(function, relax.Function)]
    for value in (binding.value for function in callers for binding in bindings(function.body)):
        if isinstance(value, relax.Call) and value.op in map(ir.Op.get, _CALLS):
            mine = {n for n, argument in enumerate(value.args[1].fields) if argument in weights}
            known[value.args[0]] = mine & known.get(value.args[0], mine)
    functions = {
        name: func.with_attr(WEIGHTS, sorted(known[name])) if known.get(name) else func
        for name, func in mod.functions_items()
    }
    return tvm.IRModule(functions, attrs=mod.attrs)
