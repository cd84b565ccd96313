"""The type of an illegal call of gpt_attention, and helpers for defects."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, TypeAlias

from tests.serving.gpt_attention.gpt_call_drawing import Drawing, Entry

# the names and the requests that an error must contain one of; None: no room for the defect
Blame: TypeAlias = "tuple[tuple[str, ...], tuple[int, ...]] | None"

# features that avoid errors of other arguments
SELF: dict[str, Any] = {"cross": "none"}
CACHED: dict[str, Any] = {"cache": ("contiguous", "paged")}
PAGED: dict[str, Any] = {"cache": "paged"}
PLAIN_MASK: dict[str, Any] = {"mask": ("padding", "causal", "bidirectional")}

POOLS = ("past_key_value", "host_kv_cache_pool_pointers", "kv_cache_block_offsets")


@dataclass(frozen=True)
class Defect:
    """One way to corrupt calls of configurations with these features; a tuple of values offers several."""

    line: str  # of the description of errors, or the section elsewhere
    name: str
    features: Mapping[str, Any]
    corrupt: Callable[[Drawing], Blame]
    error: type[Exception] | tuple[type[Exception], ...] = ValueError
    times: int = 1  # in a round through all defects


@dataclass(frozen=True, eq=False)
class Malformed:
    """An illegal call. The error must be an `error` and name one of `names` and, if any, one of `requests`."""

    line: str
    name: str
    arguments: dict[str, Any]
    names: tuple[str, ...]
    requests: tuple[int, ...]
    error: type[Exception] | tuple[type[Exception], ...]


def list_needed_blocks(drawing: Drawing) -> set[Entry]:
    """Return (request, beam, column) of the blocks that a call reads or writes."""
    return drawing.blocks_read | drawing.blocks_written


def slice_request(drawing: Drawing, request: int) -> slice:
    """Return the slice of sequence_length that belongs to a request."""
    repeats = drawing.beams if drawing.case.long_lengths else 1
    return slice(request * repeats, (request + 1) * repeats)


def replace_arguments(names: tuple[str, ...], **values: Any) -> Callable[[Drawing], Blame]:
    """Return a defect that sets these arguments to these values."""

    def corrupt(drawing: Drawing) -> Blame:
        drawing.arguments.update(values)
        return names, ()

    return corrupt
