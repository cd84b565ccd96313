"""The rotary settings and tables of gpt_attention: numbers that formulas can take, tables for every position."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from ...ops.tensorrt_llm.settings import SCALINGS
from .rows import Requests
from .values import FLOAT32, array, first, integer, member, number, refuse, shaped

_ROTATED = ("rope_gptj", "rope_gpt_neox", "long_rope", "yarn")
_IMPLIED = {"long_rope": "longrope", "yarn": "yarn"}
_POSITIVE = {
    "llama3": ("factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings"),
    "yarn": ("original_max_position_embeddings", "beta_fast", "beta_slow"),
}
_ORIGINAL = "rotary_embedding_original_max_positions"


@dataclass(frozen=True)
class Rotation:
    dim: int
    scaling: str
    original: int  # longrope: sequences beyond it use the long factors and tables


@dataclass(frozen=True)
class Angles:
    """How many positions rotary_cos_sin has, and long_rope_rotary_cos_sin; None where it is not read."""

    short: int | None
    long: int | None


def rotation_of(arguments: Mapping[str, Any], position: str, size: int) -> Rotation | None:
    """None where nothing is rotated; the other arguments of the rotation mean nothing then."""
    scaling = member("rotary_embedding_scale_type", arguments["rotary_embedding_scale_type"], SCALINGS)
    if scaling == "mrope":
        raise NotImplementedError("gpt_attention does not support rotary_embedding_scale_type mrope: use another.")
    dim = integer("rotary_embedding_dim", arguments["rotary_embedding_dim"])
    if position not in _ROTATED or dim == 0:
        return None
    if dim < 0 or dim % 2 or dim > size:
        refuse(f"rotary_embedding_dim is {dim}, and a head has {size} channels", f"use an even number from 0 to {size}")
    scaling = _IMPLIED.get(position, scaling)
    computed = any(_source(arguments, prefix) is None for prefix in _prefixes(scaling))
    if computed:
        number("rotary_embedding_base", arguments["rotary_embedding_base"], above=0)
    config = arguments["rope_scaling_config"]
    if config is not None and not isinstance(config, Mapping):
        refuse(f"rope_scaling_config is {config!r}", "give a dictionary, or None")
    if scaling == "longrope":
        original = integer(_ORIGINAL, arguments[_ORIGINAL], 1)
        _longrope(arguments, config or {}, dim, original)
        return Rotation(dim, scaling, original)
    if computed:
        _scaling(arguments, scaling, config or {})
    if scaling == "yarn" and arguments["rotary_cos_sin"] is None:
        _yarn(arguments, config or {}, computed)
    return Rotation(dim, scaling, 0)


def _prefixes(scaling: str) -> tuple[str, ...]:
    return ("", "long_rope_") if scaling == "longrope" else ("",)


def _source(arguments: Mapping[str, Any], prefix: str) -> str | None:
    """The table that is used; None: angles are computed."""
    for name in (f"{prefix}rotary_cos_sin", f"{prefix}rotary_inv_freq"):
        if arguments[name] is not None:
            return name
    return None


def _scaling(arguments: Mapping[str, Any], scaling: str, config: Mapping[str, Any]) -> None:
    """What computed frequencies are divided by, or are logarithms of."""
    for name in _POSITIVE.get(scaling, ()):
        if config.get(name) is not None:
            number(f"{name} of rope_scaling_config", config[name], above=0)
    if scaling in ("linear", "dynamic"):
        number("rotary_embedding_scale", arguments["rotary_embedding_scale"], above=0)
    if scaling == "dynamic":
        integer("rotary_embedding_max_positions", arguments["rotary_embedding_max_positions"], 1)


def _yarn(arguments: Mapping[str, Any], config: Mapping[str, Any], computed: bool) -> None:
    if config.get("factor") is not None:
        number("factor of rope_scaling_config", config["factor"], above=0)
    else:
        number("rotary_embedding_scale", arguments["rotary_embedding_scale"], above=0)
    for name in ("mscale", "mscale_all_dim"):
        if config.get(name) is not None:
            number(f"{name} of rope_scaling_config", config[name])
    if computed:
        number("rotary_embedding_base, of which yarn takes the logarithm,", arguments["rotary_embedding_base"], above=1)
        if config.get("original_max_position_embeddings") is None:
            number(_ORIGINAL, arguments[_ORIGINAL], above=0)


def _longrope(arguments: Mapping[str, Any], config: Mapping[str, Any], dim: int, original: int) -> None:
    """Short and long factors, or tables in their place: sequences grow from one length to the other."""
    longest = integer("rotary_embedding_max_positions", arguments["rotary_embedding_max_positions"], 1)
    for prefix, name in (("", "short"), ("long_rope_", "long")):
        m_scale = f"rotary_embedding_{name}_m_scale"
        if arguments[m_scale] is not None:
            number(m_scale, arguments[m_scale])
        elif original == 1 and longest > 1:
            refuse(
                f"{_ORIGINAL} is 1, and {m_scale} is divided by its logarithm", f"give {m_scale}, or a greater number"
            )
        if _source(arguments, prefix) is not None:
            continue
        factors = config.get(f"{name}_factor")
        what = f"{name}_factor of rope_scaling_config"
        if factors is None:
            refuse(
                f"{what} is missing, and so are {prefix}rotary_inv_freq and {prefix}rotary_cos_sin",
                f"give one of them for sequences {'up to' if name == 'short' else 'beyond'} {_ORIGINAL}",
            )
        try:
            values = np.asarray(factors, np.float64)
        except (TypeError, ValueError):
            refuse(f"{what} is {factors!r}", f"give {dim // 2} numbers")
        if values.shape != (dim // 2,):
            refuse(
                f"{what} has the shape {values.shape}",
                f"give {dim // 2} numbers, one for each pair of dimensions turned",
            )
        if not (np.isfinite(values) & (values > 0)).all():
            refuse(f"{what} holds {values[~(values > 0) | ~np.isfinite(values)][0]}", "give numbers greater than 0")


def angles_of(arguments: Mapping[str, Any], rotation: Rotation) -> Angles:
    """Checks shapes and types of the tables that are used."""
    found: dict[str, int | None] = {"": None, "long_rope_": None}
    for prefix in _prefixes(rotation.scaling):
        name = _source(arguments, prefix)
        if name is None:
            continue
        if name.endswith("inv_freq"):
            shaped(name, arguments[name], FLOAT32, (rotation.dim // 2,), "half of rotary_embedding_dim")
            continue
        table = array(name, arguments[name], FLOAT32)
        if table.size % rotation.dim:
            refuse(
                f"{name} has {table.size} elements",
                f"make them a multiple of rotary_embedding_dim, {rotation.dim}: a cosine and a sine for each position "
                f"and pair of dimensions",
            )
        found[prefix] = table.size // rotation.dim
    return Angles(found[""], found["long_rope_"])


def check_positions(rotation: Rotation, angles: Angles, requests: Requests) -> None:
    """The tables have the positions of all requests."""
    reach, longest = requests.reach, requests.longest_reach
    if longest <= min(longest if some is None else some for some in (angles.short, angles.long)):
        return
    beyond = np.zeros(len(reach), bool)
    if rotation.scaling == "longrope":
        beyond = requests.turned_length > rotation.original
    for name, positions, users in (
        ("rotary_cos_sin", angles.short, ~beyond),
        ("long_rope_rotary_cos_sin", angles.long, beyond),
    ):
        if positions is not None and (wrong := users & (reach > positions)).any():
            b = first(wrong)
            refuse(
                f"{name} has {positions} positions, and request {b} needs position {reach[b] - 1}",
                f"give a table of at least {reach[b]} positions",
            )
