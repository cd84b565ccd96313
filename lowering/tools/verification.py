"""`verify`: compiles a model, runs it on random inputs, and compares every output with a reference."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
import onnx_ir as ir

from ..compiling.compiler import compile
from ..errors import InputError, LoweringError
from ..graph.declared_sizes import with_sizes
from ..graph.model import ModelLike, load_model
from ..graph.precision import Precision
from ..importing.quantised import Scheme
from ..profiling.inputs import random_input

Against = Literal["reference", "onnxruntime"]


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
    """The comparisons in output order, and the inputs they were made with."""

    comparisons: tuple[Comparison, ...]
    inputs: dict[str, Any]

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
    rtol: float = 1e-3,
    atol: float = 1e-5,
    seed: int = 0,
    weights: Scheme | None = None,
    precision: Precision | None = None,
) -> Verification:
    """Compiles the model and compares every output with onnx's reference evaluator or ONNX Runtime.

    inputs gives some or all inputs; the others are random (floats standard normal, integers 0 or 1, which are legal
    indices of anything not empty). sizes gives symbolic dimensions by name, 4 where it says nothing. An element is
    close when |ours - reference| <= atol + rtol * |reference|. weights and precision are passed to `compile`; the
    reference computes the model as it is, so that the comparisons show the cost.

    Raises as `compile` does; InputError for unknown names, before anything is compiled; LoweringError if the
    reference cannot run the model.
    """
    loaded = load_model(model)
    taken = [v for v in loaded.graph.inputs if v.name not in loaded.graph.initializers]
    _check_inputs(inputs or {}, [v.name or "" for v in taken])
    with_sizes(loaded, sizes or {})  # refuses names that no input has; the model stays symbolic
    proto = ir.to_proto(loaded)
    module = compile(loaded, target, weights=weights, precision=precision)
    feeds = dict(inputs or {})
    rng = np.random.default_rng(seed)
    for spec in module.inputs:
        if spec.name not in feeds:
            feeds[spec.name] = random_input(spec, sizes or {}, rng)
    actual = module.run(feeds)  # first: its errors are in words
    expected = _reference(proto, against, feeds)
    return Verification(
        tuple(compare(t.name, actual[t.name], e, rtol, atol) for t, e in zip(module.outputs, expected)), feeds
    )


def _check_inputs(given: Iterable[str], known: Sequence[str]) -> None:
    unknown = next((name for name in given if name not in known), None)
    if unknown is not None:
        raise InputError(f"there is no input '{unknown}'. The inputs are {', '.join(known)}.")


def _reference(proto: Any, against: Against, feeds: dict[str, Any]) -> Any:
    try:
        if against == "onnxruntime":
            import onnxruntime

            options = onnxruntime.SessionOptions()
            options.log_severity_level = 3
            session = onnxruntime.InferenceSession(proto.SerializeToString(), options, ["CPUExecutionProvider"])
            return session.run(None, feeds)
        from onnx.reference import ReferenceEvaluator

        return ReferenceEvaluator(proto).run(None, feeds)
    except ImportError as error:
        raise LoweringError("onnxruntime is not installed; pip install 'onnx-lowering[test]' brings it.") from error
    except Exception as error:
        first = next((line for line in str(error).splitlines() if line.strip()), type(error).__name__)
        raise LoweringError(f"the {against} evaluator cannot run this model: {first}") from error


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
