"""The space of tiles as MetaSchedule sees it."""

from __future__ import annotations

import json
from functools import cache

import pytest
import tvm
from tvm.s_tir import Schedule
from tvm.s_tir import meta_schedule as ms
from tvm_ffi import structural_equal

import schedules
from lowering.attention.codegen.plain import build_plain_attention
from lowering.attention.record.problem import AttentionProblem, Window
from lowering.compiling.compilation import compiled
from lowering.compiling.options import CompileOptions
from lowering.target import resolve
from lowering.tuning.build import schedule_candidate
from lowering.tuning.search.context import TuningContext, create_search_strategy
from lowering.tuning.search.cost_model import TileCostModel
from lowering.tuning.search.tile_space import TileSpace
from lowering.tuning_records.candidate_choices import read_choice, read_trace_choice
from lowering.tuning_records.task import (
    NotTunable,
    create_tiles_task,
    find_written_parameters,
    read_shapes,
    specialize_sizes,
)
from tests.tuning.models import K, N, matmul

TARGETS = {name: resolve(name)[0] for name in ("cpu:x86-64-v3", "cpu:x86-64-v4", "cpu:aarch64")}
V4 = TARGETS["cpu:x86-64-v4"]

ATTENTION = AttentionProblem(
    None, None, None, 4, 2, 64, 64, "float32", "float32", "float32", 0.125, window=Window(right=0, offset="past")
)


def attention_shapes(rows: int, keys: int) -> list:
    return [(1, 4, rows, 64), (1, 2, keys, 64), (1, 2, keys, 64), keys - rows, (1, 4, rows, 64)]


@cache
def functions(rows: int | str) -> dict:
    return compiled(matmul(rows), CompileOptions(target="cpu:x86-64-v4")).unscheduled[0]


def matmul_task(rows: int, target: tvm.target.Target = V4.tvm) -> tvm.IRModule:
    (func,) = [f for name, f in functions("n").items() if "matmul" in name]
    shapes = [(rows, K), *[tuple(int(n) for n in p.shape) for p in func.params[1:-1]], (rows, N)]
    task = create_tiles_task(func, shapes, target)
    assert task is not None
    return task


@pytest.mark.parametrize("target", TARGETS.values(), ids=TARGETS)
@pytest.mark.parametrize("rows, keys", [(1, 64), (100, 128)])
def test_every_sample_is_legal_and_dull_fields_are_not_drawn(target, rows: int, keys: int) -> None:
    task = create_tiles_task(build_plain_attention(ATTENTION), attention_shapes(rows, keys), target.tvm)
    assert task is not None
    space = TileSpace(task, target.tvm)
    kernels = {k for k, _, _ in space.list_fields("tiled")}
    assert kernels == ({"decode"} if rows == 1 else {"prefill"})
    fields = space.list_fields("tiled")
    variant = space.variants[0]
    for seed in range(40):
        choice = space.find_nearest(
            "tiled", [(seed * 7 + 3 * k) % len(values) for k, (_, _, values) in enumerate(fields)]
        )
        for tiles in choice.tiles.values():
            tiles.check(variant.problem, variant.machine)
        assert space.read(choice.to_json()) == choice


def test_the_default_is_in_the_space_and_its_trace_gives_it() -> None:
    task = matmul_task(16)
    space = TileSpace(task, V4.tvm)
    trace = space.default_trace(task)
    assert read_trace_choice(trace) == space.default
    schedule = Schedule(task)
    trace.apply_to_schedule(schedule, remove_postproc=False)
    assert read_choice(schedule.mod) == space.default
    usual = schedules.apply_schedules(tvm.IRModule({"f": task["kernel"]}), V4.tvm)["f"]
    assert structural_equal(schedule_candidate(schedule.mod, V4.tvm).body, usual.body, True)
    assert structural_equal(schedule_candidate(task, V4.tvm).body, usual.body, True)


def search(seed: int) -> list[str]:
    """Return the choices of a first batch, and of one after results that depend only on the choice."""
    task = matmul_task(16)
    space = TileSpace(task, V4.tvm)
    model = TileCostModel(space, seed)
    context = TuningContext(task, V4.tvm, space.generator(), create_search_strategy(), "matmul", seed + 1)
    database = ms.database.MemoryDatabase()
    workload = database.commit_workload(task)
    info = ms.arg_info.ArgInfo.from_prim_func(task["main"])
    context.pre_tuning(64, 8, database=database, cost_model=model)
    choices: list[str] = []
    for _ in range(2):
        candidates = context.generate_measure_candidates()
        texts = [read_choice(c.sch.mod) or "" for c in candidates]
        results = [ms.runner.RunnerResult([1 + len(t) / 100 + sum(map(ord, t)) / 1e6], None) for t in texts]
        for candidate, result in zip(candidates, results):
            record = ms.database.TuningRecord(candidate.sch.trace, workload, result.run_secs, V4.tvm, info)
            database.commit_tuning_record(record)
        model.update(context, candidates, results)
        context.notify_runner_results(candidates, results)
        choices += texts
    return choices


def test_the_same_seed_gives_the_same_candidates() -> None:
    first = search(3)
    assert first == search(3) != search(4)
    assert len(set(first)) > 8 and all(json.loads(text)["variant"] == "panels" for text in first)


def test_a_task_is_the_same_whatever_the_model_calls_its_parts() -> None:
    task = create_tiles_task(build_plain_attention(ATTENTION), attention_shapes(8, 64), V4.tvm)
    again = create_tiles_task(build_plain_attention(ATTENTION), attention_shapes(8, 64), V4.tvm)
    other = create_tiles_task(build_plain_attention(ATTENTION), attention_shapes(8, 128), V4.tvm)
    assert structural_equal(task, again) and not structural_equal(task, other)
    assert task is not None and read_shapes(task) == tuple(attention_shapes(8, 64))


def test_sizes_that_arguments_do_not_tell() -> None:
    (func,) = [f for name, f in functions("n").items() if "matmul" in name]
    bound = specialize_sizes(func, [(16, K), *[tuple(int(n) for n in p.shape) for p in func.params[1:-1]], (16, N)])
    assert [int(n) for n in bound.params[-1].shape] == [16, N]
    size = tvm.tirx.Var("n", "int64")
    x, y = (tvm.tirx.decl_buffer((size * 2,), "float32", name) for name in "xy")
    body = tvm.tirx.BufferStore(y, tvm.tirx.BufferLoad(x, [0]), [0])
    with pytest.raises(NotTunable, match="do not tell n"):
        specialize_sizes(tvm.tirx.PrimFunc([x, y], body).with_attr("s_tir", True), [(4,), (4,)])


def test_a_size_that_is_a_parameter_itself_stays_one() -> None:
    """Callers still pass it."""
    size = tvm.tirx.Var("n", "int64")
    x, y = (tvm.tirx.decl_buffer((size,), "float32", name) for name in "xy")
    body = tvm.tirx.BufferStore(y, tvm.tirx.BufferLoad(x, [0]) + tvm.tirx.Cast("float32", size), [0])
    bound = specialize_sizes(tvm.tirx.PrimFunc([x, y, size], body).with_attr("s_tir", True), [(4,), (4,), 4])
    assert len(bound.params) == 3 and [int(n) for n in bound.params[1].shape] == [4]
    assert 'T.Cast("float32", T.int64(4))' in str(bound)


def test_which_parameters_are_written() -> None:
    assert find_written_parameters(build_plain_attention(ATTENTION)) == [False, False, False, False, True]
    (func,) = [f for name, f in functions("n").items() if "matmul" in name]
    assert find_written_parameters(func) == [False] * (len(func.params) - 1) + [True]
