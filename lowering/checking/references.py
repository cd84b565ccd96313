"""References for a model's outputs: onnx's reference evaluator, or ONNX Runtime."""

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
from ..machine import describe_missing_package

Against: TypeAlias = Literal["reference", "onnxruntime"]
Feeds: TypeAlias = Mapping[str, Any]
Evaluate: TypeAlias = Callable[[Feeds], list[Any]]
"""All outputs of a model, in order, for arrays by input name."""

MOST_INSIDE = 2**30
"""The most bytes of weights that are stored inside a model's file or bytes; Protobuf ends at twice that."""


def load_reference(model: ir.Model, against: Against) -> Evaluate:
    """Return a function that computes all outputs for inputs by name.

    Raises:
        LoweringError: The reference does not support an operator or cannot run the model; the returned function raises
            it as well.
    """
    try:
        run = _create_runner(model, against)
    except ImportError as error:
        raise LoweringError("toolchain.package_missing", describe_missing_package("onnxruntime")) from error
    except Exception as error:
        raise _make_error(against, error) from error

    def evaluate(feeds: Feeds) -> list[Any]:
        try:
            with np.errstate(all="ignore"), warnings.catch_warnings():
                warnings.simplefilter("ignore", RuntimeWarning)
                return run(dict(feeds))
        except Exception as error:
            raise _make_error(against, error) from error

    return evaluate


def _create_runner(model: ir.Model, against: Against) -> Callable[[dict[str, Any]], list[Any]]:
    if against == "onnxruntime":
        session = _create_session(model)
        return lambda feeds: list(session.run(None, feeds))
    return create_reference_evaluator(ir.to_proto(inline_weights(model)))


def create_reference_evaluator(model: onnx.ModelProto) -> Callable[[dict[str, Any]], list[Any]]:
    """Return onnx's reference evaluator of a model, with Attention as the standard has it."""
    from onnx.reference import ReferenceEvaluator

    from .reference_attention import Attention

    evaluator = ReferenceEvaluator(model, new_ops=[Attention])
    return lambda feeds: list(evaluator.run(None, feeds))


def create_session_options() -> Any:
    """Return options of an onnxruntime session that serves as a reference.

    On x86-64 without dot products of bytes onnxruntime adds two products of uint8 and int8 in 16 bits, which saturate.
    These options ask for matmuls that do not.
    """
    import onnxruntime

    options = onnxruntime.SessionOptions()
    options.log_severity_level = 4  # its exceptions report unsupported models
    options.add_session_config_entry("session.x64quantprecision", "1")
    return options


def _create_session(model: ir.Model) -> Any:
    import onnxruntime

    options = create_session_options()
    if count_weight_bytes(model) < MOST_INSIDE:
        proto = ir.to_proto(inline_weights(model)).SerializeToString()
        return onnxruntime.InferenceSession(proto, options, ["CPUExecutionProvider"])
    with tempfile.TemporaryDirectory(prefix="onnx-lowering-") as folder:
        path = Path(folder) / "model.onnx"
        ir.save(model, path, external_data="weights")
        return onnxruntime.InferenceSession(path, options, ["CPUExecutionProvider"])


def inline_weights(model: ir.Model) -> ir.Model:
    """Return the model with its external data loaded into memory."""
    return ir.external_data.load_to_model(model.clone())


def count_weight_bytes(model: ir.Model) -> int:
    """Return the bytes of all initializers."""
    tensors = (value.const_value for value in model.graph.initializers.values())
    return sum(tensor.nbytes for tensor in tensors if tensor is not None)


def _make_error(against: Against, error: Exception) -> LoweringError:
    first_line = next((line for line in str(error).splitlines() if line.strip()), type(error).__name__)
    hint = " Try --against onnxruntime." if against == "reference" else ""
    return LoweringError(
        "verify.reference_failed", f"the {against} evaluator cannot run this model: {first_line}{hint}"
    )
