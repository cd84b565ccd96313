"""What an illegal call of gpt_attention is, and where a drawn call keeps what defects change."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, TypeAlias

from gpt_call_drawing import Drawing, Entry

# names of which an error must name one, and the requests of which it must name one; None: no room for the defect
Found: TypeAlias = "tuple[tuple[str, ...], tuple[int, ...]] | None"

# features that keep other arguments out of the way of a defect
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
    corrupt: Callable[[Drawing], Found]
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


def needed_blocks(drawing: Drawing) -> set[Entry]:
    """(request, beam, column) of the blocks that a call reads or writes."""
    return drawing.blocks_read | drawing.blocks_written


def per_request(drawing: Drawing, request: int) -> slice:
    """Where sequence_length speaks of a request."""
    repeats = drawing.beams if drawing.case.long_lengths else 1
    return slice(request * repeats, (request + 1) * repeats)


def replaced(names: tuple[str, ...], **values: Any) -> Callable[[Drawing], Found]:
    """These arguments get these values."""

    def corrupt(drawing: Drawing) -> Found:
        drawing.arguments.update(values)
        return names, ()

    return corrupt
