"""Who says what a model's outputs should be: onnx's reference evaluator, or ONNX Runtime."""

from __future__ import annotations

import tempfile
import warnings
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Literal, TypeAlias

import numpy as np
import onnx
import onnx_ir as ir

from ..errors import LoweringError
from ..machine import not_installed

Against: TypeAlias = Literal["reference", "onnxruntime"]
Feeds: TypeAlias = Mapping[str, Any]
Evaluate: TypeAlias = Callable[[Feeds], list[Any]]
"""All outputs of a model, in order, for arrays by input name."""

MOST_INSIDE = 2**30
"""Bytes of weights that a model's file, or its bytes, hold themselves; Protobuf ends at twice that."""


def reference(model: ir.Model, against: Against) -> Evaluate:
    """What computes all outputs of inputs by name. It, and what it returns, raise LoweringError where the reference
    does not know an operator or cannot run the model."""
    try:
        run = _loaded(model, against)
    except ImportError as error:
        raise LoweringError(not_installed("onnxruntime")) from error
    except Exception as error:
        raise _unable(against, error) from error

    def evaluate(feeds: Feeds) -> list[Any]:
        try:
            with np.errstate(all="ignore"), warnings.catch_warnings():
                warnings.simplefilter("ignore", RuntimeWarning)
                return run(dict(feeds))
        except Exception as error:
            raise _unable(against, error) from error

    return evaluate


def _loaded(model: ir.Model, against: Against) -> Callable[[dict[str, Any]], list[Any]]:
    if against == "onnxruntime":
        session = _session(model)
        return lambda feeds: list(session.run(None, feeds))
    return reference_evaluator(ir.to_proto(with_weights_inside(model)))


def reference_evaluator(model: onnx.ModelProto) -> Callable[[dict[str, Any]], list[Any]]:
    """Return onnx's reference evaluator of a model, with Attention as the standard has it."""
    from onnx.reference import ReferenceEvaluator

    from .reference_attention import Attention

    evaluator = ReferenceEvaluator(model, new_ops=[Attention])
    return lambda feeds: list(evaluator.run(None, feeds))


def session_options() -> Any:
    """Options of a session of onnxruntime whose results others are held against.

    On x86-64 without dot products of bytes it adds up two matmuls of uint8 and int8 in 16 bits, which saturate; this
    asks for matmuls that do not.
    """
    import onnxruntime

    options = onnxruntime.SessionOptions()
    options.log_severity_level = 4  # what it cannot run is said by its exceptions
    options.add_session_config_entry("session.x64quantprecision", "1")
    return options


def _session(model: ir.Model) -> Any:
    import onnxruntime

    options = session_options()
    if bytes_of_weights(model) < MOST_INSIDE:
        proto = ir.to_proto(with_weights_inside(model)).SerializeToString()
        return onnxruntime.InferenceSession(proto, options, ["CPUExecutionProvider"])
    with tempfile.TemporaryDirectory(prefix="onnx-lowering-") as folder:
        path = Path(folder) / "model.onnx"
        ir.save(model, path, external_data="weights")
        return onnxruntime.InferenceSession(path, options, ["CPUExecutionProvider"])


def with_weights_inside(model: ir.Model) -> ir.Model:
    """The model with what files beside it hold in memory."""
    return ir.external_data.load_to_model(model.clone())


def bytes_of_weights(model: ir.Model) -> int:
    tensors = (value.const_value for value in model.graph.initializers.values())
    return sum(tensor.nbytes for tensor in tensors if tensor is not None)


def _unable(against: Against, error: Exception) -> LoweringError:
    first = next((line for line in str(error).splitlines() if line.strip()), type(error).__name__)
    other = " --against onnxruntime may." if against == "reference" else ""
    return LoweringError(f"the {against} evaluator cannot run this model: {first}{other}")
