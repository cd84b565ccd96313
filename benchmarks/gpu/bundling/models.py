"""Whole models of a bundle, in float16: a decoder with slot caches, and an encoder. What they should give is computed
here, in float64 by onnx's reference evaluator."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import onnx
from onnx import TensorProto, numpy_helper

from lowering.compiling.compiler import compile_to
from lowering.demo.decoder import DecoderConfig, build_decoder

from ...cases.case import Arrays
from ...cases.transformers import BertConfig, bert, evaluated
from ..plan import Program
from .folders import make_empty

TOLERANCE = 5e-3  # relative to the range of an output

_DECODER = DecoderConfig(2, hidden=256, heads=8, kv_heads=2, head_dim=64, mlp=512, vocabulary=1000, positions=512)
_ENCODER = BertConfig(layers=2, hidden=256, heads=4, inner=512, vocabulary=1000)


def write(folder: Path, target: str) -> list[Program]:
    """Artifact and calls (call-N.npz) of each model, in folders below `folder` / "models"."""
    models = {"decoder": build_decoder(_DECODER), "encoder": bert(_ENCODER)}
    calls = {"decoder": [_decoder_feeds(37, 0), _decoder_feeds(1, 150)], "encoder": [_encoder_feeds(2, 77)]}
    for name, model in models.items():
        rounded, target_folder = _with_half_weights(model), make_empty(folder / "models" / name)
        compile_to(
            target_folder / "artifact", in_half(rounded), target, donate=["cache_.*"] if name == "decoder" else []
        )
        for number, feeds in enumerate(calls[name]):
            outputs = tuple(output.name for output in model.graph.output)
            right = evaluated(rounded, {key: _wide(array) for key, array in feeds.items()}, outputs)
            arrays = {f"in.{key}": x for key, x in feeds.items()} | {f"out.{key}": x for key, x in right.items()}
            np.savez(target_folder / f"call-{number}.npz", allow_pickle=False, **arrays)
    return [Program(name, "model", f"models/{name}", {"tolerance": TOLERANCE}) for name in models]


def _decoder_feeds(tokens: int, past: int) -> Arrays:
    rng = np.random.default_rng(tokens)
    shape = (2, _DECODER.kv_heads, 256, _DECODER.head_dim)
    names = [f"cache_{kind}.{layer}" for layer in range(_DECODER.layers) for kind in "kv"]
    caches = {name: rng.standard_normal(shape).astype(np.float16) for name in names}
    indices = np.array([past, past // 2])
    return {"ids": rng.integers(0, _DECODER.vocabulary, (2, tokens)), "write_indices": indices, **caches}


def _encoder_feeds(batch: int, tokens: int) -> Arrays:
    return {"ids": np.random.default_rng(tokens).integers(0, _ENCODER.vocabulary, (batch, tokens))}


def _wide(array: np.ndarray) -> np.ndarray:
    return array.astype(np.float32) if array.dtype == np.float16 else array


def _with_half_weights(model: onnx.ModelProto) -> onnx.ModelProto:
    """The float32 model whose weights are those of the float16 one."""
    return _mapped(model, TensorProto.FLOAT, lambda array: array.astype(np.float16).astype(np.float32))


def in_half(model: onnx.ModelProto) -> onnx.ModelProto:
    return _mapped(model, TensorProto.FLOAT16, lambda array: array.astype(np.float16))


def _mapped(model: onnx.ModelProto, dtype: int, change: Callable[[np.ndarray], np.ndarray]) -> onnx.ModelProto:
    """A copy whose float32 weights are changed, and whose float32 inputs and outputs are of a type."""
    copy = onnx.ModelProto()
    copy.CopyFrom(model)
    for value in (*copy.graph.input, *copy.graph.output):
        if value.type.tensor_type.elem_type == TensorProto.FLOAT:
            value.type.tensor_type.elem_type = dtype
    for tensor in copy.graph.initializer:
        if tensor.data_type == TensorProto.FLOAT:
            tensor.CopyFrom(numpy_helper.from_array(change(numpy_helper.to_array(tensor)), tensor.name))
    return copy
