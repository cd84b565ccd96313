"""Decoders as ONNX Runtime's exporter writes them, whose Attention nodes contain the caches: prefill, and a step.

`python -m tests.exports.mobius_models llama@wide ... --folder F` writes them, and --exports is that folder.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import numpy as np
import onnx

from .case import Arrays, Bar, Work
from .exported import ExportCase, exports_module

_STAGES = {"prefill": (128, 0), "step": (1, 512)}
"""Tokens that are read, and those that were read before."""

_SOURCE = 1500  # rows of what an encoder made


@dataclass(frozen=True, kw_only=True)
class DecoderCase(ExportCase):
    """One stage of a decoder; right is what onnxruntime says."""

    stage: str

    @property
    def exists(self) -> bool:
        return ((self.folder or Path()) / f"{self.export}.onnx").is_file()

    def path(self) -> Path:
        path = (self.folder or Path()) / f"{self.export}.onnx"
        if not self.exists:
            raise FileNotFoundError(
                f"'{path}' is missing: run `python -m tests.exports.mobius_models {self.export} --folder F` for it."
            )
        return path

    def feeds(self) -> Arrays:
        tokens, past = _STAGES[self.stage]
        sizes = {"batch": 1, "sequence_len": tokens, "seq_len": tokens, "past_sequence_len": past, "past_seq_len": past}
        model = onnx.load(self.path(), load_external_data=False)
        return exports_module("exporter_inputs").Inputs(model, 1, {**sizes, "encoder_sequence_len": _SOURCE}).all()

    def expected(self) -> Arrays:
        return {name: array.astype(np.float64) for name, array in _answers(self).items()}

    def model(self) -> onnx.ModelProto:
        return onnx.load(self.path())

    def work(self) -> Work:
        """Return the work of the matrices, nearly all of it.

        A step reads them and the caches, a prefill multiplies each token. Work is not
        counted where experts are chosen by token, or a source has rows of its own.
        """
        graph = onnx.load(self.path(), load_external_data=False).graph
        if any(node.op_type == "TopK" for node in graph.node) or "encoder_hidden_states" in self.feeds():
            return Work(0.0, "FLOP")
        sizes = {weight.name: math.prod(weight.dims) for weight in graph.initializer}
        turned = {node.output[0]: node.input[0] for node in graph.node if node.op_type == "Transpose"}
        factors = [turned.get(node.input[1], node.input[1]) for node in graph.node if node.op_type == "MatMul"]
        elements = sum(sizes.get(name, 0) for name in factors)
        tokens, past = _STAGES[self.stage]
        if not past:
            return Work(2.0 * tokens * elements, "FLOP")
        return Work(4.0 * elements + sum(array.nbytes for array in self.feeds().values()), "byte")


@cache
def _answers(case: DecoderCase) -> Arrays:
    import onnxruntime

    session = onnxruntime.InferenceSession(case.path(), providers=["CPUExecutionProvider"])
    names = [output.name for output in session.get_outputs()]
    return dict(zip(names, session.run(names, case.feeds())))


def cases() -> list[ExportCase]:
    types = exports_module("architectures.wide").BY_TYPE
    return [
        DecoderCase(
            name=f"{name} {stage}", group="exporter", bar=Bar(ratio=1.0), export=f"{name}@wide", past=past > 0,
            stage=stage,
        )
        for name in types
        for stage, (_, past) in _STAGES.items()
    ]  # fmt: skip
