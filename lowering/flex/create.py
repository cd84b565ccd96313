"""`create_block_mask`: the blocks of a mask_mod, found by a compiled kernel."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from ..attention.flex_node import Settings
from ..errors import InputError
from . import kept
from .block_mask import BlockMask, block_size
from .captured import ArraySpec, specs_of
from .mod import Mod
from .problem import captured_inputs, checked_names, info, one_node, run, settings_of

if TYPE_CHECKING:
    import onnx


_LENGTHS, _STATES = "mask.lengths", "mask.states"  # no names that a captured array can have


@dataclass(frozen=True)
class BlockProblem:
    """What a kernel that finds blocks is made for."""

    settings: Settings
    captures: tuple[tuple[str, ArraySpec], ...]

    def to_onnx(self) -> onnx.ModelProto:
        """The model with the lengths (batches, heads, rows, keys) and the captured arrays as inputs, and the states."""
        given = [info(_LENGTHS, "int64", (4,)), *captured_inputs(self.captures)]
        made = [info(_STATES, "int8", ("batch", "heads", "row_blocks", "key_blocks"))]
        return one_node("BlockStates", [value.name for value in given], given, made, self.settings)


def create_block_mask(
    mask_mod: Mod,
    B: int | None,
    H: int | None,
    Q_LEN: int,
    KV_LEN: int,
    BLOCK_SIZE: int | tuple[int, int] = 128,
    captures: Mapping[str, Any] | None = None,
) -> BlockMask:
    """The blocks of Q_LEN rows and KV_LEN keys in which mask_mod shows something.

    B and H are the numbers of batches and query heads, None where mask_mod does not depend on them: it then sees 0.
    captures are the arrays that it reads, by name; they stay with the mask, for the calls that use it. Memory is a byte
    for each block, and four for each that a list is asked for.

    Raises InputError for lengths that are none, and for a mod that cannot be traced.

    Source: PyTorch's torch.nn.attention.flex_attention.create_block_mask.
    """
    lengths = {"B": 1 if B is None else B, "H": 1 if H is None else H, "Q_LEN": Q_LEN, "KV_LEN": KV_LEN}
    for name, length in lengths.items():
        if not isinstance(length, (int, np.integer)) or not 0 <= length < 2**31:
            raise InputError(f"{name} is {length!r}: give a number from 0 to {2**31 - 1}.")
    size, arrays = block_size(BLOCK_SIZE), checked_names({} if captures is None else captures)
    specs = specs_of(arrays)
    settings = settings_of(None, mask_mod, specs, "float32", 1.0, 1, size)
    model = kept.model_of(BlockProblem(settings, tuple(specs.items())), "cpu")
    given = {_LENGTHS: np.array(list(lengths.values()), np.int64), **arrays}
    states = run(model, given)[_STATES]
    return BlockMask(np.asarray(states), size, (int(Q_LEN), int(KV_LEN)), mask_mod, arrays)
