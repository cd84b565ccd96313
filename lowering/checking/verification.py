"""`verify`: compiles a model, runs it on inputs that are made up, and compares every output with a reference."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

import numpy as np
import onnx_ir as ir

from ..compiling.compiler import compile
from ..errors import InputError, LoweringError
from ..graph.declared_sizes import with_sizes
from ..graph.model import ModelLike, load_model
from ..graph.precision import Precision
from ..importing.quantised import Scheme
from .check import check
from .made_up import made_up

Against = Literal["reference", "onnxruntime"]

RTOL, ATOL = 1e-3, 1e-5
"""By how much elements may differ, where everything is computed in float32 or wider."""

# By how much an output may differ, of its root mean square, where numbers are rounded to less: what sound models show,
# several times over.
_ROUNDED = {
    "float16": 2e-2, "bfloat16": 0.1, "fast": 0.1, "tf32": 2e-2,
    "weights f16": 1e-2, "weights int8": 0.1, "weights int4": 0.3,
}  # fmt: skip


@dataclass(frozen=True)
class Comparison:
    """One output beside the reference's: the largest absolute and relative differences, and whether it is close.

    worst is the index of the element that differs most; NaN and infinities must be in the same places to be close. rms
    is the root mean square of the differences over that of the reference.
    """

    name: str
    max_abs: float
    max_rel: float
    worst: tuple[int, ...]
    close: bool
    rms: float


@dataclass(frozen=True)
class Verification:
    """The comparisons in output order, the inputs they were made with, and what was allowed, in words."""

    comparisons: tuple[Comparison, ...]
    inputs: dict[str, Any]
    allowed: str

    @property
    def first_difference(self) -> Comparison | None:
        """The first output that is not close to the reference; None when all are."""
        return next((c for c in self.comparisons if not c.close), None)


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
) -> Verification:
    """Compiles the model and compares every output with onnx's reference evaluator or ONNX Runtime.

    inputs gives some or all inputs; the others are made up by seed (made_up.py). sizes gives symbolic dimensions
    by name, 4 where it says nothing. An element is close when |ours - reference| <= atol + rtol * |reference|, 1e-5
    and 1e-3 where neither is given. weights, precision, donate and threads are passed to `compile`; the reference
    computes the model as it is, so that the comparisons show the cost: where that rounds numbers, or the model's own
    are of 16 bits, and neither rtol nor atol is given, an output is close when it differs by less than a sound model's
    would, measured over all of it.

    Raises as `compile` does; InputError for unknown names and LoweringError if the reference does not know the model's
    operators, before anything is compiled, or if it cannot run the model.
    """
    loaded = load_model(model)
    taken = [v for v in loaded.graph.inputs if v.name not in loaded.graph.initializers]
    _check_inputs(inputs or {}, [v.name or "" for v in taken])
    with_sizes(loaded, sizes or {})  # refuses names that no input has; the model stays symbolic
    try:
        reference = _reference(ir.to_proto(loaded), against)
    except LoweringError:
        if not check(loaded).ok:
            compile(loaded, target)  # which says what nobody can run
        raise
    module = compile(loaded, target, donate, threads, weights=weights, precision=precision)
    feeds = dict(inputs or {})
    rng = np.random.default_rng(seed)
    for spec in module.inputs:
        if spec.name not in feeds:
            feeds[spec.name] = made_up(loaded.graph, spec, sizes or {}, rng)
    expected_by = {name: np.array(value, copy=True) for name, value in feeds.items()}
    actual = module.run(feeds)  # first: its errors are in words
    try:
        expected = reference(expected_by)
    except Exception as error:
        raise _unable(against, error) from error
    rounding = None if rtol is not None or atol is not None else _rounding(loaded, weights, precision)
    if rounding is None:
        rtol, atol = RTOL if rtol is None else rtol, ATOL if atol is None else atol
        allowed = f"of each element {atol:g} and {rtol:g} of itself"
    else:
        allowed = f"{_ROUNDED[rounding]:g} of an output's rms, for {rounding}"
    found = []
    for tensor, want in zip(module.outputs, expected):
        one = compare(tensor.name, actual[tensor.name], want, rtol or 0.0, atol or 0.0)
        found.append(one if rounding is None else replace(one, close=one.rms <= _ROUNDED[rounding]))
    return Verification(tuple(found), expected_by, allowed)


def _rounding(model: ir.Model, weights: Scheme | None, precision: Precision | None) -> str | None:
    """What rounds the model's numbers most, by its name in _ROUNDED, if anything does."""
    ways = {f"weights {weights}", str(precision)}
    types = {value.dtype for value in (*model.graph.inputs, *model.graph.outputs, *model.graph.initializers.values())}
    ways |= {dtype.name.lower() for dtype in types if dtype is not None}
    return max(ways & _ROUNDED.keys(), key=_ROUNDED.__getitem__, default=None)


def _check_inputs(given: Iterable[str], known: Sequence[str]) -> None:
    unknown = next((name for name in given if name not in known), None)
    if unknown is not None:
        raise InputError(f"there is no input '{unknown}'. The inputs are {', '.join(known)}.")


def _reference(proto: Any, against: Against) -> Callable[[dict[str, Any]], Sequence[Any]]:
    """What computes all outputs of inputs by name."""
    try:
        if against == "onnxruntime":
            import onnxruntime

            options = onnxruntime.SessionOptions()
            options.log_severity_level = 3
            session = onnxruntime.InferenceSession(proto.SerializeToString(), options, ["CPUExecutionProvider"])
            return functools.partial(session.run, None)
        from onnx.reference import ReferenceEvaluator

        evaluator = ReferenceEvaluator(proto)
        return lambda feeds: list(evaluator.run(None, feeds))
    except ImportError as error:
        raise LoweringError("onnxruntime is not installed; pip install 'onnx-lowering[test]' brings it.") from error
    except Exception as error:
        raise _unable(against, error) from error


def _unable(against: Against, error: Exception) -> LoweringError:
    first = next((line for line in str(error).splitlines() if line.strip()), type(error).__name__)
    other = " --against onnxruntime may." if against == "reference" else ""
    return LoweringError(f"the {against} evaluator cannot run this model: {first}{other}")


def compare(name: str, actual: Any, expected: Any, rtol: float, atol: float) -> Comparison:
    """Compares one output element by element; a difference in shape or dtype is an infinite one."""
    actual, expected = np.asarray(actual), np.asarray(expected)
    if actual.shape != expected.shape or actual.dtype != expected.dtype:
        return Comparison(name, np.inf, np.inf, (), False, np.inf)
    if actual.size == 0:
        return Comparison(name, 0.0, 0.0, (), True, 0.0)
    if actual.dtype.kind in "OUS":
        differ = actual != expected
        share = float(np.sqrt(differ.mean()))
        return Comparison(name, float(differ.any()), float(differ.any()), _where(differ), not differ.any(), share)
    wide = np.complex128 if actual.dtype.kind == "c" else np.float64
    a, e = actual.astype(wide), expected.astype(wide)
    with np.errstate(invalid="ignore", over="ignore"):
        same = (a == e) | (np.isnan(a) & np.isnan(e))
        difference = np.where(same, 0.0, np.abs(a - e))
        difference = np.where(np.isnan(difference), np.inf, difference)
        relative = np.where(same, 0.0, difference / np.maximum(np.abs(e), np.finfo(np.float64).tiny))
        close = same | (difference <= atol + rtol * np.abs(e))
        size = max(np.linalg.norm(e[np.isfinite(e)]), np.finfo(np.float64).tiny)
        rms = float(np.linalg.norm(difference) / size)
    worst = _where(difference)
    return Comparison(name, float(difference.max()), float(relative.max()), worst, bool(close.all()), rms)


def _where(difference: np.ndarray) -> tuple[int, ...]:
    return tuple(int(k) for k in np.unravel_index(int(np.argmax(difference)), difference.shape))
