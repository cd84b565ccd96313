"""The pipeline: one flat, named list of passes from an imported model to TensorIR and VM instructions.

Every pass maps a CompileState to a CompileState. An entry names the passes that must precede it, and the targets that
it runs for.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Literal, TypeAlias

import onnx_ir as ir
import tvm
from tvm import relax

from ..errors import CompilerError, LoweringError
from ..importing.origins import trace_fusion
from ..passes.compile_state import CompileState, StatePass, lift
from ..passes.fusion.fuse_cache_writes import fuse_cache_writes
from ..passes.fusion.fuse_epilogues import fuse_epilogues
from ..passes.fusion.fuse_launches import fuse_launches
from ..passes.fusion.fuse_norm_prologues import fuse_norm_prologues
from ..passes.fusion.fuse_row_blocks import fuse_row_blocks
from ..passes.fusion.group_matmuls import group_matmuls
from ..passes.graph.convolutions import lower_convolutions
from ..passes.graph.equal_functions import merge_equal_functions
from ..passes.graph.fold_constants import fold_constants
from ..passes.graph.fold_heads import fold_heads
from ..passes.graph.fold_masks import fold_masks
from ..passes.graph.fold_scores import fold_scores
from ..passes.graph.fold_transposes import fold_transposes
from ..passes.graph.lift_constants import lift_constants
from ..passes.graph.mark_tf32_matmuls import mark_tf32_matmuls
from ..passes.graph.pack_weights import pack_weights
from ..passes.graph.prove_indices import prove_indices
from ..passes.kernels import describe_kernels, schedule_kernels
from ..passes.memory.donation import donate
from ..passes.memory.plan_memory import plan_memory
from ..passes.memory.release import add_release
from ..passes.memory.replay import add_replay
from ..passes.memory.size_classes import size_classes
from ..passes.tvm_workarounds.alignment import assume_alignment
from ..passes.tvm_workarounds.guard_divisions import guard_divisions
from ..passes.tvm_workarounds.guard_float_arithmetic import WITH_ZEROS, guard_float_arithmetic
from ..passes.tvm_workarounds.hoist_shape_bindings import hoist_shape_bindings
from ..passes.tvm_workarounds.name_shape_assertions import name_shape_assertions
from ..passes.tvm_workarounds.split_tuple_results import split_tuple_results
from ..passes.tvm_workarounds.unify_shape_symbols import unify_shape_symbols
from . import progress

# Operations in a fused group; in exported models the largest have 4. Chains of 240 operators run fastest in groups of
# 16, or close to it, except for cheap operators on 64 elements. Traversals of expressions recurse no deeper than the
# length of a group.
_MAX_FUSED = 16

_SLOW_SECONDS = 0.05  # seconds, from which on the log lists a pass among the stages

Dump = Callable[[str, ir.Model | tvm.IRModule], None]
AnyTarget: TypeAlias = Literal["any", "cpu", "gpu", "gpu kernels"]
_t = relax.transform


@dataclass(frozen=True)
class Pass:
    """An entry of the pipeline.

    Attributes:
        name: Its name in dumps, the log and errors.
        run: The pass.
        after: Passes that must have run before it, in any phase.
        target: Where it runs: "cpu" and "gpu" for a state of such a target, "gpu kernels" only if no CPU stands in.
    """

    name: str
    run: StatePass
    after: tuple[str, ...] = ()
    target: AnyTarget = "any"

    def applies_to(self, state: CompileState) -> bool:
        """Return whether the pass runs for the state's target."""
        if self.target == "gpu kernels":
            return bool(state.kernel_target.architecture)
        return self.target == "any" or (self.target == "gpu") == bool(state.target.architecture)


def _keep(_: relax.BlockBuilder, call: relax.Call) -> relax.Call:
    """Leave an operator as it is."""
    return call


def fuse_operators(state: CompileState) -> CompileState:
    """Group operators into functions; a group has the origins of all its members."""
    with tvm.transform.PassContext(config={"relax.FuseOps.max_depth": _MAX_FUSED}):
        fused = _t.FuseOps()(state.module)
    return replace(state, module=fused, origins=trace_fusion(state.module, fused, state.origins))


def bundle_weights(state: CompileState) -> CompileState:
    """Make the weights of `main`, if it has any, one parameter: a tuple."""
    return replace(state, module=_t.BundleModelParams("weights")(state.module)) if state.weights else state


PHASES: dict[str, tuple[Pass, ...]] = {
    "model": (  # Relax: the computation of the model
        Pass("canonicalize", lift(_t.CanonicalizeBindings())),
        Pass("to_dataflow", lift(_t.ConvertToDataflow(min_size=1))),
        Pass("eliminate_common_subexpressions", lift(_t.EliminateCommonSubexpr())),
        Pass("eliminate_dead_code", lift(_t.DeadCodeElimination())),
        Pass("pack_weights", pack_weights, after=("canonicalize",)),
        Pass("lower_convolutions", lower_convolutions, after=("pack_weights",)),
        Pass("fold_transposes", fold_transposes, after=("pack_weights", "lower_convolutions")),
        Pass("fold_heads", fold_heads, after=("fold_transposes",)),
    ),
    "kernels": (  # Relax to TensorIR, fused
        # Reshapes stay operators, which share memory with their operands; as kernels they would copy and divide.
        Pass("legalize", lift(_t.LegalizeOps({"relax.reshape": _keep, **WITH_ZEROS})), after=("fold_heads",)),
        # Only hosts can raise: in device code an assertion does not compile.
        Pass("skip_assertions", lift(tvm.tirx.transform.SkipAssert()), after=("legalize",), target="gpu"),
        # These read kernels, and must see those of indices, masks and score modifications before fusion.
        Pass("prove_indices", prove_indices, after=("legalize",)),
        Pass("fold_masks", lift(fold_masks), after=("legalize", "prove_indices")),
        Pass("fold_scores", lift(fold_scores), after=("fold_masks",)),
        Pass("eliminate_folded", lift(_t.DeadCodeElimination()), after=("fold_masks", "fold_scores")),
        Pass("annotate_patterns", lift(_t.AnnotateTIROpPattern()), after=("legalize",)),
        Pass("fold_constants", lift(fold_constants), after=("annotate_patterns",)),
        Pass("fuse_ops", fuse_operators, after=("annotate_patterns", "fold_scores")),
        Pass("unify_shape_symbols", lift(unify_shape_symbols), after=("fuse_ops",)),
        Pass("hoist_shape_bindings", lift(hoist_shape_bindings), after=("fuse_ops",)),
        Pass("fuse_tir", lift(_t.FuseTIR()), after=("hoist_shape_bindings",)),
        Pass("eliminate_dead_functions", lift(_t.DeadCodeElimination()), after=("fuse_tir",)),
        Pass("merge_equal_functions", lift(merge_equal_functions), after=("fuse_tir",)),
        Pass("lift_constants", lift(lift_constants), after=("merge_equal_functions",)),
        Pass("mark_tf32_matmuls", mark_tf32_matmuls, after=("fuse_tir",)),
    ),
    "fusion": (  # Around matmuls, as the target has kernels for it
        Pass("group_matmuls", group_matmuls, after=("merge_equal_functions", "mark_tf32_matmuls")),
        Pass("fuse_row_blocks", fuse_row_blocks, after=("group_matmuls",), target="cpu"),
        Pass("fuse_norm_prologues", fuse_norm_prologues, after=("group_matmuls",), target="gpu"),
        # Fusion may move a reader after a write: only now is the execution order final.
        Pass("to_non_dataflow", lift(_t.ToNonDataflow()), after=("fuse_row_blocks", "fuse_norm_prologues")),
        Pass("donate", donate, after=("to_non_dataflow",)),
        # After donation, which decides the updates in place.
        Pass("fuse_epilogues", fuse_epilogues, after=("donate",), target="gpu"),
        Pass("fuse_cache_writes", fuse_cache_writes, after=("fuse_epilogues",), target="gpu"),
    ),
    "scheduling": (
        Pass("schedule", schedule_kernels, after=("donate", "fuse_cache_writes")),
        Pass("fuse_launches", fuse_launches, after=("schedule",), target="gpu kernels"),
        Pass("describe_kernels", describe_kernels, after=("fuse_launches",)),
        Pass("guard_divisions", lift(guard_divisions), after=("fuse_launches",)),
        Pass("guard_float_arithmetic", lift(guard_float_arithmetic), after=("fuse_launches",)),
    ),
    "memory": (  # Relax whose bindings call kernels with planned memory
        Pass("add_replay", lift(add_replay), after=("fuse_launches",), target="gpu kernels"),
        Pass("bundle_weights", bundle_weights, after=("pack_weights", "schedule")),
        Pass("remove_purity_checking", lift(_t.RemovePurityChecking())),
        Pass("lower_call_tir", lift(_t.CallTIRRewrite()), after=("schedule",)),
        Pass("split_tuple_results", lift(split_tuple_results), after=("lower_call_tir",), target="gpu kernels"),
        Pass("plan_memory", lift(plan_memory), after=("lower_call_tir", "split_tuple_results")),
        Pass("lower_allocations", lift(_t.LowerAllocTensor()), after=("plan_memory",)),
    ),
    "virtual machine": (  # Relax that TVM compiles to instructions
        Pass("add_release", lift(add_release), after=("schedule",)),
        Pass("size_classes", lift(size_classes), after=("lower_allocations",)),
        Pass("free_after_last_use", lift(_t.KillAfterLastUse()), after=("size_classes",)),
        Pass("lower_builtins", lift(_t.LowerRuntimeBuiltin()), after=("free_after_last_use",)),
        Pass("compute_sizes", lift(_t.ComputePrimValue()), after=("lower_builtins",)),
        Pass("lower_shapes", lift(_t.VMShapeLower()), after=("compute_sizes",)),
        Pass("shape_errors", name_shape_assertions, after=("lower_shapes",)),
    ),
    "code": (
        # Also for the functions created by the last passes, which compute sizes.
        Pass("assume_alignment", assume_alignment, after=("compute_sizes", "lower_shapes")),
        Pass("attach_symbols", lift(_t.AttachGlobalSymbol()), after=("compute_sizes", "lower_shapes")),
    ),
}
"""The passes in order, by phase."""

PASSES = tuple(entry for phase in PHASES.values() for entry in phase)
NATIVE_PASSES = tuple(entry for phase, passes in PHASES.items() if phase != "virtual machine" for entry in passes)
"""The passes for a native `main` (lowering/emission), which needs none of the virtual machine's."""


def run_passes(state: CompileState, passes: Sequence[Pass], dump: Dump | None = None) -> CompileState:
    """Run passes in order, those for the state's target; `dump(name, module)` is called after each.

    Raises:
        LoweringError: A pass rejects the model.
        CompilerError: A pass has failed.
    """
    with state.target.tvm:
        for number, entry in enumerate(passes):
            progress.report("lowering", number, len(passes))
            begin = time.perf_counter()
            if entry.applies_to(state):
                state = _run_pass(entry, state)
            seconds = time.perf_counter() - begin
            level = logging.INFO if seconds >= _SLOW_SECONDS else logging.DEBUG
            progress.LOG.log(level, "pass %s: %.2f s", entry.name, seconds)
            if dump is not None:
                dump(entry.name, state.module)
    return state


def _run_pass(entry: Pass, state: CompileState) -> CompileState:
    try:
        return entry.run(state)
    except LoweringError:
        raise
    except Exception as error:
        raise CompilerError(
            "compiler.pass_failed",
            f"the compiler failed in its pass '{entry.name}': a fault of the compiler, not of the model. Please report "
            "it with the model; the cause of this error has the details (-v on the command line).",
        ) from error
