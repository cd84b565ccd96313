"""The pipeline is a list: every pass can be run alone, once the passes that it names have run."""

from __future__ import annotations

import numpy as np
import onnx
import onnx_ir as ir
import pytest
import tvm
from tvm import relax

from lowering.compiling.pipeline import PASSES, PHASES, run_passes
from lowering.importing.importer import import_model
from lowering.ops import lookup
from lowering.passes.compile_state import CompileState, PassOptions
from lowering.target import resolve

LAYER = """<ir_version: 11, opset_import: ["" : 24]>
layer (float[B, S, 64] x, float[B, C, 64] k, int64[B] at) => (float[B, S, 64] y, float[B, C, 64] next_k) {
  h = LayerNormalization (x, scale)
  q = MatMul (h, wq)
  new_k = MatMul (h, wk)
  next_k = TensorScatter <axis = 1> (k, new_k, at)
  z = Attention <q_num_heads = 4, kv_num_heads = 4> (q, next_k, next_k)
  y = Add (x, z) }"""


def import_layer() -> CompileState:
    """Return the state before the first pass."""
    model, rng = onnx.parser.parse_model(LAYER), np.random.default_rng(0)
    shapes = {"scale": (64,), "wq": (64, 64), "wk": (64, 64)}
    arrays = {name: rng.standard_normal(shape).astype(np.float32) for name, shape in shapes.items()}
    model.graph.initializer.extend(onnx.numpy_helper.from_array(array, name) for name, array in arrays.items())
    imported = import_model(ir.from_proto(model), lookup, (), True, 0)
    return CompileState.from_imported(imported, resolve("cpu")[0], PassOptions(donated={1: 1}))


def test_entries_follow_the_passes_that_they_name() -> None:
    names = [entry.name for entry in PASSES]
    assert len(set(names)) == len(names)
    for number, entry in enumerate(PASSES):
        missing = set(entry.after) - set(names[:number])
        assert not missing, f"{entry.name} runs before {missing}"


@pytest.mark.parametrize("phase", PHASES)
def test_each_pass_runs_alone(phase: str) -> None:
    """A state goes from entry to entry, each run by itself, and the module stays well formed."""
    first = next(number for number, entry in enumerate(PASSES) if entry is PHASES[phase][0])
    state = run_passes(import_layer(), PASSES[:first])
    for entry in PHASES[phase]:
        before = state
        state = run_passes(before, [entry])
        assert isinstance(state.module, tvm.IRModule) and (entry.applies_to(before) or state is before)
        if phase == "model":  # later passes create values without types
            relax.analysis.well_formed(state.module)


def test_scheduling_describes_the_kernels() -> None:
    first = next(number for number, entry in enumerate(PASSES) if entry.name == "schedule")
    last = next(number for number, entry in enumerate(PASSES) if entry.name == "describe_kernels")
    before = run_passes(import_layer(), PASSES[:first])
    after = run_passes(before, PASSES[first : last + 1])
    assert not before.kernels and {kernel.kind for kernel in after.kernels} >= {"attention", "matmul"}
    assert {call.kernel for call in after.calls} == {kernel.name for kernel in after.kernels}
    assert set(after.unscheduled) >= {kernel.name for kernel in after.kernels}


def test_a_gpu_s_passes_are_left_out_on_a_cpu() -> None:
    state = import_layer()
    left_out = {entry.name for entry in PASSES if not entry.applies_to(state)}
    assert {"fuse_epilogues", "fuse_launches", "skip_assertions"} <= left_out
    assert "fuse_row_blocks" not in left_out
