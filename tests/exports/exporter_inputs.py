"""Random inputs for the graphs of ONNX Runtime's exporter, which follow the names that it gives to inputs and sizes."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import onnx

from tests.exports.mobius_models import CAPACITY

# By the end of a symbol's name, its two sizes; the first that fits.
SIZES = (
    ("batch", (2, 1)),
    ("past_sequence_len|past_sequence_length|past_seq_len", (3, 0)),
    ("encoder_sequence_len|ctx_len|cross_past_seq_len|cross_sequence_len", (6, 4)),
    ("kv_len_full_attention", (9, 8)),
    ("kv_len_sliding_attention", (9, 8)),
    ("max_seq_len", (CAPACITY, CAPACITY)),
    ("mel_sequence_len", (100, 200)),
    ("audio_length", (960, 1920)),
    ("audio_seq_len|audio_sequence_len", (32, 32)),
    ("text_sequence_len", (12, 15)),
    ("height|width", (8, 16)),
    ("num_frames|frames", (3, 5)),
    ("num_quantizers", (4, 4)),
    ("num_feature_tokens|num_image_tokens", (2, 3)),
    ("num_speech_tokens", (1, 2)),
    ("num_images", (1, 2)),
    ("total_patches", (16, 32)),
    ("num_patches", (16, 16)),
    ("time", (40, 48)),
    ("labels", (4, 6)),
    ("sequence_len|sequence_length|seq_len|q_len", (5, 7)),
)
SETTINGS = 2
IMAGE_TOKEN, SPEECH_TOKEN, FIRST_TOKEN, VOCABULARY = 3, 4, 5, 40
_WAVES = {"input_values": (800, 1300)}  # whose time is in samples


class Inputs:
    """The inputs of one graph at a setting, of which some sizes may be fixed."""

    def __init__(self, model: onnx.ModelProto, setting: int, fixed: Mapping[str, int]) -> None:
        self.graph, self.setting, self.fixed = model.graph, setting, fixed
        self.rng = np.random.default_rng(setting)
        self.tables = {value.name: value.dims for value in model.graph.initializer}
        self.shapes = {value.name: self.shape(value) for value in model.graph.input}
        self.past = self.size("past_sequence_len") if any("past_" in name for name in self.shapes) else 0

    def size(self, symbol: str) -> int:
        """Return the size of a symbol, or of a sum of symbols."""
        if " + " in symbol:
            return sum(map(self.size, symbol.split(" + ")))
        if symbol in self.fixed:
            return self.fixed[symbol]
        for pattern, sizes in SIZES:
            if re.fullmatch(f"(.*_)?({pattern})", symbol):
                return sizes[self.setting]
        raise ValueError(f"size '{symbol}' is unknown: add it to SIZES")

    def shape(self, value: onnx.ValueInfoProto) -> list[int]:
        dims = value.type.tensor_type.shape.dim
        sizes = [self.size(dim.dim_param) if dim.dim_param else dim.dim_value for dim in dims]
        if value.name in _WAVES:
            sizes[1] = _WAVES[value.name][self.setting]
        return sizes

    def all(self) -> dict[str, np.ndarray]:
        feeds = {}
        for value in self.graph.input:
            dtype = onnx.helper.tensor_dtype_to_np_dtype(value.type.tensor_type.elem_type)
            maker = next((candidate for pattern, candidate in MAKERS if re.fullmatch(pattern, value.name)), None)
            shape = self.shapes[value.name]
            if maker is not None:
                array = np.broadcast_to(maker(self, value.name, shape), shape)
            elif np.issubdtype(dtype, np.floating) or dtype.name == "bfloat16":
                array = self.rng.standard_normal(shape)
            else:
                array = self.rng.integers(0, self.limit(value.name, 2), shape)
            feeds[value.name] = np.ascontiguousarray(array.astype(dtype))
        return feeds

    def limit(self, name: str, otherwise: int) -> int:
        """Return how many rows a table has that is read by an input."""
        rows = [
            self.tables[node.input[0]][0]
            for node in self.graph.node
            if node.op_type == "Gather" and node.input[1] == name and node.input[0] in self.tables
        ]
        return min(rows, default=otherwise)


def _tokens(inputs: Inputs, name: str, shape: list[int]) -> np.ndarray:
    """Draw ordinary tokens, but as many placeholders as there are rows of features."""
    ids = inputs.rng.integers(FIRST_TOKEN, inputs.limit(name, VOCABULARY), shape)
    flat_ids = ids.reshape(-1)
    images = inputs.shapes.get("image_features", [0])[0]
    sounds = inputs.shapes.get("audio_features", [0])[0]
    # A graph that reads only sounds has the token of images for them.
    first, second = (images, sounds) if images else (sounds, 0)
    flat_ids[:first], flat_ids[first : first + second] = IMAGE_TOKEN, SPEECH_TOKEN
    return ids


def _mask(inputs: Inputs, name: str, shape: list[int]) -> np.ndarray:
    """Hide one key of the last sequence: the oldest one of a cache, or else the last."""
    mask = np.ones(shape, np.int64)
    if inputs.setting == 0 and shape[-1] > 1:
        mask[-1, 0 if inputs.past else -1] = 0
    return mask


def _positions(inputs: Inputs, name: str, shape: list[int]) -> np.ndarray:
    return np.arange(inputs.past, inputs.past + shape[-1])


def _grid(inputs: Inputs, name: str, shape: list[int]) -> np.ndarray:
    """Return the grid of images of one frame of 4 by 4 patches."""
    return np.array([1, 4, 4])


def _coordinates(inputs: Inputs, name: str, shape: list[int]) -> np.ndarray:
    side = int(shape[1] ** 0.5)
    return np.stack(np.divmod(np.arange(shape[1]), side)[::-1], axis=-1)


def _lengths(inputs: Inputs, name: str, shape: list[int]) -> np.ndarray:
    """Return lengths of which all but the first are shorter."""
    lengths = np.full(shape, inputs.shapes["audio_signal"][1])
    lengths[1:] -= 8
    return lengths


def _tokens_in_slots(inputs: Inputs, name: str, shape: list[int]) -> np.ndarray:
    return np.full(shape, 4 + inputs.shapes["input_ids"][1])


_Make = Callable[[Inputs, str, list[int]], Any]

MAKERS: tuple[tuple[str, _Make], ...] = (
    ("(.*_)?attention_mask", _mask),
    ("(.*_)?input_ids|text_ids|targets", _tokens),
    ("pixel_position_ids", _coordinates),
    ("(q_)?position_ids", _positions),
    ("image_grid_thw|grid_thw", _grid),
    ("image_sizes", lambda inputs, name, shape: np.array([28, 28])),
    ("length", _lengths),
    ("cache_last_channel_len", lambda inputs, name, shape: np.full(shape, 4)),
    ("timestep", lambda inputs, name, shape: inputs.rng.integers(0, 1000, shape)),
    ("write_indices", lambda inputs, name, shape: np.full(shape, 4)),
    ("nonpad_kv_seqlen", _tokens_in_slots),
    ("codes|codec_ids|frame_codes", lambda inputs, name, shape: inputs.rng.integers(0, 16, shape)),
)
