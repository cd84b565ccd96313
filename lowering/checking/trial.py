"""A way to compile and compare a model, which `verify` uses for the whole model and `reduce` for submodels."""

from __future__ import annotations

import functools
import re
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import onnx_ir as ir

from ..choices import INT8_ROWS
from ..compiling import progress
from ..compiling.compiler import compile
from ..compiling.options import CompileOptions
from ..errors import CompilerError, LoweringError
from ..graph.loading.model import dtype_name, load_model
from ..graph.options.weight_schemes import keep_matching
from ..manifest import Argument, Manifest, arguments
from ..runtime import Model
from ..runtime.arrays.elements import ElementType
from ..runtime.arrays.lists import flatten_lists
from . import reproducer
from .compare import Comparison, Tolerance, add_float64_errors, compare_output
from .decoding import DecodingSession, build_decoding_session
from .float64_reference import compute_in_float64
from .reduce import reduce_model
from .references import Against, Evaluate, Feeds, load_reference
from .reproducer import Reproducer
from .served import ServedRequests, build_served_requests
from .synthetic_inputs import build_feeds


@dataclass(frozen=True)
class VerificationTrial:
    """The options of compilation and of the comparison."""

    against: Against
    rtol: float | None
    atol: float | None
    options: CompileOptions

    @property
    def has_compile_options(self) -> bool:
        """Whether any option of compile but `threads` is set; an artifact has its own."""
        return bool(self.options.calls) or replace(self.options, calls=(), threads=None) != CompileOptions()

    def list_options(self) -> Iterator[str]:
        """Yield the arguments of the command `verify` for these options, as far as it has them."""
        values = {"against": self.against, "rtol": self.rtol, "atol": self.atol}
        names = ("target", "accuracy_level", "precision", "threads")
        values |= {name.replace("_", "-"): getattr(self.options, name) for name in names}
        default = {"against": "reference", "target": "cpu"}
        for name, value in values.items():
            if value != default.get(name):
                yield from (f"--{name}", str(value))
        for pattern, scheme in self.options.schemes.items():
            yield from ("--weights", str(scheme) if pattern == "*" else f"{pattern}={scheme or 'none'}")
        for pattern in self.options.donate:
            yield from ("--donate", pattern)

    def adapt_to(self, model: ir.Model) -> VerificationTrial:
        """Return the trial for a submodel, which may lack some donated inputs and compressed matrices."""
        names = [value.name or "" for value in model.graph.inputs]
        donate = [p for p in self.options.donate if any(re.fullmatch(p, name) for name in names)]
        weights = self.options.weights
        if isinstance(weights, Mapping):
            weights = keep_matching(model, weights) or None
        return replace(self, options=replace(self.options, donate=donate, weights=weights))

    def compile_model(self, model: ir.Model) -> Model:
        return compile(model, **vars(self.options))

    def compare_model(
        self,
        model: ir.Model,
        compiled: Model,
        user_arrays: Feeds,
        sizes: Mapping[str, int],
        rng: np.random.Generator,
        evaluate: Evaluate,
    ) -> tuple[dict[str, Any], Tolerance, list[Comparison]]:
        """Return the inputs, the tolerance and the comparisons."""
        manifest = compiled.manifest
        allowed = Tolerance.for_model(_list_roundings(model), manifest, self.rtol, self.atol)
        session: DecodingSession | ServedRequests | None = None
        if manifest.slots is not None:
            session = build_decoding_session(model, compiled, manifest.slots, user_arrays, sizes, rng)
        elif manifest.served is not None:
            session = build_served_requests(model, compiled, manifest.served, user_arrays, sizes, rng)
        if session is not None:
            return (
                session.inputs,
                allowed,
                self._compare_outputs(
                    model, session.names, session.run_compiled(), session.run_reference, evaluate, allowed
                ),
            )
        feeds = build_feeds(model, manifest.inputs, manifest.ranges, user_arrays, sizes, rng, manifest.derived)
        narrow, declared = _find_halved_types(model, manifest)
        results = compiled.run(
            {name: np.array(array, subok=True) for name, array in _cast_arrays(feeds, narrow).items()}
        )
        results = dict(flatten_lists(results, [t.name for t in manifest.outputs], manifest.output_lists, "output"))
        feeds, results = _cast_arrays(feeds, declared), _cast_arrays(results, declared)
        outputs = arguments(manifest.outputs, manifest.output_lists)
        names = [tensor.name for output in outputs for tensor in output.tensors]
        actual = [results[name] for name in names]
        compute = functools.partial(_evaluate_tensors, feeds, outputs)
        return feeds, allowed, self._compare_outputs(model, names, actual, compute, evaluate, allowed)

    def _compare_outputs(
        self,
        model: ir.Model,
        names: Sequence[str],
        actual: Sequence[Any],
        compute: Callable[[Evaluate], list[Any]],
        evaluate: Evaluate,
        allowed: Tolerance,
    ) -> list[Comparison]:
        """Compare outputs with the reference; `compute` gets the outputs from an evaluator."""
        progress.report("running the reference")
        expected = compute(evaluate)
        comparisons = [compare_output(*pair, allowed) for pair in zip(names, actual, expected)]
        if all(c.close for c in comparisons):
            return comparisons
        progress.report("running the reference in float64")
        float64 = compute_in_float64(model, self.against, compute)
        if float64 is None:
            return comparisons
        return [
            c if c.close else add_float64_errors(c, output, reference_output, exact, allowed)
            for c, output, reference_output, exact in zip(comparisons, actual, expected, float64)
        ]

    def write_reproducer(
        self, model: ir.Model, feeds: dict[str, Any], folder: Path, crash: Exception | None
    ) -> Reproducer | None:
        """Write the minimal submodel that fails in the same way to the folder.

        Return None if the whole model passes when it is run again.
        """

        def find_failing(submodel: ir.Model, feeds: Feeds) -> Collection[str]:
            trial = self.adapt_to(submodel)
            try:
                compiled = trial.compile_model(submodel)
                if crash is not None:
                    return ()
                _, _, comparisons = trial.compare_model(
                    submodel, compiled, feeds, {}, np.random.default_rng(0), load_reference(submodel, self.against)
                )
            except Exception as error:
                return (
                    [v.name or "" for v in submodel.graph.outputs]
                    if crash is not None and _is_same_error(error, crash)
                    else ()
                )
            return [c.name for c in comparisons if not c.close]

        submodel = reduce_model(model, feeds, self.against, find_failing)
        if submodel is None:
            return None
        command = reproducer.write_reproducer(submodel, folder, [*self.adapt_to(submodel.model).list_options()])
        fails = False
        with suppress(LoweringError):  # the written file may not be a valid model
            fails = bool(find_failing(load_model(folder / reproducer.MODEL), submodel.feeds))
        return Reproducer(str(folder), reproducer.list_operators(submodel), len(model.graph), command, fails)


def _evaluate_tensors(feeds: Feeds, outputs: Sequence[Argument], evaluate: Evaluate) -> list[Any]:
    """Return the outputs of an evaluator, with lists split into tensors.

    Raises:
        LoweringError: A list has another length than in the compiled model.
    """
    tensors: list[Any] = []
    for output, value in zip(outputs, evaluate(feeds), strict=True):
        values = [value] if output.kind == "tensor" else [] if value is None else list(value)
        if len(values) != len(output.tensors):
            raise LoweringError(
                "verify.list_length_mismatch",
                f"output '{output.name}' has {len(values)} elements by the reference, and {len(output.tensors)} by the "
                "compiled model.",
            )
        tensors += values
    return tensors


def _is_same_error(error: Exception, other: Exception) -> bool:
    return type(error) is type(other) and (not isinstance(error, CompilerError) or str(error) == str(other))


def _find_halved_types(model: ir.Model, manifest: Manifest) -> tuple[dict[str, np.dtype], dict[str, np.dtype]]:
    """Return the types of caches that `precision` halves, as compiled and as the model declares them."""
    declared = {value.name or "": value.dtype for value in (*model.graph.inputs, *model.graph.outputs)}
    specs = [s for s in (*manifest.inputs, *manifest.outputs) if declared.get(s.name) is not None]
    halved = [s for s in specs if dtype_name(declared[s.name]) != s.dtype]
    compiled = {s.name: ElementType(s.dtype, s.storage).numpy for s in halved}
    return compiled, {s.name: np.dtype(dtype_name(declared[s.name])) for s in halved}


def _cast_arrays(arrays: Feeds, types: Mapping[str, np.dtype]) -> dict[str, Any]:
    return {name: np.asarray(a).astype(types[name]) if name in types else a for name, a in arrays.items()}


def _list_roundings(model: ir.Model) -> set[str]:
    """Return the types of inputs, outputs and weights, and "rows int8" if the reference may quantize rows."""
    values = (*model.graph.inputs, *model.graph.outputs, *model.graph.initializers.values())
    types = {value.dtype.name.lower() for value in values if value.dtype is not None}
    levels = {node.attributes.get_int("accuracy_level", 0) for node in model.graph.all_nodes()}
    return types | ({"rows int8"} if INT8_ROWS in levels else set())
