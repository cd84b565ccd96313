"""Checks of the rotary settings and tables of gpt_attention: legal numbers in formulas, tables with all positions."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from ...ops.tensorrt_llm.settings import SCALINGS, Rotation
from .values import FLOAT32, check_array, check_integer, check_member, check_number, check_shape, refuse

_ROTATED = ("rope_gptj", "rope_gpt_neox", "long_rope", "yarn")
_IMPLIED = {"long_rope": "longrope", "yarn": "yarn"}
_POSITIVE = {
    "llama3": ("factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings"),
    "yarn": ("original_max_position_embeddings", "beta_fast", "beta_slow"),
}
_ORIGINAL = "rotary_embedding_original_max_positions"


def check_rotation(arguments: Mapping[str, Any], position: str, size: int) -> Rotation | None:
    """Return the settings of the rotation, or None if nothing is rotated; its other arguments are ignored then."""
    scaling = check_member("rotary_embedding_scale_type", arguments["rotary_embedding_scale_type"], SCALINGS)
    if scaling == "mrope":
        raise NotImplementedError("gpt_attention does not support rotary_embedding_scale_type mrope: use another.")
    dim = check_integer("rotary_embedding_dim", arguments["rotary_embedding_dim"])
    if position not in _ROTATED or dim == 0:
        return None
    if dim < 0 or dim % 2 or dim > size:
        refuse(
            "gpt_attention.rotary_dim_out_of_range",
            f"rotary_embedding_dim is {dim}, and a head has {size} channels",
            f"use an even number from 0 to {size}",
        )
    scaling = _IMPLIED.get(position, scaling)
    is_computed = any(_find_table(arguments, prefix) is None for prefix in _list_prefixes(scaling))
    if is_computed:
        check_number("rotary_embedding_base", arguments["rotary_embedding_base"], above=0)
    config = arguments["rope_scaling_config"]
    if config is not None and not isinstance(config, Mapping):
        refuse(
            "gpt_attention.scaling_config_not_a_mapping",
            f"rope_scaling_config is {config!r}",
            "give a dictionary, or None",
        )
    if scaling == "longrope":
        original = check_integer(_ORIGINAL, arguments[_ORIGINAL], 1)
        _check_longrope(arguments, config or {}, dim, original)
        return Rotation(dim=dim, scaling=scaling, original=original)
    if is_computed:
        _check_scaling(arguments, scaling, config or {})
    if scaling == "yarn" and arguments["rotary_cos_sin"] is None:
        _check_yarn(arguments, config or {}, is_computed)
    return Rotation(dim=dim, scaling=scaling, original=0)


def _list_prefixes(scaling: str) -> tuple[str, ...]:
    return ("", "long_rope_") if scaling == "longrope" else ("",)


def _find_table(arguments: Mapping[str, Any], prefix: str) -> str | None:
    """Return the name of the table that is used, or None if angles are computed."""
    for name in (f"{prefix}rotary_cos_sin", f"{prefix}rotary_inv_freq"):
        if arguments[name] is not None:
            return name
    return None


def _check_scaling(arguments: Mapping[str, Any], scaling: str, config: Mapping[str, Any]) -> None:
    """Check the numbers that computed frequencies are divided by, or are logarithms of."""
    for name in _POSITIVE.get(scaling, ()):
        if config.get(name) is not None:
            check_number(f"{name} of rope_scaling_config", config[name], above=0)
    if scaling in ("linear", "dynamic"):
        check_number("rotary_embedding_scale", arguments["rotary_embedding_scale"], above=0)
    if scaling == "dynamic":
        check_integer("rotary_embedding_max_positions", arguments["rotary_embedding_max_positions"], 1)


def _check_yarn(arguments: Mapping[str, Any], config: Mapping[str, Any], is_computed: bool) -> None:
    if config.get("factor") is not None:
        check_number("factor of rope_scaling_config", config["factor"], above=0)
    else:
        check_number("rotary_embedding_scale", arguments["rotary_embedding_scale"], above=0)
    for name in ("mscale", "mscale_all_dim"):
        if config.get(name) is not None:
            check_number(f"{name} of rope_scaling_config", config[name])
    if is_computed:
        check_number(
            "rotary_embedding_base, of which yarn takes the logarithm,", arguments["rotary_embedding_base"], above=1
        )
        if config.get("original_max_position_embeddings") is None:
            check_number(_ORIGINAL, arguments[_ORIGINAL], above=0)


def _check_longrope(arguments: Mapping[str, Any], config: Mapping[str, Any], dim: int, original: int) -> None:
    """Check the short and long factors, or the tables that replace them, for all lengths that sequences can reach."""
    longest = check_integer("rotary_embedding_max_positions", arguments["rotary_embedding_max_positions"], 1)
    for prefix, name in (("", "short"), ("long_rope_", "long")):
        m_scale = f"rotary_embedding_{name}_m_scale"
        if arguments[m_scale] is not None:
            check_number(m_scale, arguments[m_scale])
        elif original == 1 and longest > 1:
            refuse(
                "gpt_attention.m_scale_required",
                f"{_ORIGINAL} is 1, and {m_scale} is divided by its logarithm",
                f"give {m_scale}, or a greater number",
            )
        if _find_table(arguments, prefix) is not None:
            continue
        factors = config.get(f"{name}_factor")
        subject = f"{name}_factor of rope_scaling_config"
        if factors is None:
            refuse(
                "gpt_attention.longrope_factors_missing",
                f"{subject} is missing, and so are {prefix}rotary_inv_freq and {prefix}rotary_cos_sin",
                f"give one of them for sequences {'up to' if name == 'short' else 'beyond'} {_ORIGINAL}",
            )
        try:
            values = np.asarray(factors, np.float64)
        except (TypeError, ValueError):
            refuse(
                "gpt_attention.longrope_factors_not_numbers", f"{subject} is {factors!r}", f"give {dim // 2} numbers"
            )
        if values.shape != (dim // 2,):
            refuse(
                "gpt_attention.longrope_factor_count_mismatch",
                f"{subject} has the shape {values.shape}",
                f"give {dim // 2} numbers, one for each pair of rotated dimensions",
            )
        if not (np.isfinite(values) & (values > 0)).all():
            refuse(
                "gpt_attention.longrope_factor_not_positive",
                f"{subject} contains {values[~(values > 0) | ~np.isfinite(values)][0]}",
                "give numbers greater than 0",
            )


def check_angle_tables(arguments: Mapping[str, Any], rotation: Rotation) -> None:
    """Check shapes and types of the tables that are used."""
    for prefix in _list_prefixes(rotation.scaling):
        name = _find_table(arguments, prefix)
        if name is None:
            continue
        if name.endswith("inv_freq"):
            check_shape(name, arguments[name], FLOAT32, (rotation.dim // 2,), "half of rotary_embedding_dim")
        elif check_array(name, arguments[name], FLOAT32).size % rotation.dim:
            refuse(
                "gpt_attention.angle_table_size_mismatch",
                f"{name} has {arguments[name].size} elements",
                f"make them a multiple of rotary_embedding_dim, {rotation.dim}: a cosine and a sine for each position "
                f"and pair of dimensions",
            )
