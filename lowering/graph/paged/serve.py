"""Options of a served decoder: its caches and requests, as passed to `compile`."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

from ...errors import InputError
from ...runtime.artifact.checks import check_integer


@dataclass(frozen=True)
class Serve:
    """A decoder for packed tokens of many requests over one paged cache: `compile(model, serve=Serve(context=4096))`.

    States of convolutions and recurrences keep their type.

    Args:
        context: The largest number of tokens of a request.
        tokens_per_block: The number of tokens of a block, a power of two.
        cache: The element type of keys and values: "model", the one that the model computes in, or "int8" with a
            float32 scale for each token and head.
        ids: The name of the model's input of tokens, as for `Model.decoder`; if "", it is found by its readers.
        mask: The name of the input of the attention mask, likewise.
        positions: The name of the input of positions, likewise.

    Raises:
        InputError: An option is out of range.
    """

    context: int
    tokens_per_block: int = 16
    cache: Literal["model", "int8"] = "model"
    ids: str = ""
    mask: str = ""
    positions: str = ""

    def __post_init__(self) -> None:
        check_integer(self.context, "serve: context", 1, 2**24)
        size: Any = check_integer(self.tokens_per_block, "serve: tokens_per_block", 1, 2**16)
        if size & (size - 1):
            raise InputError("serve.block_size_invalid", f"serve: tokens_per_block must be a power of two, not {size}.")
        if self.cache not in ("model", "int8"):
            raise InputError(
                "serve.cache_dtype_unknown", f'serve: cache must be "model" or "int8", not {self.cache!r}.'
            )
