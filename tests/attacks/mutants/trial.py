"""One mutant, in a process of its own: checked, on request compiled and called, and compared with ONNX Runtime."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path

import numpy as np
import onnxruntime

import lowering
from lowering.compiling import compiler

from ..oracle import difference, find_foreign_terms

Arrays = dict[str, np.ndarray]
# How a mutant ended: a kind (see __main__.py) and its details.
End = tuple[str, str]

# The largest relative difference of correct outputs after some layers.
_CLOSE = 1e-3
MODEL, ARTIFACT, TEMPORARY = "model.onnx", "artifact", "temporary"


class RefusedError(Exception):
    """The model, or the call, is rejected by an error that users understand."""


class FindingError(Exception):
    """A fault of the compiler: a kind and its details."""


def attempt(folder: Path, calls: Sequence[Arrays], compiles: bool, begin: Callable[[str], None]) -> End:
    """Return how the mutant ended; `begin` is called with each step.

    The folder contains the model and an empty folder for temporary files.
    """
    try:
        return _attempt(folder, calls, compiles, begin)
    except FindingError as finding:
        return finding.args


def _attempt(folder: Path, calls: Sequence[Arrays], compiles: bool, begin: Callable[[str], None]) -> End:
    path = folder / MODEL
    begin("check")
    refusal = _refusal("check", lambda: _check(path))
    if compiles:
        begin("compile")
        refused = _refusal("compile", lambda: compiler.compile_to(folder / ARTIFACT, path))
        _check_files(folder, {ARTIFACT} if refused is None else set())
        if refused is not None and refusal is None:
            return "check says ok", refused
        if refused is None and refusal is not None:
            return "check refuses", refusal
    if refusal is not None:
        return "refused", refusal
    return _judged(folder, calls, begin) if compiles else ("passed", "")


def _check(path: Path) -> None:
    report = lowering.check(path)
    if not report.ok:
        raise RefusedError(str(report))


def _refusal(step: str, action: Callable[[], object]) -> str | None:
    """Return the text by which an action is rejected, None where it succeeds."""
    try:
        action()
    except (lowering.LoweringError, RefusedError) as error:
        terms = find_foreign_terms(str(error))
        if terms:
            raise FindingError("unclear", f"at {step}: says '{terms}': {error}") from error
        return str(error)
    except Exception as error:
        raise FindingError("raw", f"at {step}: {type(error).__name__}: {error}") from error
    return None


def _check_files(folder: Path, expected: set[str]) -> None:
    files = {path.name for path in folder.iterdir()} - {MODEL, TEMPORARY}
    left = sorted(path.name for path in (folder / TEMPORARY).iterdir())
    if files != expected or left:
        raise FindingError("leftover files", f"{sorted(files)}, temporary {left}")


def _judged(folder: Path, calls: Sequence[Arrays], begin: Callable[[str], None]) -> End:
    begin("load")
    model = lowering.load(folder / ARTIFACT)
    ends: list[End] = []
    for arrays in calls:
        feeds = {spec.name: arrays[spec.name] for spec in model.inputs if spec.name in arrays}
        results: Arrays = {}
        begin("run")
        refused = _refusal("run", partial(_run, model, feeds, results))
        begin("reference")
        try:
            expected = _reference(folder / MODEL, feeds)
        except Exception as error:  # of onnxruntime's
            ends.append(("unjudged" if refused is None else "refused at run", f"{refused}; the reference: {error}"))
            continue
        if refused is not None:
            return "stricter", refused
        wrong = difference([np.asarray(results[output.name]) for output in model.outputs], expected, _CLOSE)
        if wrong:
            return "wrong", wrong
        ends.append(("right", ""))
    return ends[-1]


def _run(model: lowering.Model, feeds: Arrays, results: Arrays) -> None:
    results.update(model.run(feeds))


def _reference(path: Path, feeds: Arrays) -> list[np.ndarray]:
    options = onnxruntime.SessionOptions()
    options.graph_optimization_level = onnxruntime.GraphOptimizationLevel.ORT_DISABLE_ALL
    options.intra_op_num_threads, options.log_severity_level = 1, 4
    session = onnxruntime.InferenceSession(path, options, providers=["CPUExecutionProvider"])
    names = {value.name for value in session.get_inputs()}
    return session.run(None, {name: array for name, array in feeds.items() if name in names})
