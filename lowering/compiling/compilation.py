"""The whole way from an ONNX model to what an artifact is made of."""

from __future__ import annotations

from . import without_torch  # noqa: F401  (before whatever imports tvm)

# isort: split

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from importlib.metadata import version
from pathlib import Path

import onnx_ir as ir
from tvm import tirx

from ..choices import TF32
from ..errors import InputError, LoweringError
from ..graph.declared_sizes import ranges
from ..graph.model import ModelLike
from ..graph.static_cache import LENGTH
from ..importing.imported import Imported, Port
from ..importing.importer import import_model
from ..importing.values import storage_dtype
from ..manifest import SETUP, Manifest, TensorSpec
from ..profiling.expected import warnings
from ..target import Target, resolve
from ..tuning.lookup import TunedRecords
from ..version import VERSION
from . import progress
from .artifact import Part
from .build import build, check_linker
from .code_failures import code_failure
from .interrupts import interrupts_kept
from .objects import Kernels
from .options import Options
from .pipeline import Dump, Lowered, lower
from .prepare import prepare_model


@dataclass(frozen=True)
class Compiled:
    """What an artifact is made of, and what a tuner needs to know: the targets that the libraries are for, and by
    target the functions of the model that were scheduled as they were before, by the name of the kernel.
    """

    parts: tuple[Part, ...]  # the model, and its setup if it has one
    targets: tuple[Target, ...]
    unscheduled: tuple[dict[str, tirx.PrimFunc], ...]


@interrupts_kept()
def compiled(model: ModelLike, options: Options, stand_in: Target | None = None, dump: Dump | None = None) -> Compiled:
    """The way itself. stand_in is a CPU that runs the functions of a GPU in its place, by kernels of its own; dump is
    as for `compile`."""
    targets = tuple(resolve(options.target, options.cc))
    for each in targets:
        check_linker(each)
    if options.precision in TF32 and not all(target.architecture for target in targets):
        raise InputError(
            f"precision='{options.precision}' is how tensor cores of GPUs multiply float32, and "
            f"target='{options.target}' has none. Leave it out: a CPU computes such matmuls in float32."
        )
    prepared = prepare_model(model, options, targets, dump)
    kept = prepared.kept
    setup = prepared.setup
    legal, *of_setup = ranges(prepared.dims, prepared.model, None if setup is None else setup.model)
    compiling = _PartCompiler(options, targets, stand_in)
    lengths = () if kept.slots is None else (LENGTH,)
    part, unscheduled = compiling.compile(prepared.model, prepared.donated, lengths, prepared.notes, dump)
    manifest = replace(
        part.manifest,
        ranges=legal,
        slots=kept.slots,
        decoder=kept.decoder,
        served=prepared.served,
        input_lists=prepared.lists,
    )
    parts = [replace(part, manifest=manifest)]
    if setup is not None:
        part, _ = compiling.compile(setup.model, setup.donated, (), (), None)
        parts.append(replace(part, manifest=replace(part.manifest, ranges=of_setup[0], part=SETUP)))
    return Compiled(tuple(parts), targets, unscheduled)


@dataclass(frozen=True)
class _PartCompiler:
    options: Options
    targets: tuple[Target, ...]
    stand_in: Target | None

    def compile(
        self,
        model: ir.Model,
        donated: Mapping[str, str],
        lengths: Sequence[str],
        notes: Sequence[str],
        dump: Dump | None,
    ) -> tuple[Part, tuple[dict[str, tirx.PrimFunc], ...]]:
        """Return the code of a model, and by target the functions as they were before they were scheduled.

        lengths are the inputs whose content is a symbol.
        """
        options, notes = self.options, list(notes)
        matmuls = options.precision if options.precision in TF32 else None
        # What a GPU has in its memory the host does not read.
        checks = options.checks and not any(target.architecture for target in self.targets)
        with progress.stage("importing"):
            imported = import_model(model, tuple(lengths), checks, options.seed)
        inputs, outputs = [p.name for p in imported.inputs], [p.name for p in imported.outputs]
        pairs = {inputs.index(i): outputs.index(o) for i, o in donated.items()}
        notes += imported.warnings
        libraries, unscheduled = [], []
        for each in self.targets:
            choose = TunedRecords(None if options.database is None else Path(options.database), each).choose
            runs_on = self.stand_in or each
            kernels = Kernels(runs_on)
            known = kernels if dump is None else None  # who looks inside wants to see all that is scheduled
            with progress.stage("lowering"):
                lowered = lower(imported, each, pairs, notes, dump, options.weights, choose, runs_on, matmuls, known)
            libraries.append(_built(lowered, runs_on, kernels))
            unscheduled.append(lowered.unscheduled)
            if not each.architecture:
                notes += warnings(lowered.kernels, lowered.calls)
        manifest = self._manifest(imported, lowered, notes)
        return Part(replace(manifest, donated=dict(donated)), tuple(libraries), lowered.weights), tuple(unscheduled)

    def _manifest(self, imported: Imported, lowered: Lowered, notes: Sequence[str]) -> Manifest:
        options, targets = self.options, self.targets
        return Manifest(
            inputs=tuple(_spec(p) for p in imported.inputs),
            outputs=tuple(_spec(p) for p in imported.outputs),
            donated={},
            weights=(),
            target=options.target,
            cpu_features=targets[0].cpu_features,
            architectures=tuple(each.architecture for each in targets if each.architecture and self.stand_in is None),
            threads=options.threads,
            derived=imported.derived,
            strings=tuple(imported.strings),
            versions={"onnx-lowering": VERSION} | {n: version(n) for n in ("apache-tvm", "apache-tvm-ffi", "onnx")},
            notes=tuple(dict.fromkeys(notes)),
            kernels=lowered.kernels,
            calls=lowered.calls,
            scheme=options.weights,
            precision=options.precision,
            output_lists=tuple(imported.output_lists),
        )


def _built(lowered: Lowered, target: Target, kernels: Kernels) -> bytes:
    """Return the library. Raises LoweringError, whose text names the nodes where code generation fails."""
    try:
        return build(lowered.module, target, kernels)
    except LoweringError:
        raise
    except Exception as error:
        if type(error) is RuntimeError:  # an interrupt, which TVM turns into one (interrupts.py)
            raise
        raise code_failure(lowered.module, lowered.calls, target) from error


def _spec(port: Port) -> TensorSpec:
    return TensorSpec(port.name, port.dtype, storage_dtype(port.dtype), port.dims)
