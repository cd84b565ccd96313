"""`verify`: runs a compiled model on synthetic inputs, and compares every output with a reference."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import onnx_ir as ir

from ..choices import Precision, Scheme
from ..compiling.compiler import compile
from ..compiling.overflow import Call
from ..errors import CompilerError, InputError, LoweringError
from ..graph.declared_sizes import with_sizes
from ..graph.legality import graphs
from ..graph.list_inputs import split_list_inputs
from ..graph.model import ModelLike, load_model
from ..graph.random_seed import draws_random
from ..graph.serve import Serve
from ..notebook import table
from ..runtime import Model, load
from ..runtime.lists import flatten_lists
from . import reproducer
from .check import check
from .compare import Comparison
from .provenance import check_provenance
from .references import Against, Feeds, reference
from .reproducer import Reproducer
from .synthetic_inputs import feeds_of, specs_of, taken
from .trial import Trial


@dataclass(frozen=True)
class Verification:
    """The comparisons in output order, the inputs they were made with, what was allowed, in words, and where the
    smallest failing part of the model is, if that was asked for and an output differs."""

    comparisons: tuple[Comparison, ...]
    inputs: dict[str, Any]
    allowed: str
    reproducer: Reproducer | None = None

    @property
    def first_difference(self) -> Comparison | None:
        """The first output that is not close to the reference; None when all are."""
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
        return table(f"allowed: {self.allowed}", ("output", "max abs", "max rel", "rms, of its rms", ""), rows)


def verify(
    model: ModelLike,
    against: Against = "reference",
    target: str = "cpu",
    inputs: Mapping[str, Any] | None = None,
    sizes: Mapping[str, int] | None = None,
    rtol: float | None = None,
    atol: float | None = None,
    seed: int = 0,
    weights: Scheme | None = None,
    precision: Precision | None = None,
    donate: Sequence[str] = (),
    threads: int | None = None,
    static_cache: int | None = None,
    artifact: str | Path | Model | None = None,
    reduce: str | Path | None = None,
    calls: Sequence[Call] = (),
    serve: Serve | None = None,
) -> Verification:
    """Compares every output of the compiled model with onnx's reference evaluator or ONNX Runtime.

    What is compared is `artifact`, a folder or a loaded model that was made of the model, or else the model compiled
    with target, weights, precision, calls, donate, threads, static_cache and serve, which are as for `compile`. The
    reference computes the model as it is. A decoder with static caches reads a prompt, some tokens and, by a fork,
    others in their place (decoding.py), and the logits of each call are compared. A served decoder answers requests
    that come and go (served.py), and the reference each of them alone.

    inputs gives some or all inputs, lists for sequences; the others are synthetic by seed (synthetic_inputs.py). sizes
    gives symbolic dimensions by name, and as dims of `compile` the numbers of tensors of inputs that are sequences or
    optional values; where it says nothing they are those of the inputs that are given, or 4. An element is close when
    |ours - reference| <= atol + rtol * |reference|, 1e-5 and 1e-3 where neither is given. Where weights, precision or
    the model's own types round numbers to less, and neither is given, an output is close when it differs by less than a
    sound model's would, measured over all of it. An output that is not close is compared with one computed in float64,
    if the reference can (float64_reference.py).

    reduce names a new folder: if an output differs, or compiling fails by a fault of the compiler, the smallest part of
    the model that still does so is written there, with its inputs (reduce.py).

    Raises as `compile` and `load` do; InputError for unknown names and options that contradict each other,
    ArtifactError for an artifact of another model, and LoweringError if the reference does not know the model's
    operators, before anything is compiled, or if it cannot run the model.
    """
    loaded, given, sizes = _of_tensors(load_model(model), inputs or {}, sizes or {})
    trial = Trial(against, target, rtol, atol, weights, precision, tuple(donate), threads, static_cache, calls, serve)
    folder = None if reduce is None else Path(reduce)
    if artifact is not None and trial.has_options_of_compile:
        raise InputError("an artifact says itself how it was compiled: leave out the options of compile.")
    if folder is not None:
        if artifact is not None or static_cache is not None or serve is not None:
            raise InputError(
                "reduce compiles parts of a model, which are no artifacts and no decoders: leave these out."
            )
        if calls:
            raise InputError("reduce compiles parts of a model, of which calls of the whole are none: leave calls out.")
        reproducer.check_free(folder)
    _check_inputs(given, loaded)
    _refuse_random(loaded)
    with_sizes(loaded, sizes)  # refuses names that no input has; the model stays symbolic
    try:
        evaluate = reference(loaded, against)
    except LoweringError:
        if not check(loaded).ok:
            compile(loaded, target)  # which says what nobody can run
        raise
    rng = np.random.default_rng(seed)
    try:
        compiled = trial.compiled(loaded) if artifact is None else _loaded(artifact, threads, loaded)
    except Exception as error:
        if folder is None or not _is_fault(error):
            raise
        feeds = feeds_of(loaded, specs_of(loaded), {}, given, sizes, rng)
        raise CompilerError(f"{_fault(error)} {_reduced(trial, loaded, feeds, folder, error)}") from error
    feeds, allowed, comparisons = trial.compared(loaded, compiled, given, sizes, rng, evaluate)
    result = Verification(tuple(comparisons), feeds, str(allowed))
    if folder is None or result.first_difference is None:
        return result
    return replace(result, reproducer=trial.reproducer(loaded, feeds, folder, None))


def _of_tensors(
    model: ir.Model, inputs: Mapping[str, Any], sizes: Mapping[str, int]
) -> tuple[ir.Model, dict[str, Any], dict[str, int]]:
    """The model with the elements of its lists as inputs, which are as many as sizes or inputs say, and both for it."""
    counts = {}
    for value in model.graph.inputs:
        name = value.name or ""
        if not isinstance(value.type, ir.TensorType) and (name in sizes or name in inputs):
            given = inputs.get(name)
            held = len(given) if isinstance(given, (list, tuple)) else int(given is not None)
            counts[name] = sizes.get(name, held)
    split = split_list_inputs(model, counts)
    given = flatten_lists(inputs, [spec.name for spec in specs_of(split.model)], split.lists, "input")
    return split.model, dict(given), {name: size for name, size in sizes.items() if name not in counts}


def _loaded(artifact: str | Path | Model, threads: int | None, model: ir.Model) -> Model:
    if isinstance(artifact, Model) and threads is not None:
        raise InputError("a model that is loaded has its threads: leave threads out, or give the artifact's folder.")
    compiled = artifact if isinstance(artifact, Model) else load(artifact, threads)
    check_provenance(compiled.manifest, model)
    return compiled


def _check_inputs(given: Feeds, model: ir.Model) -> None:
    known = [value.name or "" for value in taken(model)]
    unknown = next((name for name in given if name not in known), None)
    if unknown is not None:
        raise InputError(f"there is no input '{unknown}'. The inputs are {', '.join(known)}.")


def _refuse_random(model: ir.Model) -> None:
    """Raises InputError for a model that draws random numbers."""
    for node in (node for graph in graphs(model) for node in graph if draws_random(node)):
        raise InputError(
            f"verify: node '{node.name}' ({node.op_type}) draws random numbers, and every runtime draws others. "
            "Give the model such numbers by an input in place of the node."
        )


def _is_fault(error: Exception) -> bool:
    """Whether the compiler is to blame, and not the model, an option or the machine."""
    return isinstance(error, CompilerError) or not isinstance(error, (LoweringError, OSError, MemoryError))


def _fault(error: Exception) -> str:
    if isinstance(error, CompilerError):
        return str(error)
    return f"the compiler failed ({type(error).__name__}): a fault of ours, not of the model."


def _reduced(trial: Trial, model: ir.Model, feeds: dict[str, Any], folder: Path, crash: Exception) -> str:
    try:
        found = trial.reproducer(model, feeds, folder, crash)
    except LoweringError as error:
        return f"It cannot be reduced: {error}"
    return "A second try did not fail." if found is None else f"Reduced: {found}"
