"""Rotary position embeddings of gpt_attention in float64, written from the description alone, as loops and formulas.

Names and rules are those of TensorRT-LLM's `gpt_attention`: the plain frequencies, five ways to scale them, and tables
that replace them. Nothing here shares code with the library.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from tests.serving.gpt_attention.gpt_cache_reference import Call

POSITION_TYPES = (
    "learned_absolute", "rope_gptj", "rope_gpt_neox", "long_rope", "alibi", "alibi_with_scale", "relative", "chatglm",
    "yarn", "mrope",
)  # fmt: skip
SCALE_TYPES = ("none", "linear", "dynamic", "longrope", "llama3", "yarn", "mrope")
ROTARY = ("rope_gptj", "rope_gpt_neox", "long_rope", "yarn")
IMPLIED = {"long_rope": "longrope", "yarn": "yarn"}

ANGLE_ERROR = 2.0**-21  # the error of an angle in a float32 implementation, relative to the angle
MATMUL_ERROR = 2.0**-22  # an additional error of a rotated value, relative to both elements of the pair


def find_name(value: Any, names: Sequence[str]) -> str:
    """Return the name of a value that is a number or the name itself."""
    if isinstance(value, str):
        assert value in names, value
        return value
    return names[int(value)]


def compute_plain_frequencies(base: float, dim: int) -> np.ndarray:
    """Return 1 / base^(2k/dim) for k = 0..dim/2-1, float64 (dim/2)."""
    return np.array([base ** (-2.0 * k / dim) for k in range(dim // 2)], np.float64)


def compute_dynamic_base(base: float, dim: int, scale: float, length: int, max_positions: int) -> float:
    """Return the base of dynamic scaling: larger if the sequence exceeds max_positions."""
    if length <= max_positions or dim == 2:
        return base
    return base * ((scale * length / max_positions) - (scale - 1)) ** (dim / (dim - 2))


def compute_llama3_frequencies(
    base: float, dim: int, factor: float = 8.0, low: float = 1.0, high: float = 4.0, original: float = 8192
) -> np.ndarray:
    """Divide long waves by factor, leave short ones as they are, with a linear blend between."""
    result = compute_plain_frequencies(base, dim)
    for k, inverse in enumerate(result):
        wave = 2 * math.pi / inverse
        if wave < original / high:
            continue
        if wave > original / low:
            result[k] = inverse / factor
        else:
            blend = (original / wave - low) / (high - low)
            result[k] = (1 - blend) * inverse / factor + blend * inverse
    return result


def compute_yarn_frequencies(
    base: float, dim: int, factor: float, original: float, beta_fast: float = 32, beta_slow: float = 1
) -> np.ndarray:
    """Return a ramp over k from the plain frequencies to those divided by factor."""

    def bound(rotations: float) -> float:
        return dim * math.log(original / (rotations * 2 * math.pi)) / (2 * math.log(base))

    lower = float(min(max(math.floor(bound(beta_fast)), 0), dim - 1))
    upper = float(min(max(math.ceil(bound(beta_slow)), 0), dim - 1))
    if lower == upper:
        upper += 0.001
    result = compute_plain_frequencies(base, dim)
    for k, inverse in enumerate(result):
        ramp = min(max((k - lower) / (upper - lower), 0.0), 1.0)
        result[k] = inverse * (1 - ramp) + inverse / factor * ramp
    return result


def compute_yarn_m_scale(factor: float, mscale: float = 1.0, mscale_all_dim: float = 0.0) -> float:
    """Return the factor of cos and sin of yarn."""

    def scale(times: float) -> float:
        return 1.0 if factor <= 1 else 0.1 * times * math.log(factor) + 1.0

    return scale(mscale) / scale(mscale_all_dim)


def compute_longrope_m_scale(max_positions: int, original: int) -> float:
    """Return the default factor of cos and sin of longrope."""
    if max_positions <= original:
        return 1.0
    return math.sqrt(1 + math.log(max_positions / original) / math.log(original))


@dataclass(frozen=True)
class Rotation:
    """The rotation of one request in one call.

    Either `table`, float64 (positions, dim/2, 2) of cos and sin, or `inverse`, float64 (dim/2), with m_scale.
    """

    dim: int
    adjacent: bool  # pairs (2k, 2k+1); else (k, k + dim/2)
    inverse: np.ndarray | None
    m_scale: float = 1.0
    table: np.ndarray | None = None

    def rotate(self, values: np.ndarray, position: int) -> tuple[np.ndarray, np.ndarray]:
        """Rotate float32 values (heads, D) to a position; return float64 (heads, D) and the error of float32."""
        result = values.astype(np.float64)
        error = np.zeros_like(result)
        half = self.dim // 2
        for k in range(half):
            first, second = (2 * k, 2 * k + 1) if self.adjacent else (k, k + half)
            slack = MATMUL_ERROR
            if self.table is not None:
                cos, sin = float(self.table[position, k, 0]), float(self.table[position, k, 1])
                largest = max(abs(cos), abs(sin))
            else:
                assert self.inverse is not None
                angle = position * float(self.inverse[k])
                cos, sin = self.m_scale * math.cos(angle), self.m_scale * math.sin(angle)
                largest = abs(self.m_scale)
                slack += ANGLE_ERROR * abs(angle)
            x, y = values[:, first].astype(np.float64), values[:, second].astype(np.float64)
            result[:, first] = x * cos - y * sin
            result[:, second] = x * sin + y * cos
            error[:, first] = error[:, second] = (np.abs(x) + np.abs(y)) * largest * slack
        return result, error


def _read_config(call: Call, key: str, default: Any) -> Any:
    value = (call.rope_scaling_config or {}).get(key)
    return default if value is None else value


def _compute_frequencies(call: Call, scaling: str, length: int) -> np.ndarray:
    base, dim = float(call.rotary_embedding_base), int(call.rotary_embedding_dim)
    scale, original = call.rotary_embedding_scale, call.rotary_embedding_original_max_positions
    if scaling == "linear":
        return compute_plain_frequencies(base, dim) / scale
    if scaling == "dynamic":
        return compute_plain_frequencies(
            compute_dynamic_base(base, dim, scale, length, call.rotary_embedding_max_positions), dim
        )
    if scaling == "llama3":
        return compute_llama3_frequencies(
            base,
            dim,
            _read_config(call, "factor", 8.0),
            _read_config(call, "low_freq_factor", 1.0),
            _read_config(call, "high_freq_factor", 4.0),
            _read_config(call, "original_max_position_embeddings", 8192),
        )
    if scaling == "yarn":
        return compute_yarn_frequencies(
            base,
            dim,
            _read_config(call, "factor", scale),
            _read_config(call, "original_max_position_embeddings", original),
            _read_config(call, "beta_fast", 32),
            _read_config(call, "beta_slow", 1),
        )
    if scaling == "longrope":
        name = "short_factor" if length <= original else "long_factor"
        factors = np.asarray(_read_config(call, name, None), np.float64)
        assert factors.shape == (dim // 2,)
        return compute_plain_frequencies(base, dim) / factors
    assert scaling == "none", scaling
    return compute_plain_frequencies(base, dim)


def _compute_m_scale(call: Call, scaling: str, length: int) -> float:
    if scaling == "yarn":
        return compute_yarn_m_scale(
            _read_config(call, "factor", call.rotary_embedding_scale),
            _read_config(call, "mscale", 1.0),
            _read_config(call, "mscale_all_dim", 0.0),
        )
    if scaling == "longrope":
        original = call.rotary_embedding_original_max_positions
        short, long = call.rotary_embedding_short_m_scale, call.rotary_embedding_long_m_scale
        m_scale = short if length <= original else long
        if m_scale is None:
            return compute_longrope_m_scale(call.rotary_embedding_max_positions, original)
        return float(m_scale)
    return 1.0


def make_rotation(call: Call, length: int) -> Rotation | None:
    """Return the rotation of a request of this length (as dynamic and longrope count it), None without rotation."""
    position_type = find_name(call.position_embedding_type, POSITION_TYPES)
    dim = int(call.rotary_embedding_dim)
    if position_type not in ROTARY or dim == 0:
        return None
    scaling = IMPLIED.get(position_type) or find_name(call.rotary_embedding_scale_type, SCALE_TYPES)
    table, inverse = call.rotary_cos_sin, call.rotary_inv_freq
    if scaling == "longrope" and length > call.rotary_embedding_original_max_positions:
        table, inverse = call.long_rope_rotary_cos_sin, call.long_rope_rotary_inv_freq
    adjacent = position_type == "rope_gptj"
    if table is not None:
        return Rotation(dim, adjacent, None, table=np.asarray(table, np.float64).reshape(-1, dim // 2, 2))
    if inverse is not None:
        frequencies = np.asarray(inverse, np.float64).reshape(-1)
        assert frequencies.shape == (dim // 2,)
    else:
        frequencies = _compute_frequencies(call, scaling, length)
    return Rotation(dim, adjacent, frequencies, _compute_m_scale(call, scaling, length))
