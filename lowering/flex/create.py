"""`create_block_mask`: the blocks of a mask_mod, computed by a compiled kernel."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from ..attention.flex_node import FlexAttentionSettings
from ..errors import InputError
from . import kernel_cache
from .block_mask import BlockMask, block_size
from .captured import ArraySpec, read_array_specs
from .mod import Mod
from .problem import (
    build_settings,
    build_single_node_model,
    check_names,
    make_captured_inputs,
    make_value_info,
    run_kernel,
)

if TYPE_CHECKING:
    import onnx


_LENGTHS, _STATES = "mask.lengths", "mask.states"  # not valid as names of captured arrays


@dataclass(frozen=True)
class BlockStatesProblem:
    """The specification of a kernel that computes block states."""

    settings: FlexAttentionSettings
    captures: tuple[tuple[str, ArraySpec], ...]

    def to_onnx(self) -> onnx.ModelProto:
        """Return the model from the lengths and the captured arrays to the states.

        The lengths are (batches, heads, rows, keys).
        """
        inputs = [make_value_info(_LENGTHS, "int64", (4,)), *make_captured_inputs(self.captures)]
        outputs = [make_value_info(_STATES, "int8", ("batch", "heads", "row_blocks", "key_blocks"))]
        return build_single_node_model("BlockStates", [value.name for value in inputs], inputs, outputs, self.settings)


def create_block_mask(
    mask_mod: Mod,
    B: int | None,
    H: int | None,
    Q_LEN: int,
    KV_LEN: int,
    BLOCK_SIZE: int | tuple[int, int] = 128,
    captures: Mapping[str, Any] | None = None,
) -> BlockMask:
    """Compute the blocks of Q_LEN rows and KV_LEN keys in which mask_mod shows any pair.

    Memory is a byte for each block, and four for each block of a list that is requested.

    Args:
        mask_mod: whether a pair is visible.
        B, H: the numbers of batches and query heads, None if mask_mod does not depend on them: it then gets 0.
        Q_LEN, KV_LEN: rows and keys.
        BLOCK_SIZE: rows and keys of a block, or one number for both.
        captures: the arrays that mask_mod reads, by name; the mask keeps them for the calls that use it.

    Returns:
        The mask.

    Raises:
        InputError: lengths are invalid, or the mod cannot be traced.

    Source: PyTorch's torch.nn.attention.flex_attention.create_block_mask.
    """
    lengths = {"B": 1 if B is None else B, "H": 1 if H is None else H, "Q_LEN": Q_LEN, "KV_LEN": KV_LEN}
    for name, length in lengths.items():
        if not isinstance(length, (int, np.integer)) or not 0 <= length < 2**31:
            raise InputError("flex.length_out_of_range", f"{name} is {length!r}. Give a number from 0 to {2**31 - 1}.")
    size, arrays = block_size(BLOCK_SIZE), check_names({} if captures is None else captures)
    specs = read_array_specs(arrays)
    settings = build_settings(None, mask_mod, specs, "float32", 1.0, 1, size)
    model = kernel_cache.get_kernel(BlockStatesProblem(settings, tuple(specs.items())), "cpu")
    inputs = {_LENGTHS: np.array(list(lengths.values()), np.int64), **arrays}
    states = run_kernel(model, inputs)[_STATES]
    return BlockMask(np.asarray(states), size, (int(Q_LEN), int(KV_LEN)), mask_mod, arrays)
