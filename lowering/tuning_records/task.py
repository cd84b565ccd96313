"""Tasks: the modules that MetaSchedule searches, and the keys of databases.

A module with tiles has a function of one of the compiler's kernels as `kernel`, unscheduled and at the tuned sizes. Its
`main` has the tensors as parameters, which is all that MetaSchedule reads, and one block, which is annotated with a
choice of tiles. If loops are searched, the function itself is `main`.
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

from ..attention.codegen.plain import build_plain_attention
from ..attention.record.problem import ATTRIBUTE, AttentionProblem
from ..tensorir.expressions import Expr, walk

BLOCK = "kernel"
"""The block of `main` whose annotation is the choice."""

KERNEL, MAIN = "kernel", "main"

_VERSIONS = "lowering.versions"
_SCALARS = "lowering.scalars"
_LOWERING_PREFIX = "lowering."
_PRESERVED_ATTRIBUTES = ("tirx.noalias", "s_tir")

# Rules whose functions no schedule of loops can match in speed.
_RULES_WITHOUT_LOOPS = (
    "attention",
    "matmul",
    "winograd",
    "prologue_matmul",
    "epilogue_matmul",
    "row_blocks",
    "cache_update",
)

Shapes: TypeAlias = Sequence[tuple[int, ...] | int]
"""Arguments: shapes of tensors, and integers."""


def read_shapes(task: tvm.IRModule) -> tuple[tuple[int, ...] | int, ...]:
    """Return the arguments that a task was created for: shapes of tensors, and integers."""
    main = task[MAIN]
    if not has_kernel(task):
        return tuple(tuple(int(n) for n in parameter.shape) for parameter in main.params)
    tensors = iter(tuple(int(n) for n in parameter.shape) for parameter in main.params)
    numbers = iter(json.loads(main.attrs[_SCALARS]))
    return tuple(next(tensors) if tirx.is_buffer_var(p) else next(numbers) for p in task[KERNEL].params)


def read_versions(task: tvm.IRModule) -> str:
    """Return the kernel versions that a task was created with."""
    return str(task[MAIN].attrs[_VERSIONS])


def has_kernel(task: tvm.IRModule) -> bool:
    """Return whether the task searches tiles, rather than loops."""
    return any(name.name_hint == KERNEL for name in task.get_global_vars())


class NotTunable(Exception):
    """The reason why a function cannot be a task, as a clause that completes a sentence."""


def create_tiles_task(func: tirx.PrimFunc, arguments: Shapes, target: tvm.target.Target) -> tvm.IRModule | None:
    """Return the task of a function for such arguments, or None without a rule or a choice for it.

    Raises NotTunable.
    """
    kernel = specialize_sizes(func, arguments)
    result = schedules.find_variants(kernel, target)
    if result is None:
        return None
    _, variants = result
    if not any(len(values) > 1 for v in variants for t in v.tiles.values() for values in _read_space(v, t).values()):
        return None
    numbers = [a for a in arguments if isinstance(a, int)]
    main = _create_main(kernel, arguments, encode_versions(variants), numbers)
    return tvm.IRModule({MAIN: main, KERNEL: kernel.with_attr("global_symbol", KERNEL)})


def create_loops_task(func: tirx.PrimFunc, arguments: Shapes, target: tvm.target.Target) -> tvm.IRModule | None:
    """Return the task of scheduling a function's loops, or None if a kernel of the compiler is better.

    Raises NotTunable.
    """
    if any(isinstance(argument, int) for argument in arguments):
        return None  # MetaSchedule supports only tensors
    main = specialize_sizes(func, arguments)
    rule, variants = schedules.find_variants(main, target) or ("", ())
    if rule in _RULES_WITHOUT_LOOPS or ATTRIBUTE in main.attrs or "s_tir" not in main.attrs:
        return None
    # The default is part of the task: with a better default it is another task.
    return tvm.IRModule({MAIN: _add_versions(main, variants)})


def is_loops_task_for(task: tvm.IRModule, func: tirx.PrimFunc, variants: Sequence[Variant]) -> bool:
    """Return whether this is the task of the function, which has these variants, at its sizes."""
    return bool(structural_equal(_add_versions(func, variants), task[MAIN], True))


def is_current(task: tvm.IRModule, target: tvm.target.Target) -> bool:
    """Return whether the default of a task is still the current default of its function."""
    name = KERNEL if has_kernel(task) else MAIN
    _, variants = schedules.find_variants(task[name], target) or ("", ())
    if has_kernel(task):
        return encode_versions(variants) == read_versions(task)
    return is_loops_task_for(task, task[MAIN], variants)


def _add_versions(func: tirx.PrimFunc, variants: Sequence[Variant]) -> tirx.PrimFunc:
    return func.with_attr({"global_symbol": MAIN, _VERSIONS: encode_versions(variants)})


def encode_versions(variants: Sequence[Variant]) -> str:
    """Return the kernels of each variant and their versions, as JSON, which determine a choice's meaning."""
    return json.dumps({v.name: {n: [type(t).__name__, t.version] for n, t in v.tiles.items()} for v in variants})


def specialize_sizes(func: tirx.PrimFunc, arguments: Shapes) -> tirx.PrimFunc:
    """Return the function for arguments of these shapes, without its name and attributes for callers.

    Raises NotTunable if the shapes do not determine all sizes.
    """
    if func.attrs is not None and ATTRIBUTE in func.attrs:
        func = build_plain_attention(_bind_problem(AttentionProblem.from_json(func.attrs[ATTRIBUTE]), arguments))
    sizes = _match_sizes(func, arguments)
    if sizes:
        # specialize() replaces parameters. A size that is itself a parameter leaves an unused one.
        params = [tirx.Var(p.name, p.ty.dtype) if p in sizes else p for p in func.params]
        symbolic_func = tirx.PrimFunc([*sizes, *params], func.body, func.ret_type, attrs=func.attrs)
        func = symbolic_func.specialize({var: tirx.const(size, var.ty.dtype) for var, size in sizes.items()})
    attributes = {k: v for k, v in func.attrs.items() if k in _PRESERVED_ATTRIBUTES or k.startswith(_LOWERING_PREFIX)}
    return tirx.PrimFunc(func.params, func.body, func.ret_type, attrs=tvm.ir.make_node("ir.DictAttrs", **attributes))


def _read_space(variant: Variant, tiles: schedules.tiles.Tiles) -> schedules.tiles.Space:
    return tiles.space(variant.problem, variant.machine)


def _bind_problem(problem: AttentionProblem, arguments: Shapes) -> AttentionProblem:
    """Return the problem with the sizes that the shapes determine."""
    shapes = dict(zip(problem.parameters(), arguments))
    sizes_by_axis: dict[str, int] = {}
    for name, axes in (("q", problem.row_axes), ("k", problem.layout.axes if problem.is_dense else "")):
        shape = shapes.get(name)
        if isinstance(shape, tuple) and len(shape) == len(axes):
            sizes_by_axis |= {f"{name}{axis}": size for axis, size in zip(axes, shape)}
    problem_sizes = {
        "batch": sizes_by_axis.get("qb"),
        "q_len": None if problem.is_ragged else sizes_by_axis.get("qt"),
        "kv_len": sizes_by_axis.get("kt"),
    }
    if problem.layout.is_mapped:
        del problem_sizes["kv_len"]
    new_fields: dict[str, Any] = {
        name: size for name, size in problem_sizes.items() if size is not None and getattr(problem, name) is None
    }
    return dataclasses.replace(problem, **new_fields)


def _match_sizes(func: tirx.PrimFunc, arguments: Shapes) -> dict[tirx.Var, int]:
    """Return the symbolic sizes of a function's tensors. Raises NotTunable."""
    sizes: dict[tirx.Var, int] = {}
    variables: set[tirx.Var] = set()
    for parameter, argument in zip(func.params, arguments, strict=True):
        if isinstance(argument, int):
            continue
        for dim, size in zip(parameter.shape, argument, strict=True):
            if isinstance(dim, tirx.Var):
                sizes[dim] = size
            variables |= _find_variables(dim)
    unknown = variables - set(sizes) - set(func.params)
    if unknown:
        raise NotTunable(f"its arguments do not tell {', '.join(sorted(v.name for v in unknown))}")
    return sizes


def _find_variables(dim: Expr) -> set[tirx.Var]:
    return {node for node in walk(dim) if isinstance(node, tirx.Var)}


def _create_main(kernel: tirx.PrimFunc, arguments: Shapes, kernel_versions: str, numbers: list[int]) -> tirx.PrimFunc:
    """Return the function that MetaSchedule searches."""
    with IRBuilder() as builder, T.prim_func(s_tir=True):
        T.func_name(MAIN)
        T.func_attr({"tirx.noalias": True, _VERSIONS: kernel_versions, _SCALARS: json.dumps(numbers)})
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


def find_written_parameters(func: tirx.PrimFunc) -> list[bool]:
    """Return for each parameter whether the function stores into it, directly or through a view."""
    views: dict[tirx.Buffer, set[tirx.Var]] = {}
    stored_buffers: set[tirx.Buffer] = set()

    def declare(stmt: tirx.DeclBuffer) -> None:
        views[stmt.buffer] = _find_variables(stmt.data)

    def match(block: s_tir.SBlock) -> None:
        for view in block.match_buffers:
            views[view.buffer] = {view.source.buffer}

    visitors = [
        (tirx.DeclBuffer, declare),
        (s_tir.SBlock, match),
        (tirx.BufferStore, lambda store: stored_buffers.add(store.buffer)),
    ]
    tvm_ffi.structural_walk(func, visitors)
    for buffer in list(stored_buffers):
        stored_buffers |= views.get(buffer, set())
    return [any(p.same_as(s) for s in stored_buffers) for p in func.params]
