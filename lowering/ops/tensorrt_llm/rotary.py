"""Cosine and sine by row: the angles of rotary embeddings, under all of TensorRT-LLM's scalings."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
from tvm import tirx
from tvm.ir import Expr

from ...attention.parameters import int64
from ...importing.node import Node
from ...importing.values import Value, prod
from ..asserted import asserted
from ..kernels import compute
from .requests import Requests, at_least_one
from .settings import RotarySettings, Settings

Read = Callable[..., Any]


def angles(node: Node, settings: Settings, given: Mapping[str, Value], requests: Requests) -> Value:
    """float32 [rows, dim / 2, 2], by source row."""
    rotary = settings.rotary
    assert rotary is not None
    position, length = requests["position"], _lengths(node, settings, requests)
    return angles_at(node, settings, given, position, requests["sequence"], length, requests.rows)


def angles_at(
    node: Node,
    settings: Settings,
    given: Mapping[str, Value],
    position: Value,
    sequence: Value,
    length: Value,
    rows: Any,
) -> Value:
    """float32 [rows, dim / 2, 2], of rows at these positions of these sequences, which have lengths [sequences]."""
    rotary = settings.rotary
    assert rotary is not None
    half = rotary.dim // 2
    tables = {name: _table(node, given[name], name, half) for name in tables_of_angles(rotary, given)}
    constants = {} if "rotary_cos_sin" in tables or "rotary_inv_freq" in tables else _frequencies(node, rotary)
    arrays = {**tables, **{name: node.constant(x) for name, x in constants.items()}}
    names = list(arrays)

    sizes = [array.shape[0] for array in arrays.values()]

    def element(index: tuple[Expr, ...], position: Read, sequence: Read, length: Read, *given: Any) -> Expr:
        n, k, side = index
        read, total = dict(zip(names, given)), length(sequence(n))
        extents = dict(zip(names, given[len(names) :]))
        long = total > int64(rotary.original)
        pick = _Picked(rotary, read, long)
        if "rotary_cos_sin" in read:
            table = "rotary_cos_sin"
            return pick.of(table, lambda t, name: t(_nearest(position(n), extents[name]), k, side))
        if "rotary_inv_freq" in read:
            frequency = pick.of("rotary_inv_freq", lambda t, _: t(k))
        elif rotary.scaling == "dynamic":
            frequency = _dynamic(rotary, total, k)
        else:
            frequency = pick.of("frequencies", lambda t, _: t(k))
        angle = position(n).astype("float32") * frequency
        short, other = _m_scales(rotary)
        scale = tirx.Select(long, _float(other), _float(short)) if short != other else _float(short)
        return tirx.if_then_else(tirx.EQ(side, int64(0)), tirx.cos(angle), tirx.sin(angle)) * scale

    tensors = [position, sequence, length, *arrays.values()]
    return compute(node, "angles", element, tensors, (rows, half, 2), sizes, dtype="float32")


class _Picked:
    """Under longrope each table has two forms, by the length of the sequence."""

    def __init__(self, rotary: RotarySettings, read: Mapping[str, Read], long: Expr) -> None:
        self.read, self.long = read, long if rotary.scaling == "longrope" else None

    def of(self, name: str, element: Callable[[Read, str], Expr]) -> Expr:
        other = f"long_rope_{name}"
        if self.long is None or other not in self.read:
            return element(self.read[name], name)
        return tirx.if_then_else(self.long, element(self.read[other], other), element(self.read[name], name))


def tables_of_angles(rotary: RotarySettings, given: Mapping[str, Value]) -> list[str]:
    """Which tables are used: cosines and sines before frequencies, and both before what is computed."""
    for name in ("rotary_cos_sin", "rotary_inv_freq"):
        if name in given:
            other = f"long_rope_{name}"
            return [name, *([other] if rotary.scaling == "longrope" and other in given else [])]
    return []


def _table(node: Node, value: Value, name: str, half: int) -> Value:
    if value.dtype != "float32":
        raise node.error(f"{name} is {value.dtype}.", "Make it float32.")
    if name.endswith("inv_freq"):
        return asserted(node, node.reshaped(value, (half,)) if value.rank != 1 else value, (half,))
    if value.rank == 3:
        value = asserted(node, value, (value.shape[0], half, 2))
    else:
        value = node.reshaped(value, (node.simplify(prod(value.shape) // (2 * half)), half, 2))
    return at_least_one(node, name, value, 0)


def _frequencies(node: Node, rotary: RotarySettings) -> dict[str, np.ndarray]:
    """float32 [dim / 2] by name, for the scalings that do not depend on the data."""
    half = rotary.dim // 2
    plain = 1.0 / rotary.base ** (np.arange(half) * 2.0 / rotary.dim)
    config = rotary.config
    if rotary.scaling == "linear":
        found = {"frequencies": plain / rotary.scale}
    elif rotary.scaling == "llama3":
        found = {"frequencies": _llama3(plain, config)}
    elif rotary.scaling == "yarn":
        found = {"frequencies": _yarn(rotary, plain)}
    elif rotary.scaling == "longrope":
        found = {}
        for name, key in (("frequencies", "short_factor"), ("long_rope_frequencies", "long_factor")):
            factors = np.asarray(config.get(key, np.ones(half)), np.float64)
            if factors.shape != (half,):
                raise node.error(
                    f"attribute rope_scaling_config has {factors.size} numbers in {key}, for {half} angles.",
                    "Give as many as half of rotary_embedding_dim.",
                )
            found[name] = plain / factors
    elif rotary.scaling == "dynamic":
        return {}
    else:
        found = {"frequencies": plain}
    return {name: x.astype(np.float32) for name, x in found.items()}


def _llama3(plain: np.ndarray, config: Mapping[str, Any]) -> np.ndarray:
    factor, low, high = (float(config.get(k, v)) for k, v in
                         (("factor", 8.0), ("low_freq_factor", 1.0), ("high_freq_factor", 4.0)))  # fmt: skip
    old = float(config.get("original_max_position_embeddings", 8192))
    wavelength = 2 * math.pi / plain
    if high == low:
        return np.where(wavelength < old / high, plain, plain / factor)
    smooth = (old / wavelength - low) / (high - low)
    between = (1 - smooth) * plain / factor + smooth * plain
    return np.where(wavelength < old / high, plain, np.where(wavelength > old / low, plain / factor, between))


def _yarn(rotary: RotarySettings, plain: np.ndarray) -> np.ndarray:
    """NTK-by-parts (arXiv:2309.00071): a ramp between frequencies that are kept and those that are divided."""
    factor, original = _yarn_scale(rotary)
    bounds = []
    for name, default, end in (("beta_fast", 32.0, math.floor), ("beta_slow", 1.0, math.ceil)):
        turns = float(rotary.config.get(name, default))
        bounds.append(end(rotary.dim * math.log(original / (turns * 2 * math.pi)) / (2 * math.log(rotary.base))))
    low, high = max(bounds[0], 0), float(min(bounds[1], rotary.dim - 1))
    high = high + 0.001 if low == high else high
    ramp = np.clip((np.arange(len(plain)) - low) / (high - low), 0, 1)
    return plain / factor * ramp + plain * (1 - ramp)


def _yarn_scale(rotary: RotarySettings) -> tuple[float, float]:
    """How many times as long, and what length that is of."""
    original = rotary.config.get("original_max_position_embeddings", rotary.original)
    return float(rotary.config.get("factor", rotary.scale)), float(original)


def _m_scales(rotary: RotarySettings) -> tuple[float, float]:
    """What cosine and sine are multiplied by, for short and for long sequences."""
    if rotary.scaling == "longrope":
        return rotary.m_scales
    if rotary.scaling != "yarn":
        return 1.0, 1.0
    factor, _ = _yarn_scale(rotary)

    def m_scale(m: float) -> float:
        return 0.1 * m * math.log(factor) + 1 if factor > 1 else 1.0

    config = rotary.config
    scale = m_scale(float(config.get("mscale", 1.0))) / m_scale(float(config.get("mscale_all_dim", 0.0)))
    return scale, scale


def _dynamic(rotary: RotarySettings, length: Expr, k: Expr) -> Expr:
    """The frequency for sequences of that length: beyond max_positions the base grows."""
    s, most, dim = rotary.scale, rotary.max_positions, rotary.dim

    def double(x: float) -> Expr:
        return tirx.const(float(x), "float64")

    grown = double(rotary.base)
    if dim > 2:
        stretch = length.astype("float64") * double(s / most) - double(s - 1)
        grown = grown * tirx.exp(tirx.log(tirx.max(stretch, double(1e-9))) * double(dim / (dim - 2)))
    base = tirx.Select(length > int64(most), grown, double(rotary.base))
    return tirx.exp(tirx.log(base) * k.astype("float64") * double(-2 / dim)).astype("float32")


def _lengths(node: Node, settings: Settings, requests: Requests) -> Value:
    """The length that scalings go by: that behind the call; without the new token of generation as TensorRT-LLM's
    kernels have it."""
    rotary = settings.rotary
    if not settings.compatible or rotary is None or rotary.scaling != "dynamic":
        return requests["lengths"]

    def element(index: tuple[Expr, ...], length: Read, context: Read) -> Expr:
        return length(*index) - (int64(1) - context(*index))

    return compute(
        node, "lengths", element, [requests["lengths"], requests["context"]], (requests.sequences,), dtype="int64"
    )


def _nearest(index: Expr, size: Any) -> Expr:
    return tirx.max(tirx.min(index, size - int64(1)), int64(0))


def _float(value: float) -> Expr:
    return tirx.const(float(value), "float32")
