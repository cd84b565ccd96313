"""Compilation of an ONNX model into the contents of an artifact."""

from __future__ import annotations

from . import without_torch  # noqa: F401  (before whatever imports tvm)

# isort: split

import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from importlib.metadata import version
from pathlib import Path

import onnx_ir as ir
from tvm import tirx

from .. import scratch
from ..choices import TF32
from ..errors import InputError, LoweringError, TargetError
from ..graph.caches.static_cache import PAST_LENGTH
from ..graph.loading.declared_sizes import ranges
from ..graph.loading.model import ModelLike
from ..graph.options.weight_schemes import choose_schemes
from ..importing.imported_model import ImportedModel, Port
from ..importing.importer import import_model
from ..importing.values import storage_dtype
from ..manifest import SETUP, Manifest, TensorSpec
from ..ops import lookup
from ..passes.compile_state import CompileState, PassOptions
from ..profiling.expected import list_slow_kernels
from ..runtime import Model, open_compiled
from ..target import Target, resolve
from ..tuning_records.lookup import TunedRecords
from ..version import VERSION
from . import progress
from .artifact import ArtifactPart, write_artifact
from .build import build, check_linker
from .code_failures import diagnose_code_failure
from .interrupts import preserve_interrupts
from .objects import KernelCompiler
from .options import CompileOptions
from .pipeline import NATIVE_PASSES, PASSES, Dump, run_passes
from .prepare import prepare_model


@dataclass(frozen=True)
class CompiledModel:
    """The contents of an artifact, and data for a tuner.

    targets are those of the libraries. unscheduled has, for each target, the functions before scheduling, by the name
    of the kernel.
    """

    artifacts: tuple[ArtifactPart, ...]  # the model, and its setup if it has one
    targets: tuple[Target, ...]
    unscheduled: tuple[dict[str, tirx.PrimFunc], ...]


@dataclass(frozen=True)
class LoweredModel:
    """A model, or its setup, before code generation: its state for each target, and the compiler of its kernels."""

    manifest: Manifest
    states: tuple[CompileState, ...]
    kernels: tuple[KernelCompiler, ...]


@preserve_interrupts()
def compiled(
    model: ModelLike, options: CompileOptions, stand_in: Target | None = None, dump: Dump | None = None
) -> CompiledModel:
    """Compile a model.

    stand_in is a CPU that runs the functions of a GPU instead of it, with its own kernels. dump is as for `compile`.
    """
    targets = tuple(resolve(options.target, options.cc))
    if any(target.static_only for target in targets):
        raise TargetError(
            "target.static_required",
            f"TVM's runtime, which artifacts need, does not exist for '{options.target}'. "
            "Compile a static object: --emit static.",
        )
    models = lower(model, options, targets, stand_in=stand_in, dump=dump)
    return CompiledModel(
        tuple(map(_build_artifact, models)), targets, tuple(dict(state.unscheduled) for state in models[0].states)
    )


def lower(
    model: ModelLike,
    options: CompileOptions,
    targets: Sequence[Target],
    *,
    stand_in: Target | None = None,
    dump: Dump | None = None,
    native: bool = False,
) -> tuple[LoweredModel, ...]:
    """Run the pipeline on a model, and on its setup if it has one.

    Parameters are as for `compiled`. native leaves out the passes for the virtual machine, and gives kernels C
    signatures.
    """
    for resolved in targets:
        check_linker(resolved)
    if options.precision in TF32 and not all(target.architecture for target in targets):
        raise InputError(
            "precision.target_unsupported",
            f"precision='{options.precision}' multiplies float32 on tensor cores of GPUs, which "
            f"target='{options.target}' does not have. Leave precision out: a CPU computes such matmuls in float32.",
        )
    prepared = prepare_model(model, options, targets, dump, load_compiled)
    caches = prepared.caches
    setup = prepared.setup
    legal, *setup_ranges = ranges(prepared.dims, prepared.model, None if setup is None else setup.model)
    lowering = _Lowering(options, targets, stand_in, native)
    lengths = () if caches.slots is None else (PAST_LENGTH,)
    lowered = lowering.lower(prepared.model, prepared.donated, lengths, prepared.notes, dump)
    manifest = replace(
        lowered.manifest,
        ranges=legal,
        slots=caches.slots,
        decoder=caches.decoder,
        served=prepared.served,
        input_lists=prepared.lists,
    )
    models = [replace(lowered, manifest=manifest)]
    if setup is not None:
        lowered = lowering.lower(setup.model, setup.donated, (), (), None)
        models.append(replace(lowered, manifest=replace(lowered.manifest, ranges=setup_ranges[0], part=SETUP)))
    return tuple(models)


def load_compiled(model: ModelLike, options: CompileOptions) -> Model:
    """Compile a model and load it, without the cache of artifacts."""
    # A loaded model keeps its files open, and does not need the folder.
    with tempfile.TemporaryDirectory(prefix="onnx-lowering-") as folder, scratch.use_folder(Path(folder)):
        module = Path(folder) / "module"
        write_artifact(module, compiled(model, options).artifacts)
        return open_compiled(module)


@dataclass(frozen=True)
class _Lowering:
    options: CompileOptions
    targets: Sequence[Target]
    stand_in: Target | None
    native: bool

    def lower(
        self,
        model: ir.Model,
        donated: Mapping[str, str],
        lengths: Sequence[str],
        notes: Sequence[str],
        dump: Dump | None,
    ) -> LoweredModel:
        """Run the pipeline on a model. lengths are the inputs whose content is a symbol."""
        options, notes = self.options, list(notes)
        matmuls = options.precision if options.precision in TF32 else None
        # The host does not read data in GPU memory.
        checks = options.checks and not any(target.architecture for target in self.targets)
        schemes = choose_schemes(model, options.schemes)
        with progress.stage("importing"):
            imported = import_model(model, lookup, tuple(lengths), checks, options.seed, schemes)
        inputs, outputs = [p.name for p in imported.inputs], [p.name for p in imported.outputs]
        pairs = {inputs.index(i): outputs.index(o) for i, o in donated.items()}
        notes += imported.warnings
        states, compilers = [], []
        for target in self.targets:
            choose = TunedRecords(None if options.database is None else Path(options.database), target).choose
            runs_on = self.stand_in or target
            kernels = KernelCompiler(runs_on, c_signatures=self.native)
            cached = kernels if dump is None else None  # a dump must show every scheduled kernel
            pass_options = PassOptions(runs_on, pairs, options.accuracy_level, matmuls, choose, cached)
            with progress.stage("lowering"):
                state = CompileState.from_imported(imported, target, pass_options)
                lowered = run_passes(state, NATIVE_PASSES if self.native else PASSES, dump)
            notes += lowered.notes
            if not target.architecture:
                notes += list_slow_kernels(lowered.kernels, lowered.calls)
            states.append(lowered)
            compilers.append(kernels)
        manifest = self._manifest(imported, lowered, notes)
        return LoweredModel(replace(manifest, donated=dict(donated)), tuple(states), tuple(compilers))

    def _manifest(self, imported: ImportedModel, lowered: CompileState, notes: Sequence[str]) -> Manifest:
        options, targets = self.options, self.targets
        return Manifest(
            inputs=tuple(_make_tensor_spec(p) for p in imported.inputs),
            outputs=tuple(_make_tensor_spec(p) for p in imported.outputs),
            donated={},
            weights=(),
            target=options.target,
            cpu_features=targets[0].cpu_features,
            architectures=tuple(
                target.architecture for target in targets if target.architecture and self.stand_in is None
            ),
            threads=options.threads,
            derived=imported.derived,
            strings=tuple(imported.strings),
            versions={"onnx-lowering": VERSION} | {n: version(n) for n in ("apache-tvm", "apache-tvm-ffi", "onnx")},
            notes=tuple(dict.fromkeys(notes)),
            kernels=lowered.kernels,
            calls=lowered.calls,
            scheme=options.narrowest_scheme,
            precision=options.precision,
            accuracy_level=lowered.accuracy_level,
            output_lists=tuple(imported.output_lists),
        )


def _build_artifact(lowered: LoweredModel) -> ArtifactPart:
    libraries = tuple(map(_build_library, lowered.states, lowered.kernels))
    return ArtifactPart(lowered.manifest, libraries, lowered.states[-1].packed_weights)


def _build_library(lowered: CompileState, kernels: KernelCompiler) -> bytes:
    """Return the library; raise LoweringError, which names the nodes if code generation fails."""
    try:
        return build(lowered.module, lowered.kernel_target, kernels)
    except LoweringError:
        raise
    except Exception as error:
        if type(error) is RuntimeError:  # an interrupt, which TVM turns into one (interrupts.py)
            raise
        raise diagnose_code_failure(lowered.module, lowered.calls, lowered.kernel_target) from error


def _make_tensor_spec(port: Port) -> TensorSpec:
    return TensorSpec(port.name, port.dtype, storage_dtype(port.dtype), port.dims)
