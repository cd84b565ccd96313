"""Artifacts of FlexAttention, each with a score_mod and a mask_mod, with a block mask and without."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from pathlib import Path

import numpy as np

from lowering import flex

from ..host.mods import captures, mods
from ..plan import Program
from .folders import make_empty

NAMES = ("causal", "window", "documents", "alibi", "softcap")
BLOCKED = ("causal", "documents")
"""Those that have a block mask as well."""

SHAPE = (2, 16, 8192, 128)


def write(
    folder: Path,
    target: str,
    *,
    names: Sequence[str] = NAMES,
    shape: tuple[int, int, int, int] = SHAPE,
    dtype: str = "bfloat16",
) -> list[Program]:
    """A program for each of them, in folders below `folder` / "flex"."""
    variants = [(name, False) for name in names] + [(name, True) for name in names if name in BLOCKED]
    return [_write(folder, target, name, blocked, shape, dtype) for name, blocked in variants]


def _write(
    folder: Path, target: str, name: str, blocked: bool, shape: tuple[int, int, int, int], dtype: str
) -> Program:
    rules, (_, heads, tokens, size) = mods(flex.tanh)[name], shape
    arrays = captures(rules.captures, tokens, heads)
    make_mask = partial(flex.create_block_mask, rules.mask, None, None, tokens, tokens, captures=arrays)
    block_mask = make_mask() if blocked else None
    operands = (("batch", heads, "rows", size), *(("batch", heads, "keys", size),) * 2)
    module = flex.compile_flex(
        *operands, score_mod=rules.score, mask_mod=None if blocked else rules.mask, block_mask=block_mask,
        captures=arrays, target=target, dtype=dtype,
    )  # fmt: skip
    title = f"{name} by blocks" if blocked else name
    target_folder = make_empty(folder / "flex" / title.replace(" ", "-"))
    module.save(target_folder / "artifact")
    recorded = {**arrays, **({"block_states": block_mask.states} if block_mask is not None else {})}
    np.savez(target_folder / "inputs.npz", allow_pickle=False, **recorded)
    details = {"mods": name, "shape": list(shape), "dtype": dtype}
    return Program(title, "flex", str(target_folder.relative_to(folder)), details)
