"""The pipeline: one flat, named list of passes from an imported model to TensorIR and VM instructions.

Order matters where a comment says so. `dump(name, module)` is called after each pass, if present.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import onnx_ir as ir
import tvm
from tvm import relax, tirx

from schedules import CodeLookup
from schedules.half_precision import HALF
from schedules.variant import Choose

from ..choices import Scheme
from ..errors import CompilerError, LoweringError
from ..importing.imported_model import ImportedModel
from ..importing.origins import Origins, trace_fusion
from ..manifest import CallSpec, KernelSpec
from ..passes.alignment import assume_alignment
from ..passes.convolutions import lower_convolutions
from ..passes.donation import donate
from ..passes.equal_functions import merge_equal_functions
from ..passes.fold_constants import fold_constants
from ..passes.fold_heads import fold_heads
from ..passes.fold_masks import fold_masks
from ..passes.fold_scores import fold_scores
from ..passes.fold_transposes import fold_transposes
from ..passes.fuse_cache_writes import fuse_cache_writes
from ..passes.fuse_epilogues import fuse_epilogues
from ..passes.fuse_launches import fuse_launches
from ..passes.fuse_norm_prologues import fuse_norm_prologues
from ..passes.fuse_row_blocks import fuse_row_blocks
from ..passes.group_matmuls import group_matmuls
from ..passes.guard_divisions import guard_divisions
from ..passes.guard_float_arithmetic import WITH_ZEROS, guard_float_arithmetic
from ..passes.hoist_shape_bindings import hoist_shape_bindings
from ..passes.kernels import ScheduledModule, schedule_kernels
from ..passes.mark_tf32_matmuls import describe_tf32_matmuls, mark_tf32_matmuls
from ..passes.name_shape_assertions import name_shape_assertions
from ..passes.pack_weights import pack_weights
from ..passes.plan_memory import plan_memory
from ..passes.prove_indices import prove_indices
from ..passes.release import add_release
from ..passes.replay import add_replay
from ..passes.size_classes import size_classes
from ..passes.split_tuple_results import split_tuple_results
from ..passes.unify_shape_symbols import unify_shape_symbols
from ..target import Target
from . import progress

# Operations in a fused group; in exported models the largest have 4. Chains of 240 operators run fastest in groups of
# 16, or close to it, except for cheap operators on 64 elements. Traversals of expressions recurse no deeper than the
# length of a group.
_MAX_FUSED = 16

_SLOW_SECONDS = 0.05  # seconds, from which on the log lists a pass among the stages

Dump = Callable[[str, ir.Model | tvm.IRModule], None]
Pass = Callable[[tvm.IRModule], tvm.IRModule]


@dataclass(frozen=True)
class LoweredModule:
    """A module ready for code generation.

    weights are by parameter name in the order of the weights tuple. kernels and calls describe its kernels for a
    profile. unscheduled has the functions before scheduling, by kernel.
    """

    module: tvm.IRModule
    weights: dict[str, np.ndarray]
    kernels: tuple[KernelSpec, ...]
    calls: tuple[CallSpec, ...]
    unscheduled: dict[str, tirx.PrimFunc]


def lower_model(
    imported: ImportedModel,
    target: Target,
    donated: dict[int, int],
    notes: list[str],
    dump: Dump | None = None,
    scheme: Scheme | None = None,
    choose: Choose | None = None,
    runs_on: Target | None = None,
    matmuls: str | None = None,
    cached: CodeLookup | None = None,
) -> LoweredModule:
    """Run the passes.

    Args:
        imported: The model in Relax.
        target: The target of the code.
        donated: The position of a consumed input, mapped to the output that takes over its memory.
        notes: A list that receives the updates that could not be done in place, and the error of compressing constant
            matrices by `scheme`.
        dump: As for `compile`.
        scheme: How constant matrices are compressed.
        choose: Picks variants and tiles (schedules/variant.py).
        runs_on: The target of the kernels, if it is not `target`.
        matmuls: How a GPU's tensor cores compute float32 matmuls, "tf32" or "3xtf32"; None leaves them to other code.
        cached: Tells which kernels have cached code and stay as they are.

    Returns:
        The lowered module.
    """
    runs_on = runs_on or target
    t = relax.transform
    weights: dict[str, np.ndarray] = {}
    on_tensor_cores = (*HALF, *(["float32"] if matmuls else []))
    origins = imported.origins
    kernels: tuple[KernelSpec, ...] = ()
    calls: tuple[CallSpec, ...] = ()
    unscheduled: dict[str, tirx.PrimFunc] = {}

    def pack(mod: tvm.IRModule) -> tvm.IRModule:
        nonlocal weights
        mod, weights = pack_weights(mod, imported.weights, target.tvm, scheme, notes, on_tensor_cores)
        return mod

    def fuse(mod: tvm.IRModule) -> tvm.IRModule:
        nonlocal origins
        fused = t.FuseOps()(mod)
        origins = trace_fusion(mod, fused, origins)
        return fused

    def trace_origins(rewrite: Callable[[tvm.IRModule, Origins], tuple[tvm.IRModule, Origins]]) -> Pass:
        """Wrap a pass that changes which function computes a binding, and updates the origins."""

        def run(mod: tvm.IRModule) -> tvm.IRModule:
            nonlocal origins
            mod, origins = rewrite(mod, origins)
            return mod

        return run

    def schedule(mod: tvm.IRModule) -> tvm.IRModule:
        nonlocal kernels, calls, unscheduled
        mod, kernels, calls, unscheduled = schedule_kernels(mod, runs_on.tvm, origins, choose, cached)
        if matmuls is not None:
            notes.append(describe_tf32_matmuls(mod, matmuls))
        return mod

    def wrap_call_pass(rewrite: Callable[[ScheduledModule], ScheduledModule]) -> Pass:
        """Wrap a pass that changes which kernels are called."""

        def run(mod: tvm.IRModule) -> tvm.IRModule:
            nonlocal kernels, calls, unscheduled
            mod, kernels, calls, unscheduled = rewrite(ScheduledModule(mod, kernels, calls, unscheduled))
            return mod

        return run

    def on_gpu(run: Pass) -> Pass:
        """Return the pass if kernels run on a GPU, else the identity."""
        return run if runs_on.architecture else lambda mod: mod

    def for_gpu(run: Pass) -> Pass:
        """Return the pass if the target is a GPU, even if a CPU stands in for it, else the identity."""
        return run if target.architecture else lambda mod: mod

    passes: list[tuple[str, Pass]] = [
        # Relax: the computation of the model
        ("canonicalize", t.CanonicalizeBindings()),
        ("to_dataflow", t.ConvertToDataflow(min_size=1)),
        ("eliminate_common_subexpressions", t.EliminateCommonSubexpr()),
        ("eliminate_dead_code", t.DeadCodeElimination()),
        ("pack_weights", pack),
        ("lower_convolutions", lambda mod: lower_convolutions(mod, target.tvm, on_tensor_cores)),
        ("fold_transposes", lambda mod: fold_transposes(mod, target.tvm, on_tensor_cores)),
        ("fold_heads", trace_origins(fold_heads)),
        # Relax to TensorIR, fused
        # Reshapes stay operators, which share memory with their operands; as kernels they would copy and divide.
        ("legalize", t.LegalizeOps({"relax.reshape": lambda _, call: call, **WITH_ZEROS})),
        # Only hosts can raise: in device code an assertion does not compile.
        ("skip_assertions", for_gpu(tvm.tirx.transform.SkipAssert())),
        # These read kernels, and must see those of indices, masks and score modifications before fusion.
        ("prove_indices", lambda mod: prove_indices(mod, on_gpu=bool(target.architecture))),
        ("fold_masks", fold_masks),
        ("fold_scores", fold_scores),
        ("eliminate_folded", t.DeadCodeElimination()),
        ("annotate_patterns", t.AnnotateTIROpPattern()),
        ("fold_constants", fold_constants),
        ("fuse_ops", fuse),
        ("unify_shape_symbols", unify_shape_symbols),
        ("hoist_shape_bindings", hoist_shape_bindings),
        ("fuse_tir", t.FuseTIR()),
        ("eliminate_dead_functions", t.DeadCodeElimination()),
        ("merge_equal_functions", merge_equal_functions),
        ("mark_tf32_matmuls", lambda mod: mark_tf32_matmuls(mod, matmuls)),
        ("group_matmuls", trace_origins(lambda mod, origins_before: group_matmuls(mod, target.tvm, origins_before))),
        # GPUs have no kernel for fused row blocks.
        (
            "fuse_row_blocks",
            trace_origins(
                lambda mod, origins_before: (
                    fuse_row_blocks(mod, target.tvm, origins_before)
                    if not target.architecture
                    else (mod, origins_before)
                )
            ),
        ),
        (
            "fuse_norm_prologues",
            for_gpu(trace_origins(lambda mod, origins_before: fuse_norm_prologues(mod, target.tvm, origins_before))),
        ),
        # Fusion may move a reader after a write: only now is the execution order final.
        ("to_non_dataflow", t.ToNonDataflow()),
        ("donate", lambda mod: donate(mod, donated, notes)),
        # After donation, which decides the updates in place.
        (
            "fuse_epilogues",
            for_gpu(trace_origins(lambda mod, origins_before: fuse_epilogues(mod, target.tvm, origins_before))),
        ),
        # Scheduling
        ("schedule", schedule),
        ("fuse_cache_writes", on_gpu(wrap_call_pass(fuse_cache_writes))),
        ("fuse_launches", on_gpu(wrap_call_pass(fuse_launches))),
        ("guard_divisions", guard_divisions),
        ("guard_float_arithmetic", guard_float_arithmetic),
        # Virtual machine
        ("add_release", add_release),
        ("add_replay", on_gpu(add_replay)),
        ("bundle_weights", lambda mod: t.BundleModelParams("weights")(mod) if weights else mod),
        ("remove_purity_checking", t.RemovePurityChecking()),
        ("lower_call_tir", t.CallTIRRewrite()),
        ("split_tuple_results", on_gpu(split_tuple_results)),
        ("plan_memory", plan_memory),
        ("lower_allocations", t.LowerAllocTensor()),
        ("size_classes", size_classes),
        ("free_after_last_use", t.KillAfterLastUse()),
        ("lower_builtins", t.LowerRuntimeBuiltin()),
        ("compute_sizes", t.ComputePrimValue()),
        ("lower_shapes", t.VMShapeLower()),
        # Also for the functions created by the last passes, which compute sizes.
        ("assume_alignment", lambda mod: assume_alignment(mod, 16 if runs_on.architecture else 1)),
        ("shape_errors", lambda mod: name_shape_assertions(mod, imported.assertions)),
        ("attach_symbols", t.AttachGlobalSymbol()),
    ]
    module = imported.module
    with target.tvm, tvm.transform.PassContext(config={"relax.FuseOps.max_depth": _MAX_FUSED}):
        for number, (name, run) in enumerate(passes):
            progress.report("lowering", number, len(passes))
            begin = time.perf_counter()
            try:
                module = run(module)
            except LoweringError:
                raise
            except Exception as error:
                raise CompilerError(
                    "compiler.pass_failed",
                    f"the compiler failed in its pass '{name}': a fault of the compiler, not of the model. Please "
                    "report it with the model; the cause of this error has the details (-v on the command line).",
                ) from error
            seconds = time.perf_counter() - begin
            progress.LOG.log(
                logging.INFO if seconds >= _SLOW_SECONDS else logging.DEBUG, "pass %s: %.2f s", name, seconds
            )
            if dump is not None:
                dump(name, module)
    return LoweredModule(module, weights, kernels, calls, unscheduled)
