"""One way to compile a model and to compare it, which `verify` goes with a whole model and `reduce` with its parts."""

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

from ..choices import Precision, Scheme
from ..compiling import progress
from ..compiling.compiler import compile
from ..compiling.overflow import Call
from ..errors import CompilerError, LoweringError
from ..graph.model import dtype_name, load_model
from ..graph.serve import Serve
from ..manifest import Argument, Manifest, arguments
from ..runtime import Model
from ..runtime.elements import ElementType
from ..runtime.lists import flatten_lists
from . import reproducer
from .compare import Allowed, Comparison, compare, with_float64_errors
from .decoding import Session, session
from .float64_reference import in_float64
from .reduce import reduce
from .references import Against, Evaluate, Feeds, reference
from .reproducer import Reproducer
from .served import Requests, requests
from .synthetic_inputs import feeds_of


@dataclass(frozen=True)
class Trial:
    """How a model is compiled, and compared with what."""

    against: Against
    target: str
    rtol: float | None
    atol: float | None
    weights: Scheme | None
    precision: Precision | None
    donate: tuple[str, ...]
    threads: int | None
    static_cache: int | None
    calls: Sequence[Call]
    serve: Serve | None

    @property
    def has_options_of_compile(self) -> bool:
        given = (self.weights, self.precision, self.static_cache, self.serve, *self.donate, *self.calls)
        return self.target != "cpu" or any(option is not None for option in given)

    def options(self) -> Iterator[str]:
        """Those of the command line."""
        default = {"against": "reference", "target": "cpu"}
        for name in ("against", "target", "rtol", "atol", "weights", "precision", "threads"):
            if (value := getattr(self, name)) != default.get(name):
                yield from (f"--{name}", str(value))
        for pattern in self.donate:
            yield from ("--donate", pattern)

    def of_part(self, model: ir.Model) -> Trial:
        """For a part of the model, which may not have all inputs that are donated."""
        names = [value.name or "" for value in model.graph.inputs]
        return replace(self, donate=tuple(p for p in self.donate if any(re.fullmatch(p, name) for name in names)))

    def compiled(self, model: ir.Model) -> Model:
        return compile(
            model, self.target, self.donate, self.threads,
            static_cache=self.static_cache, serve=self.serve, weights=self.weights, precision=self.precision,
            calls=self.calls,
        )  # fmt: skip

    def compared(
        self,
        model: ir.Model,
        compiled: Model,
        given: Feeds,
        sizes: Mapping[str, int],
        rng: np.random.Generator,
        evaluate: Evaluate,
    ) -> tuple[dict[str, Any], Allowed, list[Comparison]]:
        """The inputs, what is allowed, and the comparisons."""
        manifest = compiled.manifest
        allowed = Allowed.of(_types(model), manifest, self.rtol, self.atol)
        talk: Session | Requests | None = None
        if manifest.slots is not None:
            talk = session(model, compiled, manifest.slots, given, sizes, rng)
        elif manifest.served is not None:
            talk = requests(model, compiled, manifest.served, given, sizes, rng)
        if talk is not None:
            return talk.inputs, allowed, self._judged(model, talk.names, talk.ours(), talk.theirs, evaluate, allowed)
        feeds = feeds_of(model, manifest.inputs, manifest.ranges, given, sizes, rng, manifest.derived)
        narrow, declared = _halved(model, manifest)
        results = compiled.run({name: np.array(array, subok=True) for name, array in _retyped(feeds, narrow).items()})
        results = dict(flatten_lists(results, [t.name for t in manifest.outputs], manifest.output_lists, "output"))
        feeds, results = _retyped(feeds, declared), _retyped(results, declared)
        outputs = arguments(manifest.outputs, manifest.output_lists)
        names = [tensor.name for output in outputs for tensor in output.tensors]
        actual = [results[name] for name in names]
        compute = functools.partial(_tensors, feeds, outputs)
        return feeds, allowed, self._judged(model, names, actual, compute, evaluate, allowed)

    def _judged(
        self,
        model: ir.Model,
        names: Sequence[str],
        actual: Sequence[Any],
        compute: Callable[[Evaluate], list[Any]],
        evaluate: Evaluate,
        allowed: Allowed,
    ) -> list[Comparison]:
        """compute is what an evaluator of the model is asked for."""
        progress.at("running the reference")
        expected = compute(evaluate)
        found = [compare(*each, allowed) for each in zip(names, actual, expected)]
        if all(c.close for c in found):
            return found
        progress.at("running the reference in float64")
        float64 = in_float64(model, self.against, compute)
        if float64 is None:
            return found
        return [
            c if c.close else with_float64_errors(c, ours, theirs, true, allowed)
            for c, ours, theirs, true in zip(found, actual, expected, float64)
        ]

    def reproducer(
        self, model: ir.Model, feeds: dict[str, Any], folder: Path, crash: Exception | None
    ) -> Reproducer | None:
        """The smallest part of the model that fails in the same way, written to the folder; None if even the whole
        model, asked once more, does not."""

        def blamed(part: ir.Model, feeds: Feeds) -> Collection[str]:
            trial = self.of_part(part)
            try:
                compiled = trial.compiled(part)
                if crash is not None:
                    return ()
                _, _, comparisons = trial.compared(
                    part, compiled, feeds, {}, np.random.default_rng(0), reference(part, self.against)
                )
            except Exception as error:
                return [v.name or "" for v in part.graph.outputs] if crash is not None and _alike(error, crash) else ()
            return [c.name for c in comparisons if not c.close]

        part = reduce(model, feeds, self.against, blamed)
        if part is None:
            return None
        command = reproducer.write(part, folder, [*self.of_part(part.model).options()])
        fails = False
        with suppress(LoweringError):  # of a file that is no legal model
            fails = bool(blamed(load_model(folder / reproducer.MODEL), part.feeds))
        return Reproducer(str(folder), reproducer.operators(part), len(model.graph), command, fails)


def _tensors(feeds: Feeds, outputs: Sequence[Argument], evaluate: Evaluate) -> list[Any]:
    """What an evaluator computes, the tensors of lists one by one.

    Raises LoweringError for a list of another length than the compiled model gives.
    """
    found: list[Any] = []
    for output, value in zip(outputs, evaluate(feeds), strict=True):
        values = [value] if output.kind == "tensor" else [] if value is None else list(value)
        if len(values) != len(output.tensors):
            raise LoweringError(
                f"output '{output.name}' has {len(values)} elements by the reference, and {len(output.tensors)} by the "
                "compiled model."
            )
        found += values
    return found


def _alike(error: Exception, other: Exception) -> bool:
    return type(error) is type(other) and (not isinstance(error, CompilerError) or str(error) == str(other))


def _halved(model: ir.Model, manifest: Manifest) -> tuple[dict[str, np.dtype], dict[str, np.dtype]]:
    """The types of caches that `precision` keeps in half of it, compiled and as the model declares them."""
    declared = {value.name or "": value.dtype for value in (*model.graph.inputs, *model.graph.outputs)}
    specs = [s for s in (*manifest.inputs, *manifest.outputs) if declared.get(s.name) is not None]
    halved = [s for s in specs if dtype_name(declared[s.name]) != s.dtype]
    compiled = {s.name: ElementType(s.dtype, s.storage).numpy for s in halved}
    return compiled, {s.name: np.dtype(dtype_name(declared[s.name])) for s in halved}


def _retyped(arrays: Feeds, types: Mapping[str, np.dtype]) -> dict[str, Any]:
    return {name: np.asarray(a).astype(types[name]) if name in types else a for name, a in arrays.items()}


def _types(model: ir.Model) -> set[str]:
    values = (*model.graph.inputs, *model.graph.outputs, *model.graph.initializers.values())
    return {value.dtype.name.lower() for value in values if value.dtype is not None}
