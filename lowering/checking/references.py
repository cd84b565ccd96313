"""Who says what a model's outputs should be: onnx's reference evaluator, or ONNX Runtime."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping
from typing import Any, Literal, TypeAlias

import numpy as np
import onnx_ir as ir

from ..errors import LoweringError

Against: TypeAlias = Literal["reference", "onnxruntime"]
Feeds: TypeAlias = Mapping[str, Any]
Evaluate: TypeAlias = Callable[[Feeds], list[Any]]
"""All outputs of a model, in order, for arrays by input name."""


def reference(model: ir.Model, against: Against) -> Evaluate:
    """What computes all outputs of inputs by name. It, and what it returns, raise LoweringError where the reference
    does not know an operator or cannot run the model."""
    try:
        run = _loaded(ir.to_proto(model), against)
    except ImportError as error:
        raise LoweringError("onnxruntime is not installed; pip install 'onnx-lowering[test]' brings it.") from error
    except Exception as error:
        raise _unable(against, error) from error

    def evaluate(feeds: Feeds) -> list[Any]:
        try:
            with np.errstate(all="ignore"), warnings.catch_warnings(action="ignore", category=RuntimeWarning):
                return run(dict(feeds))
        except Exception as error:
            raise _unable(against, error) from error

    return evaluate


def _loaded(proto: Any, against: Against) -> Callable[[dict[str, Any]], list[Any]]:
    if against == "onnxruntime":
        import onnxruntime

        options = onnxruntime.SessionOptions()
        options.log_severity_level = 4  # what it cannot run is said by its exceptions
        session = onnxruntime.InferenceSession(proto.SerializeToString(), options, ["CPUExecutionProvider"])
        return lambda feeds: list(session.run(None, feeds))
    from onnx.reference import ReferenceEvaluator

    evaluator = ReferenceEvaluator(proto)
    return lambda feeds: list(evaluator.run(None, feeds))


def _unable(against: Against, error: Exception) -> LoweringError:
    first = next((line for line in str(error).splitlines() if line.strip()), type(error).__name__)
    other = " --against onnxruntime may." if against == "reference" else ""
    return LoweringError(f"the {against} evaluator cannot run this model: {first}{other}")
