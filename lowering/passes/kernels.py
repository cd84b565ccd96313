"""Scheduling, and the description of kernels for a profile: computation and cost, rule, and ONNX nodes."""

from __future__ import annotations

import dataclasses

import tvm
from tvm import ir, relax, tirx

import schedules
from schedules.reading.matmul import WEIGHTS

from ..attention.codegen.pairs import count_pairs
from ..attention.record.problem import ATTRIBUTE, AttentionProblem
from ..importing.origins import iterate_bindings
from ..manifest import CallSpec
from .aliases import read_kernel
from .compile_state import CompileState
from .costs import make_kernel_spec
from .graph.mark_tf32_matmuls import describe_tf32_matmuls


def schedule_kernels(state: CompileState) -> CompileState:
    """Schedule the kernels."""
    mod, target, options = state.module, state.kernel_target.tvm, state.options
    scheduled = schedules.apply_schedules(
        _annotate_weights(mod) if target.kind.name == "cuda" else mod, target, options.choose, options.cached
    )
    unscheduled = {name.name_hint: func for name, func in mod.functions_items() if isinstance(func, tirx.PrimFunc)}
    notes = () if options.matmuls is None else (describe_tf32_matmuls(scheduled, options.matmuls),)
    return dataclasses.replace(state, module=scheduled, unscheduled=unscheduled, notes=(*state.notes, *notes))


def describe_kernels(state: CompileState) -> CompileState:
    """Describe the kernels and their calls.

    Each kind of attention gets an additional function that counts its work (lowering/attention/codegen/pairs.py).
    """
    mod, target = state.module.clone(), state.kernel_target.tvm
    bindings = iterate_bindings(mod["main"].body)
    called = [(binding.var.name, kernel) for binding in bindings if (kernel := read_kernel(binding)) is not None]
    calls = tuple(CallSpec(kernel.name_hint, state.origins.get(result, ())) for result, kernel in called)
    names, kernels = {call.kernel for call in calls}, []
    for name, scheduled in state.module.functions_items():
        if name.name_hint not in names:
            continue
        attributes, func = scheduled.attrs, state.unscheduled[name.name_hint]
        spec = make_kernel_spec(name.name_hint, func, str(attributes.get(schedules.ATTRIBUTE, "plain")))
        spec = dataclasses.replace(spec, source=str(attributes.get(schedules.SOURCE, "")))
        if spec.kind == "attention":
            counter = f"{spec.name}_pairs"
            count = count_pairs(AttentionProblem.from_json(func.attrs[ATTRIBUTE]))
            # It takes arrays of the host, for any target.
            mod[counter] = count if target.host is None else count.with_attr("target", target.host)
            spec = dataclasses.replace(spec, counter=counter)
        kernels.append(spec)
    return dataclasses.replace(state, module=mod, kernels=tuple(kernels), calls=calls)


def _annotate_weights(mod: tvm.IRModule) -> tvm.IRModule:
    """Return the module whose functions are annotated with the parameters that are weights in every call."""
    main = mod["main"]
    weights = set(main.params[int(main.attrs["num_input"]) :])
    weight_parameters: dict[ir.GlobalVar, set[int]] = {}
    callers = [function for _, function in mod.functions_items() if isinstance(function, relax.Function)]
    for binding in (binding for function in callers for binding in iterate_bindings(function.body)):
        name = read_kernel(binding)
        if name is not None:
            parameters = {n for n, argument in enumerate(binding.value.args[1].fields) if argument in weights}
            weight_parameters[name] = parameters & weight_parameters.get(name, parameters)
    functions = {
        name: func.with_attr(WEIGHTS, sorted(weight_parameters[name])) if weight_parameters.get(name) else func
        for name, func in mod.functions_items()
    }
    return tvm.IRModule(functions, attrs=mod.attrs)
