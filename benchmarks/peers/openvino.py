"""OpenVINO: the case's own model, reshaped to the sizes of its inputs."""

from __future__ import annotations

from typing import Any

import numpy as np
import onnx
import openvino as ov

from ..cases.case import Arrays, Case
from ..cases.transformers import LlamaCase
from . import Contender, Form, llama_forms

_PRECISION = {"f32": ov.Type.f32, "f16": ov.Type.f16, "bf16": ov.Type.bf16}


class Peer:
    def __init__(self, threads: int) -> None:
        self._threads = threads
        self._core = ov.Core()
        self._options: dict[str, Any] = {"INFERENCE_NUM_THREADS": threads, "NUM_STREAMS": 1}

    def forms(self, case: Case) -> dict[str, Form]:
        """Half precision also computed in float32, which is what the hint asks for where it costs answers."""

        def form(precision: ov.Type) -> Form:
            return Form(lambda: self._request(case.model(), case.feeds(), precision), self._threads)

        if isinstance(case, LlamaCase) and case.accuracy_level:
            return {}
        if isinstance(case, LlamaCase):
            return {"grown cache": Form(lambda: self._request(*llama_forms.grown(case), ov.Type.f32), self._threads)}
        return {f"hint {name}": form(_PRECISION[name]) for name in dict.fromkeys((case.dtype, "f32"))}

    def _request(self, proto: onnx.ModelProto, feeds: Arrays, precision: ov.Type) -> Contender:
        model = self._core.read_model(proto.SerializeToString())
        names = [next(iter(result.get_names())) for result in model.outputs]
        model.reshape({port: ov.PartialShape(list(feeds[port.any_name].shape)) for port in model.inputs})
        options = {**self._options, "INFERENCE_PRECISION_HINT": precision}
        request = self._core.compile_model(model, "CPU", options).create_infer_request()
        tensors = {}
        for port in model.inputs:
            tensors[port.any_name] = _tensor(feeds[port.any_name])
            request.set_tensor(port.any_name, tensors[port.any_name])

        def call() -> Any:
            return tensors, request.infer(share_outputs=True)

        def answers(_: Any) -> Arrays:
            return {name: _array(request.get_output_tensor(k)) for k, name in enumerate(names)}

        return Contender(call, answers)


def _tensor(array: np.ndarray) -> ov.Tensor:
    if array.dtype.name == "bfloat16":
        return ov.Tensor(array.view(np.uint16), ov.Shape(array.shape), ov.Type.bf16)
    return ov.Tensor(array, shared_memory=True)


def _array(tensor: ov.Tensor) -> np.ndarray:
    if tensor.element_type == ov.Type.bf16:
        return (tensor.data.view(np.uint16).astype(np.uint32) << 16).view(np.float32)
    return tensor.data
