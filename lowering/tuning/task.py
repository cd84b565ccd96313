"""Tasks: what MetaSchedule searches, and what databases are keyed by.

A task is a module. A function that a rule takes is in it as `kernel`, unscheduled and at the sizes that are tuned for;
`main` has its tensors for parameters, which is all that MetaSchedule looks at, and one block, which is annotated with
a choice of tiles. Where loops are searched, the function is `main` itself.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Sequence
from typing import Any, TypeAlias

import tvm
import tvm_ffi
from tvm import s_tir, tirx
from tvm.script.ir_builder import IRBuilder
from tvm.script.ir_builder import tirx as T
from tvm_ffi import structural_equal

import schedules
from schedules.variant import Variant

from ..attention.plain import plain
from ..attention.problem import ATTRIBUTE, AttentionProblem
from ..tensorir.expressions import Expr, walk

BLOCK = "kernel"
"""The block of `main` whose annotation is the choice."""

KERNEL, MAIN = "kernel", "main"

_VERSIONS = "lowering.versions"
_SCALARS = "lowering.scalars"
_OURS = "lowering."
_KEPT = ("tirx.noalias", "s_tir")

# Rules for whose functions no schedule of loops comes near.
_BEYOND_LOOPS = ("attention", "matmul", "prologue_matmul", "epilogue_matmul", "row_blocks", "cache_update")

Shapes: TypeAlias = Sequence[tuple[int, ...] | int]
"""Of arguments: shapes of tensors, and numbers."""


def shapes_of(task: tvm.IRModule) -> tuple[tuple[int, ...] | int, ...]:
    """Those of the arguments that a task was made for."""
    main = task[MAIN]
    if not has_kernel(task):
        return tuple(tuple(int(n) for n in parameter.shape) for parameter in main.params)
    tensors = iter(tuple(int(n) for n in parameter.shape) for parameter in main.params)
    numbers = iter(json.loads(main.attrs[_SCALARS]))
    return tuple(next(tensors) if tirx.is_buffer_var(p) else next(numbers) for p in task[KERNEL].params)


def versions_of(task: tvm.IRModule) -> str:
    """The `versions` that a task was made with."""
    return str(task[MAIN].attrs[_VERSIONS])


def has_kernel(task: tvm.IRModule) -> bool:
    """Whether tiles are what is searched, or loops."""
    return any(name.name_hint == KERNEL for name in task.get_global_vars())


class NotTunable(Exception):
    """Why a function cannot be a task, in words that complete a sentence."""


def tiles_task(func: tirx.PrimFunc, arguments: Shapes, target: tvm.target.Target) -> tvm.IRModule | None:
    """The task of a function for such arguments; None where no rule takes it, or there is nothing to choose.

    Raises NotTunable.
    """
    kernel = at_sizes(func, arguments)
    answer = schedules.variants(kernel, target)
    if answer is None:
        return None
    _, variants = answer
    if not any(len(values) > 1 for v in variants for t in v.tiles.values() for values in _space(v, t).values()):
        return None
    numbers = [a for a in arguments if isinstance(a, int)]
    main = _main(kernel, arguments, versions(variants), numbers)
    return tvm.IRModule({MAIN: main, KERNEL: kernel.with_attr("global_symbol", KERNEL)})


def loops_task(func: tirx.PrimFunc, arguments: Shapes, target: tvm.target.Target) -> tvm.IRModule | None:
    """The task of scheduling a function for such arguments anew; None where our kernel is beyond that.

    Raises NotTunable.
    """
    if any(isinstance(argument, int) for argument in arguments):
        return None  # MetaSchedule knows tensors alone
    main = at_sizes(func, arguments)
    rule, variants = schedules.variants(main, target) or ("", ())
    if rule in _BEYOND_LOOPS or ATTRIBUTE in main.attrs or "s_tir" not in main.attrs:
        return None
    # What it is compared with is part of the task: a default that became better is another one.
    return tvm.IRModule({MAIN: _versioned(main, variants)})


def is_loops_task_of(task: tvm.IRModule, func: tirx.PrimFunc, variants: Sequence[Variant]) -> bool:
    """Whether this is the task of the function, which has these variants, at its sizes."""
    return bool(structural_equal(_versioned(func, variants), task[MAIN], True))


def is_current(task: tvm.IRModule, target: tvm.target.Target) -> bool:
    """Whether what a task was compared with is what its function is by default today."""
    name = KERNEL if has_kernel(task) else MAIN
    _, variants = schedules.variants(task[name], target) or ("", ())
    if has_kernel(task):
        return versions(variants) == versions_of(task)
    return is_loops_task_of(task, task[MAIN], variants)


def _versioned(func: tirx.PrimFunc, variants: Sequence[Variant]) -> tirx.PrimFunc:
    return func.with_attr({"global_symbol": MAIN, _VERSIONS: versions(variants)})


def versions(variants: Sequence[Variant]) -> str:
    """What must be the same for a choice to mean the same: the kernels of each variant and their versions, as JSON."""
    return json.dumps({v.name: {n: [type(t).__name__, t.version] for n, t in v.tiles.items()} for v in variants})


def at_sizes(func: tirx.PrimFunc, arguments: Shapes) -> tirx.PrimFunc:
    """The function for arguments of these shapes, without its name and what only callers need to know.

    Raises NotTunable where the shapes do not tell all sizes.
    """
    if func.attrs is not None and ATTRIBUTE in func.attrs:
        func = plain(_problem_at(AttentionProblem.from_json(func.attrs[ATTRIBUTE]), arguments))
    sizes = _sizes(func, arguments)
    if sizes:
        # Specialize replaces parameters. A size that is one itself leaves one behind that nobody reads.
        params = [tirx.Var(p.name, p.ty.dtype) if p in sizes else p for p in func.params]
        open_func = tirx.PrimFunc([*sizes, *params], func.body, func.ret_type, attrs=func.attrs)
        func = open_func.specialize({var: tirx.const(size, var.ty.dtype) for var, size in sizes.items()})
    attributes = {k: v for k, v in func.attrs.items() if k in _KEPT or k.startswith(_OURS)}
    return tirx.PrimFunc(func.params, func.body, func.ret_type, attrs=tvm.ir.make_node("ir.DictAttrs", **attributes))


def _space(variant: Variant, tiles: schedules.tiles.Tiles) -> schedules.tiles.Space:
    return tiles.space(variant.problem, variant.machine)


def _problem_at(problem: AttentionProblem, arguments: Shapes) -> AttentionProblem:
    """With the sizes that shapes tell."""
    shapes = dict(zip(problem.parameters(), arguments))
    found: dict[str, int] = {}
    for name, axes in (("q", problem.row_axes), ("k", problem.layout.axes if problem.dense else "")):
        shape = shapes.get(name)
        if isinstance(shape, tuple) and len(shape) == len(axes):
            found |= {f"{name}{axis}": size for axis, size in zip(axes, shape)}
    known = {"batch": found.get("qb"), "q_len": None if problem.packed else found.get("qt"), "kv_len": found.get("kt")}
    if problem.layout.mapped:
        del known["kv_len"]
    changed: dict[str, Any] = {
        name: size for name, size in known.items() if size is not None and getattr(problem, name) is None
    }
    return dataclasses.replace(problem, **changed)


def _sizes(func: tirx.PrimFunc, arguments: Shapes) -> dict[tirx.Var, int]:
    """The symbolic sizes of a function's tensors. Raises NotTunable."""
    found: dict[tirx.Var, int] = {}
    seen: set[tirx.Var] = set()
    for parameter, argument in zip(func.params, arguments, strict=True):
        if isinstance(argument, int):
            continue
        for dim, size in zip(parameter.shape, argument, strict=True):
            if isinstance(dim, tirx.Var):
                found[dim] = size
            seen |= _variables(dim)
    unknown = seen - set(found) - set(func.params)
    if unknown:
        raise NotTunable(f"its arguments do not tell {', '.join(sorted(v.name for v in unknown))}")
    return found


def _variables(dim: Expr) -> set[tirx.Var]:
    return {node for node in walk(dim) if isinstance(node, tirx.Var)}


def _main(kernel: tirx.PrimFunc, arguments: Shapes, versions: str, numbers: list[int]) -> tirx.PrimFunc:
    """What MetaSchedule looks at."""
    with IRBuilder() as builder, T.prim_func(s_tir=True):
        T.func_name(MAIN)
        T.func_attr({"tirx.noalias": True, _VERSIONS: versions, _SCALARS: json.dumps(numbers)})
        for parameter, argument in zip(kernel.params, arguments, strict=True):
            if not isinstance(argument, int):
                T.match_buffer(
                    T.arg(parameter.name, T.handle()), [tirx.const(n, "int64") for n in argument], parameter.dtype
                )
        with T.sblock(BLOCK):
            T.reads()
            T.writes()
            T.evaluate(0)
    return builder.get()


def written(func: tirx.PrimFunc) -> list[bool]:
    """Of each parameter, whether the function stores into it, be it through a view."""
    views: dict[tirx.Buffer, set[tirx.Var]] = {}
    stored: set[tirx.Buffer] = set()

    def declare(stmt: tirx.DeclBuffer) -> None:
        views[stmt.buffer] = _variables(stmt.data)

    def match(block: s_tir.SBlock) -> None:
        for view in block.match_buffers:
            views[view.buffer] = {view.source.buffer}

    walks = [
        (tirx.DeclBuffer, declare),
        (s_tir.SBlock, match),
        (tirx.BufferStore, lambda store: stored.add(store.buffer)),
    ]
    tvm_ffi.structural_walk(func, walks)
    for buffer in list(stored):
        stored |= views.get(buffer, set())
    return [any(p.same_as(s) for s in stored) for p in func.params]
