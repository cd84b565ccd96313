"""The backend that onnx.backend.base defines: `prepare`, `run_model`, `run_node` and `supports_device`.

    import lowering.backend
    lowering.backend.prepare(model).run([x])

onnx's own suite, onnx.backend.test.BackendTest, runs models through it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import onnx
from onnx.backend.base import Backend, BackendRep, Device, DeviceType

from . import check, compile
from .errors import InputError, LoweringError
from .graph.loading.model import load_model
from .manifest import arguments
from .runtime import Model
from .target import resolve

_LISTS = ("sequence_type", "optional_type")
_TARGETS = {DeviceType.CPU: "cpu", DeviceType.CUDA: "cuda"}


class PreparedModel(BackendRep):
    """A compiled model with arrays in the order of its inputs and outputs.

    Inputs and outputs that are sequences are lists of arrays, and optional ones without an element are None. A model
    with such inputs is compiled when it runs, once for each number of elements in the calls.
    """

    def __init__(self, names: Sequence[str], compile_for: Callable[[Mapping[str, Any]], Model]) -> None:
        """Initialize with the names of the inputs, and a function that gives the model for the inputs of a call."""
        self.names = names
        self._compile_for = compile_for

    def run(self, inputs: Any, **kwargs: Any) -> tuple[Any, ...]:
        """Run the model.

        Args:
            inputs: Arrays in the order of the model's inputs, or by their names, or one array.

        Returns:
            The outputs in the order of the model.

        Raises:
            InputError: Inputs do not fit the model.
            LoweringError: As `lowering.compile`, where the model takes sequences or optional values.
        """
        if isinstance(inputs, np.ndarray):
            inputs = [inputs]
        if not isinstance(inputs, Mapping):
            if len(inputs) != len(self.names):
                names = ", ".join(self.names)
                raise InputError(
                    "input.count_mismatch",
                    f"{len(inputs)} inputs are given, and the model has {len(self.names)}: {names}.",
                )
            inputs = dict(zip(self.names, inputs))
        model = self._compile_for(inputs)
        results = model.run({name: _as_arrays(value) for name, value in inputs.items()})
        return tuple(results[argument.name] for argument in arguments(model.outputs, model.manifest.output_lists))


class _CompiledByLengths:
    """A model with sequence or optional inputs, and its compiled variants by number of elements."""

    def __init__(self, model: onnx.ModelProto, target: str, options: Mapping[str, Any]) -> None:
        self._model, self._target, self._options = model, target, dict(options)
        self._compiled: dict[tuple[Any, ...], Model] = {}

    def __call__(self, inputs: Mapping[str, Any]) -> Model:
        """Return the model for the lists of a call."""
        counts, ranks = read_counts_and_ranks(self._model, inputs)
        key = (*counts.values(), *ranks.values())
        if key not in self._compiled:
            model = declare_ranks(self._model, ranks)
            dims = {**self._options.get("dims", {}), **counts}
            self._compiled[key] = compile(model, self._target, **{**self._options, "dims": dims})
        return self._compiled[key]


def read_counts_and_ranks(
    model: onnx.ModelProto, inputs: Mapping[str, Any]
) -> tuple[dict[str, int], dict[str, int | None]]:
    """Return the number of elements of sequence and optional inputs, and their ranks."""
    lists = {name: inputs.get(name) for name in _find_list_inputs(model)}
    counts = {
        name: len(value) if isinstance(value, (list, tuple)) else int(value is not None)
        for name, value in lists.items()
    }
    return counts, {name: _read_rank(value) for name, value in lists.items()}


def _read_rank(value: Any) -> int | None:
    """Return the rank of the arrays of a list; None where they have several, or there are none."""
    ranks = {np.ndim(array) for array in value} if isinstance(value, (list, tuple)) else set()
    return ranks.pop() if len(ranks) == 1 else None


def declare_ranks(model: onnx.ModelProto, ranks: Mapping[str, int | None]) -> onnx.ModelProto:
    """Return the model with these ranks for sequences without a declared shape."""
    declared = onnx.ModelProto()
    declared.CopyFrom(model)
    for value in declared.graph.input:
        kind = value.type.optional_type.elem_type if value.type.HasField("optional_type") else value.type
        tensor = kind.sequence_type.elem_type.tensor_type
        rank = ranks.get(value.name)
        if kind.HasField("sequence_type") and rank is not None and not tensor.HasField("shape"):
            tensor.shape.SetInParent()
            for _ in range(rank):
                tensor.shape.dim.add()
    return declared


def _as_arrays(value: Any) -> Any:
    if isinstance(value, (list, tuple)):
        return [np.asarray(array) for array in value]
    return None if value is None else np.asarray(value)


class LoweringBackend(Backend):
    """onnx-lowering as a backend of ONNX. Devices are "CPU" and "CUDA"."""

    @classmethod
    def is_compatible(cls, model: onnx.ModelProto, device: str = "CPU", **kwargs: Any) -> bool:
        """Return whether every node can be lowered.

        Sequences and optional inputs have one element each. docs/node_cases.md lists the reasons for unsupported node
        cases of ONNX.
        """
        try:
            return check(model, dims=dict.fromkeys(_find_list_inputs(model), 1)).ok
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
            raise InputError(
                "argument.device_unsupported",
                f"device '{device}' is not supported on this machine. Use 'CPU', or 'CUDA' on a machine with a GPU.",
            )
        target = _TARGETS[Device(device).type]
        if not _find_list_inputs(model):
            compiled = compile(model, target, **kwargs)
            return PreparedModel([spec.name for spec in compiled.inputs], lambda inputs: compiled)
        load_model(model)  # rejects an invalid model
        defaults = {value.name for value in model.graph.initializer}
        names = [value.name for value in model.graph.input if value.name not in defaults]
        return PreparedModel(names, _CompiledByLengths(model, target, kwargs))

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
        return cls.run_model(_make_node_model(node, inputs, outputs_info, opset), inputs, device, **kwargs)

    @classmethod
    def supports_device(cls, device: str) -> bool:
        """Return whether models can be compiled for a device and run here."""
        try:
            requested = Device(device)
            return requested.type in _TARGETS and requested.device_id == 0 and bool(resolve(_TARGETS[requested.type]))
        except (AttributeError, ValueError, LoweringError):
            return False


def _find_list_inputs(model: onnx.ModelProto) -> list[str]:
    """Return the inputs that are sequences or optional values."""
    return [value.name for value in model.graph.input if value.type.WhichOneof("value") in _LISTS]


def _make_node_model(
    node: onnx.NodeProto,
    inputs: Sequence[np.ndarray],
    outputs_info: Sequence[tuple[Any, tuple[int, ...]]] | None,
    opset: int,
) -> onnx.ModelProto:
    def describe(name: str, dtype: Any, shape: Sequence[int]) -> onnx.ValueInfoProto:
        return onnx.helper.make_tensor_value_info(name, onnx.helper.np_dtype_to_tensor_dtype(np.dtype(dtype)), shape)

    arrays = [np.asarray(array) for array in inputs]
    names = [name for name in dict.fromkeys(node.input) if name]
    input_infos = [describe(name, array.dtype, array.shape) for name, array in zip(names, arrays, strict=True)]
    results = [name for name in node.output if name]
    outputs = [onnx.helper.make_empty_tensor_value_info(name) for name in results]
    if outputs_info is not None:
        outputs = [describe(name, dtype, shape) for name, (dtype, shape) in zip(results, outputs_info, strict=True)]
    graph = onnx.helper.make_graph([node], "node", input_infos, outputs)
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
