"""Cosine and sine by row: the angles of rotary embeddings, for all of TensorRT-LLM's scalings."""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Mapping
from typing import Any

import numpy as np
from tvm import tirx
from tvm.ir import Expr

from ...attention.codegen.parameters import int64
from ...importing.node import Node
from ...importing.values import Value, prod
from ..helpers.assertions import assert_shape
from ..helpers.kernels import compute
from ..helpers.requirements import require_dtype
from .requests import GptRequests, require_nonempty
from .settings import GptSettings, RotarySettings

Read = Callable[..., Any]


def compute_angles(node: Node, settings: GptSettings, inputs: Mapping[str, Value], requests: GptRequests) -> Value:
    """Return float32 [rows, dim / 2, 2], the cosine and sine by source row."""
    rotary = settings.rotary
    assert rotary is not None
    position, length = requests["position"], _compute_lengths(node, settings, requests)
    return compute_angles_at(node, settings, inputs, position, requests["sequence"], length, requests.rows)


def compute_angles_at(
    node: Node,
    settings: GptSettings,
    inputs: Mapping[str, Value],
    position: Value,
    sequence: Value,
    length: Value,
    rows: Any,
) -> Value:
    """Return float32 [rows, dim / 2, 2] of rows at these positions of sequences with lengths [sequences]."""
    rotary = settings.rotary
    assert rotary is not None
    half = rotary.dim // 2
    tables = {name: _read_table(node, inputs[name], name, half) for name in list_angle_tables(rotary.scaling, inputs)}
    constants = {} if "rotary_cos_sin" in tables or "rotary_inv_freq" in tables else _compute_frequencies(node, rotary)
    arrays = {**tables, **{name: node.constant(x) for name, x in constants.items()}}
    names = list(arrays)

    sizes = [array.shape[0] for array in arrays.values()]

    def element(index: tuple[Expr, ...], position: Read, sequence: Read, length: Read, *operands: Any) -> Expr:
        n, k, side = index
        reads, total = dict(zip(names, operands)), length(sequence(n))
        extents = dict(zip(names, operands[len(names) :]))
        is_long = total > int64(rotary.original)
        chooser = _LongRopeChooser(rotary, reads, is_long)
        if "rotary_cos_sin" in reads:
            table = "rotary_cos_sin"
            return chooser.choose(table, lambda t, name: t(_clamp(position(n), extents[name]), k, side))
        if "rotary_inv_freq" in reads:
            frequency = chooser.choose("rotary_inv_freq", lambda t, _: t(k))
        elif rotary.scaling == "dynamic":
            frequency = _emit_dynamic_frequency(rotary, total, k)
        else:
            frequency = chooser.choose("frequencies", lambda t, _: t(k))
        angle = position(n).astype("float32") * frequency
        short_scale, long_scale = _compute_m_scales(rotary)
        scale = (
            tirx.Select(is_long, _float32(long_scale), _float32(short_scale))
            if short_scale != long_scale
            else _float32(short_scale)
        )
        return tirx.if_then_else(tirx.EQ(side, int64(0)), tirx.cos(angle), tirx.sin(angle)) * scale

    tensors = [position, sequence, length, *arrays.values()]
    return compute(node, "angles", element, tensors, (rows, half, 2), sizes, dtype="float32")


class _LongRopeChooser:
    """A choice between the two forms of a table under longrope, by the length of the sequence."""

    def __init__(self, rotary: RotarySettings, read: Mapping[str, Read], is_long: Expr) -> None:
        self.read, self.is_long = read, is_long if rotary.scaling == "longrope" else None

    def choose(self, name: str, element: Callable[[Read, str], Expr]) -> Expr:
        long_name = f"long_rope_{name}"
        if self.is_long is None or long_name not in self.read:
            return element(self.read[name], name)
        return tirx.if_then_else(self.is_long, element(self.read[long_name], long_name), element(self.read[name], name))


def list_angle_tables(scaling: str, inputs: Collection[str]) -> list[str]:
    """Return the names of the tables that are used.

    Tables of cosines and sines are preferred to frequencies, and both to computed angles.
    """
    for name in ("rotary_cos_sin", "rotary_inv_freq"):
        if name in inputs:
            long_name = f"long_rope_{name}"
            return [name, *([long_name] if scaling == "longrope" and long_name in inputs else [])]
    return []


def _read_table(node: Node, value: Value, name: str, half: int) -> Value:
    require_dtype(node, name, value, "float32")
    if name.endswith("inv_freq"):
        return assert_shape(node, node.reshape_to(value, (half,)) if value.rank != 1 else value, (half,))
    if value.rank == 3:
        value = assert_shape(node, value, (value.shape[0], half, 2))
    else:
        value = node.reshape_to(value, (node.simplify(prod(value.shape) // (2 * half)), half, 2))
    return require_nonempty(node, name, value, 0)


def _compute_frequencies(node: Node, rotary: RotarySettings) -> dict[str, np.ndarray]:
    """Return float32 [dim / 2] by name, for the scalings that do not depend on the data."""
    half = rotary.dim // 2
    plain = 1.0 / rotary.base ** (np.arange(half) * 2.0 / rotary.dim)
    config = rotary.config
    if rotary.scaling == "linear":
        frequencies = {"frequencies": plain / rotary.scale}
    elif rotary.scaling == "llama3":
        frequencies = {"frequencies": _scale_llama3(plain, config)}
    elif rotary.scaling == "yarn":
        frequencies = {"frequencies": _scale_yarn(rotary, plain)}
    elif rotary.scaling == "longrope":
        frequencies = {}
        for name, key in (("frequencies", "short_factor"), ("long_rope_frequencies", "long_factor")):
            factors = np.asarray(config.get(key, np.ones(half)), np.float64)
            if factors.shape != (half,):
                raise node.error(
                    "gpt_attention.rope_factors_mismatch",
                    f"attribute rope_scaling_config has {factors.size} numbers in {key}, for {half} angles.",
                    "Give half as many as rotary_embedding_dim.",
                )
            frequencies[name] = plain / factors
    elif rotary.scaling == "dynamic":
        return {}
    else:
        frequencies = {"frequencies": plain}
    return {name: x.astype(np.float32) for name, x in frequencies.items()}


def _scale_llama3(plain: np.ndarray, config: Mapping[str, Any]) -> np.ndarray:
    factor, low, high = (float(config.get(k, v)) for k, v in
                         (("factor", 8.0), ("low_freq_factor", 1.0), ("high_freq_factor", 4.0)))  # fmt: skip
    old = float(config.get("original_max_position_embeddings", 8192))
    wavelength = 2 * math.pi / plain
    if high == low:
        return np.where(wavelength < old / high, plain, plain / factor)
    smooth = (old / wavelength - low) / (high - low)
    between = (1 - smooth) * plain / factor + smooth * plain
    return np.where(wavelength < old / high, plain, np.where(wavelength > old / low, plain / factor, between))


def _scale_yarn(rotary: RotarySettings, plain: np.ndarray) -> np.ndarray:
    """Return NTK-by-parts frequencies (arXiv:2309.00071): a ramp between unscaled and divided frequencies."""
    factor, original = _read_yarn_scale(rotary)
    bounds = []
    for name, default, end in (("beta_fast", 32.0, math.floor), ("beta_slow", 1.0, math.ceil)):
        rotations = float(rotary.config.get(name, default))
        bounds.append(end(rotary.dim * math.log(original / (rotations * 2 * math.pi)) / (2 * math.log(rotary.base))))
    low, high = max(bounds[0], 0), float(min(bounds[1], rotary.dim - 1))
    high = high + 0.001 if low == high else high
    ramp = np.clip((np.arange(len(plain)) - low) / (high - low), 0, 1)
    return plain / factor * ramp + plain * (1 - ramp)


def _read_yarn_scale(rotary: RotarySettings) -> tuple[float, float]:
    """Return the factor by which sequences are longer, and the original length."""
    original = rotary.config.get("original_max_position_embeddings", rotary.original)
    return float(rotary.config.get("factor", rotary.scale)), float(original)


def _compute_m_scales(rotary: RotarySettings) -> tuple[float, float]:
    """Return the factors of cosine and sine, for short and for long sequences."""
    if rotary.scaling == "longrope":
        return rotary.m_scales
    if rotary.scaling != "yarn":
        return 1.0, 1.0
    factor, _ = _read_yarn_scale(rotary)

    def m_scale(m: float) -> float:
        return 0.1 * m * math.log(factor) + 1 if factor > 1 else 1.0

    config = rotary.config
    scale = m_scale(float(config.get("mscale", 1.0))) / m_scale(float(config.get("mscale_all_dim", 0.0)))
    return scale, scale


def _emit_dynamic_frequency(rotary: RotarySettings, length: Expr, k: Expr) -> Expr:
    """Return the frequency for sequences of this length: beyond max_positions the base grows."""
    s, max_positions, dim = rotary.scale, rotary.max_positions, rotary.dim

    def double(x: float) -> Expr:
        return tirx.const(float(x), "float64")

    scaled_base = double(rotary.base)
    if dim > 2:
        stretch = length.astype("float64") * double(s / max_positions) - double(s - 1)
        scaled_base = scaled_base * tirx.exp(tirx.log(tirx.max(stretch, double(1e-9))) * double(dim / (dim - 2)))
    base = tirx.Select(length > int64(max_positions), scaled_base, double(rotary.base))
    return tirx.exp(tirx.log(base) * k.astype("float64") * double(-2 / dim)).astype("float32")


def _compute_lengths(node: Node, settings: GptSettings, requests: GptRequests) -> Value:
    """Return the lengths that scalings depend on, those after the call.

    If is_trt_compatible is set, dynamic scaling leaves out the new token of generation, as TensorRT-LLM's kernels do.
    """
    rotary = settings.rotary
    if not settings.is_trt_compatible or rotary is None or rotary.scaling != "dynamic":
        return requests["lengths"]

    def element(index: tuple[Expr, ...], length: Read, context: Read) -> Expr:
        return length(*index) - (int64(1) - context(*index))

    return compute(
        node, "lengths", element, [requests["lengths"], requests["context"]], (requests.sequences,), dtype="int64"
    )


def _clamp(index: Expr, size: Any) -> Expr:
    return tirx.max(tirx.min(index, size - int64(1)), int64(0))


def _float32(value: float) -> Expr:
    return tirx.const(float(value), "float32")
