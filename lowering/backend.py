"""The backend that onnx.backend.base defines: `prepare`, `run_model`, `run_node` and `supports_device`.

    import lowering.backend
    lowering.backend.prepare(model).run([x])

onnx's own suite, onnx.backend.test.BackendTest, runs models through it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import onnx
from onnx.backend.base import Backend, BackendRep, Device, DeviceType

from . import check, compile
from .errors import InputError, LoweringError
from .runtime import Model
from .target import resolve

_TARGETS = {DeviceType.CPU: "cpu", DeviceType.CUDA: "cuda"}


class PreparedModel(BackendRep):
    """A compiled model that takes and gives arrays in the order of its inputs and outputs."""

    def __init__(self, model: Model) -> None:
        self.model = model

    def run(self, inputs: Any, **kwargs: Any) -> tuple[np.ndarray, ...]:
        """Run the model.

        Args:
            inputs: Arrays in the order of the model's inputs, or by their names, or one array.

        Returns:
            The outputs in the order of the model.

        Raises:
            InputError: Inputs do not fit the model.
        """
        if isinstance(inputs, np.ndarray):
            inputs = [inputs]
        if not isinstance(inputs, Mapping):
            names = [spec.name for spec in self.model.inputs]
            if len(inputs) != len(names):
                raise InputError(f"{len(inputs)} inputs are given, and the model has {len(names)}: {', '.join(names)}.")
            inputs = dict(zip(names, inputs))
        results = self.model.run({name: np.asarray(array) for name, array in inputs.items()})
        return tuple(results[spec.name] for spec in self.model.outputs)


class LoweringBackend(Backend):
    """onnx-lowering as onnx sees a backend. Devices are "CPU" and "CUDA"."""

    @classmethod
    def is_compatible(cls, model: onnx.ModelProto, device: str = "CPU", **kwargs: Any) -> bool:
        """Return whether every node can be lowered; docs/operators.md says of ONNX's node cases why some cannot."""
        try:
            return check(model).ok
        except LoweringError:
            return False

    @classmethod
    def prepare(cls, model: onnx.ModelProto, device: str = "CPU", **kwargs: Any) -> PreparedModel:
        """Compile a model for a device. Further arguments are those of `lowering.compile`.

        Raises:
            InputError: The device is not supported.
            LoweringError: As `lowering.compile`.
        """
        if not cls.supports_device(device):
            raise InputError(f"device '{device}' is not supported here. Use 'CPU', or 'CUDA' where there is a GPU.")
        return PreparedModel(compile(model, _TARGETS[Device(device).type], **kwargs))

    @classmethod
    def run_model(cls, model: onnx.ModelProto, inputs: Any, device: str = "CPU", **kwargs: Any) -> tuple[Any, ...]:
        """Compile a model and run it once."""
        return cls.prepare(model, device, **kwargs).run(inputs)

    @classmethod
    def run_node(
        cls,
        node: onnx.NodeProto,
        inputs: Any,
        device: str = "CPU",
        outputs_info: Sequence[tuple[Any, tuple[int, ...]]] | None = None,
        **kwargs: Any,
    ) -> tuple[Any, ...]:
        """Compile a model of one node, in the newest opset or that of `opset_version`, and run it once.

        Args:
            node: The node.
            inputs: Arrays in the order of the node's inputs, without the omitted ones.
            device: "CPU" or "CUDA".
            outputs_info: Element type and shape of each output; without it they are inferred.
        """
        opset = kwargs.pop("opset_version", onnx.defs.onnx_opset_version())
        return cls.run_model(_model_of(node, inputs, outputs_info, opset), inputs, device, **kwargs)

    @classmethod
    def supports_device(cls, device: str) -> bool:
        """Return whether models can be compiled for a device and run here."""
        try:
            asked = Device(device)
            return asked.type in _TARGETS and asked.device_id == 0 and bool(resolve(_TARGETS[asked.type]))
        except (AttributeError, ValueError, LoweringError):
            return False


def _model_of(
    node: onnx.NodeProto,
    inputs: Sequence[np.ndarray],
    outputs_info: Sequence[tuple[Any, tuple[int, ...]]] | None,
    opset: int,
) -> onnx.ModelProto:
    def describe(name: str, dtype: Any, shape: Sequence[int]) -> onnx.ValueInfoProto:
        return onnx.helper.make_tensor_value_info(name, onnx.helper.np_dtype_to_tensor_dtype(np.dtype(dtype)), shape)

    arrays = [np.asarray(array) for array in inputs]
    names = [name for name in dict.fromkeys(node.input) if name]
    given = [describe(name, array.dtype, array.shape) for name, array in zip(names, arrays, strict=True)]
    results = [name for name in node.output if name]
    outputs = [onnx.helper.make_empty_tensor_value_info(name) for name in results]
    if outputs_info is not None:
        outputs = [describe(name, dtype, shape) for name, (dtype, shape) in zip(results, outputs_info, strict=True)]
    graph = onnx.helper.make_graph([node], "node", given, outputs)
    imports = [onnx.helper.make_opsetid("", opset)]
    if node.domain not in ("", "ai.onnx"):
        imports.append(onnx.helper.make_opsetid(node.domain, 1))
    model = onnx.helper.make_model(graph, opset_imports=imports)
    return model if outputs_info is not None else onnx.shape_inference.infer_shapes(model, data_prop=True)


prepare = LoweringBackend.prepare
run_model = LoweringBackend.run_model
run_node = LoweringBackend.run_node
supports_device = LoweringBackend.supports_device
is_compatible = LoweringBackend.is_compatible
