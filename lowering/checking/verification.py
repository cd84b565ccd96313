"""The function `verify`: run a compiled model on synthetic inputs, and compare every output with a reference."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import onnx_ir as ir

from .. import deprecated
from ..compiling.compiler import compile
from ..compiling.options import CompileArguments, CompileOptions
from ..errors import CompilerError, InputError, LoweringError
from ..graph.loading.declared_sizes import set_sizes
from ..graph.loading.legality import iterate_graphs
from ..graph.loading.list_inputs import split_list_inputs
from ..graph.loading.model import ModelLike, load_model
from ..graph.options.random_seed import can_draw_random
from ..notebook import format_table
from ..runtime import Model, load
from ..runtime.arrays.lists import flatten_lists
from . import reproducer
from .check import check
from .compare import Comparison
from .provenance import check_provenance
from .references import Against, Evaluate, Feeds, load_reference
from .reproducer import Reproducer
from .synthetic_inputs import build_feeds, list_call_inputs, read_input_specs
from .trial import VerificationTrial

if TYPE_CHECKING:
    from typing_extensions import Unpack


@dataclass(frozen=True)
class Verification:
    """The result of `verify`.

    `comparisons` are in output order, `inputs` are the arrays they were computed from, and `allowed` describes the
    tolerance. `reproducer` is the minimal failing submodel, if it was requested and an output differs.
    """

    comparisons: tuple[Comparison, ...]
    inputs: dict[str, Any]
    allowed: str
    reproducer: Reproducer | None = None

    @property
    def first_difference(self) -> Comparison | None:
        """Return the first output that is not close to the reference, or None."""
        return next((c for c in self.comparisons if not c.close), None)

    def __repr__(self) -> str:
        first = self.first_difference
        said = "all outputs agree" if first is None else f"first output that differs: {first.name}"
        return f"Verification({said}; allowed: {self.allowed})"

    def _repr_html_(self) -> str:
        rows = [
            (c.name, f"{c.max_abs:.3g}", f"{c.max_rel:.3g}", f"{c.rms:.3g}", "ok" if c.close else "DIFFERS")
            for c in self.comparisons
        ]
        return format_table(f"allowed: {self.allowed}", ("output", "max abs", "max rel", "rms, of its rms", ""), rows)


@dataclass(frozen=True)
class _Subject:
    """The model to verify, with what the user gives for its calls, and the seed of the other inputs."""

    model: ir.Model
    user_arrays: dict[str, Any]
    sizes: dict[str, int]
    seed: int


def verify(
    model: ModelLike,
    target: str = "cpu",
    *,
    against: Against = "reference",
    inputs: Mapping[str, Any] | None = None,
    sizes: Mapping[str, int] | None = None,
    rtol: float | None = None,
    atol: float | None = None,
    seed: int = 0,
    artifact: str | Path | Model | None = None,
    reduce: str | Path | None = None,
    **arguments: Unpack[CompileArguments],
) -> Verification:
    """Compare every output of the compiled model with onnx's reference evaluator or ONNX Runtime.

    The compiled model is `artifact`, or else the model compiled with the target and the arguments. The reference
    computes the original model. A decoder with static caches reads a prompt and some tokens; a fork reads other
    tokens in their place (decoding.py); the logits of each call are compared. A served decoder runs requests that
    come and go (served.py), and the reference runs each of them alone.

    Without rtol and atol an element is close when |output - reference| <= 1e-5 + 1e-3 * |reference|. If weights,
    precision or the model's own types round to narrower types, and neither is given, the error of the whole output is
    compared with that of a correct model. An output that is not close is compared with a float64 result, if the
    reference can compute it (float64_reference.py).

    Args:
        model: The ONNX model, as for `compile`.
        target: As for `compile`.
        against: "reference" or "onnxruntime".
        inputs: Some or all inputs, lists for sequences; the others are synthetic (synthetic_inputs.py).
        sizes: Symbolic dimensions by name, and, as dims of `compile`, the numbers of tensors of inputs that are
            sequences or optional values. Unspecified ones are those of the given inputs, or 4.
        rtol: The relative tolerance of an element.
        atol: The absolute tolerance of an element.
        seed: The seed of synthetic inputs.
        artifact: A folder or a loaded model that was compiled from the model; nothing is compiled.
        reduce: A new folder. If an output differs, or compilation fails by a bug of the compiler, the minimal failing
            submodel is written there, with its inputs (reduce.py).
        arguments: As for `compile`.

    Returns:
        The comparisons, the inputs and the tolerance.

    Raises:
        InputError: A name is unknown, or options contradict each other.
        ArtifactError: The artifact was compiled from another model.
        LoweringError: The reference does not support the model's operators, which is raised before anything is
            compiled, or it cannot run the model. Errors of `compile` and `load` are raised, too.
    """
    loaded, user_arrays, sizes = _split_lists(load_model(model), inputs or {}, sizes or {})
    if target in deprecated.REFERENCES:
        target, against = "cpu", deprecated.read_reference(target)
    trial = VerificationTrial(against, rtol, atol, CompileOptions(target=target, **arguments))
    folder = None if reduce is None else Path(reduce)
    _check_options(trial, artifact, folder)
    return _verify_model(trial, _Subject(loaded, user_arrays, sizes, seed), artifact, folder)


def _verify_model(
    trial: VerificationTrial, subject: _Subject, artifact: str | Path | Model | None, folder: Path | None
) -> Verification:
    """Load the reference, compile the model or load its artifact, and compare their outputs.

    A model that fails is reduced if there is a folder for that.
    """
    model, user_arrays, sizes = subject.model, subject.user_arrays, subject.sizes
    _check_inputs(user_arrays, model)
    _refuse_random(model)
    set_sizes(model, sizes)  # rejects names that no input has; the model stays symbolic
    evaluate = _load_supported_reference(trial, model)
    rng = np.random.default_rng(subject.seed)
    try:
        compiled = (
            trial.compile_model(model) if artifact is None else _load_artifact(artifact, trial.options.threads, model)
        )
    except Exception as error:
        if folder is None or not _is_fault(error):
            raise
        feeds = build_feeds(model, read_input_specs(model), {}, user_arrays, sizes, rng)
        raise CompilerError(
            "compiler.crashed", f"{_describe_fault(error)} {_describe_reduction(trial, model, feeds, folder, error)}"
        ) from error
    feeds, allowed, comparisons = trial.compare_model(model, compiled, user_arrays, sizes, rng, evaluate)
    result = Verification(tuple(comparisons), feeds, str(allowed))
    if folder is None or result.first_difference is None:
        return result
    return replace(result, reproducer=trial.write_reproducer(model, feeds, folder, None))


def _check_options(trial: VerificationTrial, artifact: str | Path | Model | None, folder: Path | None) -> None:
    """Raise InputError for options that contradict each other, and for a folder that has content."""
    options = trial.options
    if artifact is not None and trial.has_compile_options:
        raise InputError(
            "verify.artifact_with_options",
            "an artifact was compiled with options of its own. Leave out the options of compile.",
        )
    if folder is None:
        return
    if artifact is not None or options.static_cache is not None or options.serve is not None:
        raise InputError(
            "verify.reduce_with_artifact",
            "reduce compiles parts of a model, and neither artifacts nor decoders. Leave out artifact, "
            "static_cache and serve.",
        )
    if options.calls:
        raise InputError(
            "verify.reduce_with_calls",
            "reduce compiles parts of a model, to which calls of the whole model do not apply. Leave calls out.",
        )
    reproducer.check_folder_is_free(folder)


def _load_supported_reference(trial: VerificationTrial, model: ir.Model) -> Evaluate:
    """Return the reference. If both reject the model, raise the compiler's error, which names the nodes."""
    try:
        return load_reference(model, trial.against)
    except LoweringError:
        if not check(model).ok:
            compile(model, trial.options.target)  # it reports the unsupported nodes
        raise


def _split_lists(
    model: ir.Model, inputs: Mapping[str, Any], sizes: Mapping[str, int]
) -> tuple[ir.Model, dict[str, Any], dict[str, int]]:
    """Return the model with elements of lists as inputs, and the inputs and sizes for it.

    The number of elements is that of sizes, or else of inputs.
    """
    counts = {}
    for value in model.graph.inputs:
        name = value.name or ""
        if not isinstance(value.type, ir.TensorType) and (name in sizes or name in inputs):
            user_arrays = inputs.get(name)
            length = len(user_arrays) if isinstance(user_arrays, (list, tuple)) else int(user_arrays is not None)
            counts[name] = sizes.get(name, length)
    split = split_list_inputs(model, counts)
    user_arrays = flatten_lists(inputs, [spec.name for spec in read_input_specs(split.model)], split.lists, "input")
    return split.model, dict(user_arrays), {name: size for name, size in sizes.items() if name not in counts}


def _load_artifact(artifact: str | Path | Model, threads: int | None, model: ir.Model) -> Model:
    if isinstance(artifact, Model) and threads is not None:
        raise InputError(
            "verify.model_with_threads",
            "a loaded model has its own threads. Leave threads out, or give the artifact's folder.",
        )
    compiled = artifact if isinstance(artifact, Model) else load(artifact, threads)
    check_provenance(compiled.manifest, model)
    return compiled


def _check_inputs(user_arrays: Feeds, model: ir.Model) -> None:
    input_names = [value.name or "" for value in list_call_inputs(model)]
    unknown = next((name for name in user_arrays if name not in input_names), None)
    if unknown is not None:
        raise InputError(
            "input.name_unknown", f"there is no input '{unknown}'. The inputs are {', '.join(input_names)}."
        )


def _refuse_random(model: ir.Model) -> None:
    """Raise InputError for a model that draws random numbers."""
    for node in (node for graph in iterate_graphs(model) for node in graph if can_draw_random(node)):
        raise InputError(
            "verify.model_random",
            f"verify: node '{node.name}' ({node.op_type}) draws random numbers, which differ between runtimes. "
            "Replace the node by an input of the model with such numbers.",
        )


def _is_fault(error: Exception) -> bool:
    """Return whether the compiler is at fault, and not the model, an option or the machine."""
    return isinstance(error, CompilerError) or not isinstance(error, (LoweringError, OSError, MemoryError))


def _describe_fault(error: Exception) -> str:
    if isinstance(error, CompilerError):
        return str(error)
    return f"the compiler failed ({type(error).__name__}): a fault of the compiler, not of the model."


def _describe_reduction(
    trial: VerificationTrial, model: ir.Model, feeds: dict[str, Any], folder: Path, crash: Exception
) -> str:
    try:
        written = trial.write_reproducer(model, feeds, folder, crash)
    except LoweringError as error:
        return f"It cannot be reduced: {error}"
    return "A second try did not fail." if written is None else f"Reduced: {written}"
