"""Functions without a good kernel of onnx-lowering: MetaSchedule's own schedules are searched, stored and used."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import onnx
import pytest
from onnx import helper, numpy_helper
from tvm.s_tir import meta_schedule as ms

import lowering
from lowering.compiling.compilation import compiled
from lowering.compiling.options import CompileOptions
from lowering.target import resolve
from lowering.tuning.search.context import TuningContext, create_search_strategy
from lowering.tuning.search.loop_space import LoopSpace
from lowering.tuning_records.candidate_choices import DEFAULT, read_choice
from lowering.tuning_records.task import create_loops_task, create_tiles_task

K, N = 96, 160


def matmul(rows: int | str, dtype: str = "int32") -> onnx.ModelProto:
    """Return x W. No kernel of onnx-lowering takes integers."""
    kind = helper.np_dtype_to_tensor_dtype(np.dtype(dtype))
    graph = helper.make_graph(
        [helper.make_node("MatMul", ["x", "W"], ["y"], name="matmul")],
        "matmul",
        [helper.make_tensor_value_info("x", kind, [rows, K])],
        [helper.make_tensor_value_info("y", kind, [rows, N])],
        [numpy_helper.from_array(WEIGHT.astype(dtype), "W")],
    )
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 20)], ir_version=10)


WEIGHT = np.random.default_rng(0).integers(-99, 99, (K, N), np.int32)


@pytest.fixture(scope="module")
def tuned(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, lowering.Tuning]:
    folder = tmp_path_factory.mktemp("database")
    return folder, lowering.tune(matmul("n"), folder, trials=30, sizes=[{"n": 64}])


@pytest.mark.parametrize("rows", [64, "n"])
def test_loops_win_and_are_used(tuned: tuple[Path, lowering.Tuning], rows: int | str) -> None:
    """Static sizes run the tuned schedules; a symbolic size does so only at the tuned size."""
    folder, tuning = tuned
    (loops,) = (o for o in tuning.outcomes if o.searched == "loops")
    assert loops.gain > 1.4 and not loops.failures
    assert loops.in_model is not None and loops.in_model < 1 / 1.1
    assert tuning.whole_gain is not None and tuning.whole_gain > 1.1
    module = lowering.compile(matmul(rows), database=folder)
    (kernel,) = module.manifest.kernels
    assert kernel.schedule == "loops" and kernel.source == f"tuned {loops.gain:.2f}x"
    rng = np.random.default_rng(1)
    for n in (64, 1, 63, 65) if rows == "n" else (64,):
        x = rng.integers(-99, 99, (n, K), np.int32)
        for threads in (1, 2):
            y = module.bind({"x": x}, threads=threads)()["y"]
            np.testing.assert_array_equal(y, x @ WEIGHT)


def test_other_versions_of_the_default_are_other_tasks(
    tuned: tuple[Path, lowering.Tuning], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A comparison with one default says nothing about a better one."""
    from schedules.cpu.elementwise.reduction import ReductionTiles

    monkeypatch.setattr(ReductionTiles, "version", ReductionTiles.version + 1)
    module = lowering.compile(matmul(64), database=tuned[0])
    assert {k.schedule for k in module.manifest.kernels} >= {"reduction"}
    assert "loops" not in {k.schedule for k in module.manifest.kernels}


def first_candidates(seed: int) -> list[str]:
    target = resolve("cpu:x86-64-v3")[0].tvm
    functions = compiled(matmul(64), CompileOptions(target="cpu:x86-64-v3", threads=1)).unscheduled[0]
    func = next(f for name, f in functions.items() if "matmul" in name)
    task = create_loops_task(func, [tuple(int(n) for n in p.shape) for p in func.params], target)
    assert task is not None
    space = LoopSpace(task, target, 1)
    assert not space.is_empty
    context = TuningContext(task, space.target, space.generator(), create_search_strategy(), "matmul", seed + 1)
    context.pre_tuning(16, 8, database=ms.database.MemoryDatabase(), cost_model=ms.cost_model.RandomModel(seed=seed))
    return [read_choice(c.sch.mod) or "" for c in context.generate_measure_candidates()]


def test_the_same_seed_gives_the_same_candidates() -> None:
    first = first_candidates(3)
    assert first == first_candidates(3) != first_candidates(4)
    assert len(first) == 8 and DEFAULT not in first


def test_kernels_of_attention_and_matmuls_have_no_loops() -> None:
    target = resolve("cpu:x86-64-v3")[0].tvm
    functions = compiled(matmul(64, "float32"), CompileOptions(target="cpu:x86-64-v3", threads=1)).unscheduled[0]
    tasks = [
        (create_tiles_task(func, shapes, target), create_loops_task(func, shapes, target))
        for func in functions.values()
        if (shapes := [tuple(int(n) for n in p.shape) for p in func.params])
    ]
    assert any(tiles is not None and loops is None for tiles, loops in tasks)
