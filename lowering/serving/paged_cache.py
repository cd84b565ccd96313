"""A paged KV cache for continuous batching: block tables and prefix sharing of requests."""

from __future__ import annotations

from collections import Counter
from collections.abc import Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from ..errors import InputError
from .arguments import (
    check_integer,
    is_integer,
    make_unhashable_error,
    read_cache_dtype,
    read_request_names,
    read_token_ids,
)
from .blocks import BlockPool, PoolFullError
from .prefix_tree import CachedRequest, PrefixTree


@dataclass(frozen=True)
class Usage:
    """The usage of a cache. A block that several requests share counts once, and so do its tokens."""

    total: int
    """Blocks of the pool."""
    free: int
    """Blocks without an owner."""
    used: int
    """Blocks with an owner, reserved ones included."""
    shared: int
    """Blocks with several owners."""
    tokens: int
    """Slots with tokens."""
    bytes: int
    """Size of the used blocks."""
    filled: float
    """Fraction of the used blocks' slots that have tokens; 1 if no block is used."""
    state_slots: int = 0
    """Slots for the states of a request; 0 for a decoder without states."""
    free_state_slots: int = 0
    """Slots for states that are not in use."""
    source_blocks: int = 0
    """Blocks for the sources of requests; 0 for a decoder without sources."""
    free_source_blocks: int = 0
    """Blocks for sources that are not in use."""


class PagedKVCache:
    """Keys and values of many requests, in blocks of one pool. Requests with equal prefixes share blocks.

    `pool` is an array (blocks, layers, 2, kv_heads, tokens_per_block, head_dim), initially zeros. Index 0 of the axis
    of 2 is keys. The cache never reads it, and writes it only to copy blocks. Kernels write it, in this order:

        past = cache.add(name, prompt)                      # a new request; the first `past` tokens are cached already
        cache.reserve_all({name: len(prompt) - past})       # room, in blocks that no other request reads
        ...                                                 # a call, with block_offsets([name]) or first_slots([name])
        cache.advance(name, prompt[past:])                  # the tokens that it has written

    The name of a request is any hashable value. Invalid arguments raise InputError, and a full pool raises
    PoolFullError. A method that raises has changed nothing. Only one thread at a time may use a cache.
    """

    def __init__(
        self, blocks: int, tokens_per_block: int, *, layers: int, kv_heads: int, head_dim: int, dtype: Any = "float32"
    ) -> None:
        """Allocate the pool.

        Args:
            blocks: Number of blocks.
            tokens_per_block: Slots of a block, a power of two.
            layers: Number of layers.
            kv_heads: Number of heads of keys and values.
            head_dim: Size of a head.
            dtype: float32, float16, bfloat16, int8 or float8_e4m3fn.

        Raises:
            InputError: An argument is invalid, or block indices exceed int32.
        """
        total, size = check_integer(blocks, "blocks", 1), check_integer(tokens_per_block, "tokens_per_block", 1)
        rest = check_integer(kv_heads, "kv_heads", 1), size, check_integer(head_dim, "head_dim", 1)
        if size & (size - 1):
            raise InputError(
                "batcher.block_size_not_power_of_two", f"tokens_per_block must be a power of two, not {size}."
            )
        self._layers = check_integer(layers, "layers", 1)
        if total * max(2 * self._layers, size) >= 2**31:
            raise InputError(
                "batcher.block_count_too_large",
                f"blocks must be fewer than {total}: entries of tables and lengths are int32.",
            )
        self.pool = np.zeros((total, self._layers, 2, *rest), read_cache_dtype(dtype))
        self._size, self._blocks, self._prefixes = size, BlockPool(total), PrefixTree(size)
        self._requests: dict[Hashable, CachedRequest] = {}

    @property
    def tokens_per_block(self) -> int:
        return self._size

    def add(self, request: Hashable, tokens: Any = None) -> int:
        """Add a request, and return the number of its tokens that are cached in shared, full blocks.

        Blocks are shared with a request that has written the same ids from the first on. The last id of `tokens` is
        never shared, and left to be computed.

        Args:
            request: Name of the request.
            tokens: Ids of its prompt, a sequence of integers. An id must determine everything that its keys and values
                depend on: pass None if images or adapters matter too.

        Returns:
            The number of tokens that need not be computed.

        Raises:
            InputError: The name is in use, or the ids are invalid.
        """
        self._check_unused(request)
        ids = [] if tokens is None else read_token_ids(tokens, request)
        prefix = self._prefixes.find_longest(ids)
        # the newest holder: before the oldest one a dictionary may have many removed entries
        donor = next(reversed(prefix.holders), None)
        new = self._requests[request] = CachedRequest() if donor is None else self._share_prefix(donor, prefix.length)
        return new.length

    def fewest(self, request: Hashable, count: int, candidates: Sequence[Hashable]) -> list[Hashable] | None:
        """Return the candidates that must be freed to make room for reserve(request, count).

        The first candidates are spared if possible. Returns None if freeing all of them is not enough.
        """
        entry, candidate_blocks = self._get_request(request), [self._get_request(name).table for name in candidates]
        column = self._find_open_column(entry)
        copied = None if column is None else entry.table[column]
        needed = max(0, self._count_blocks(entry.length + count) - len(entry.table))
        chosen = self._blocks.choose_evictions(candidate_blocks, needed, copied)
        return None if chosen is None else [candidates[k] for k in chosen]

    def fork(self, request: Hashable, new: Hashable) -> None:
        """Add a second request, `new`, that continues from the state of `request` and shares all of its blocks.

        The last block is copied when one of them reserves room in it. Reserved but unwritten room cannot be shared:
        write it, or release it by truncate(request, length(request)).

        Args:
            request: Name of an existing request.
            new: Name of the new request.

        Raises:
            InputError: `request` does not exist or has reserved room, or `new` is in use.
        """
        entry = self._get_request(request)
        self._check_unused(new)
        if entry.reserved:
            raise InputError(
                "batcher.reservation_pending",
                f"request {request!r} has room for {entry.reserved} tokens that are not written yet: call advance(), "
                f"or truncate({request!r}, {entry.length}), before fork().",
            )
        self._requests[new] = self._share_prefix(entry, entry.length)

    def reserve(self, request: Hashable, count: int) -> list[tuple[int, int]]:
        """Reserve room for the next `count` tokens of a request, in blocks that it owns alone; see reserve_all."""
        self._get_request(request)
        return self.reserve_all({request: count})

    def reserve_all(self, counts: Mapping[Any, int]) -> list[tuple[int, int]]:
        """Reserve room for the next counts[request] tokens of each request, or for none if it raises.

        The blocks of these tokens are then owned by the request alone: a shared, partial block is copied. Counts start
        at length(request), so a second call before advance() reserves the larger of both counts.

        Args:
            counts: Number of tokens by request.

        Returns:
            Pairs of a source block and the block that it was copied to. Callers that mirror `pool` in other arrays
            (scales, a copy on a GPU) must copy them there too.

        Raises:
            PoolFullError: The pool has too few free blocks.
            InputError: An argument is invalid.
        """
        if not isinstance(counts, Mapping):
            raise InputError(
                "batcher.counts_not_a_mapping", f"counts must map requests to numbers of tokens, and is {counts!r}."
            )
        requested = [
            (self._get_request(name), check_integer(n, f"count of request {name!r}", 0)) for name, n in counts.items()
        ]
        plan = [(state, count) for state, count in requested if count]
        needed = sum(max(0, self._count_blocks(state.length + count) - len(state.table)) for state, count in plan)
        # the last owner of a block need not copy it
        writers = Counter(
            state.table[column] for state, _ in plan if (column := self._find_open_column(state)) is not None
        )
        needed += sum(min(count, self._blocks.count_owners(block) - 1) for block, count in writers.items())
        if needed > self._blocks.free:
            requester = f"request {next(iter(counts))!r}" if len(counts) == 1 else f"a batch of {len(counts)} requests"
            raise PoolFullError("batcher.blocks_exhausted", requester, needed, self._blocks.free, self._blocks.total)
        copies = []
        for state, count in plan:
            column = self._find_open_column(state)
            if column is not None and self._blocks.count_owners(source := state.table[column]) > 1:
                state.table[column] = target = self._blocks.take()
                self.pool[target] = self.pool[source]
                self._blocks.release([source])
                copies.append((source, target))
            state.table.extend(
                self._blocks.take() for _ in range(self._count_blocks(state.length + count) - len(state.table))
            )
            state.reserved = max(state.reserved, count)
        return copies

    def advance(self, request: Hashable, tokens: Any) -> None:
        """Mark the next tokens of a request as written.

        They must have been reserved. Blocks can be shared with later requests up to the first token without an id.

        Args:
            request: Name of the request.
            tokens: Ids of the tokens, a sequence of integers, or only their number.

        Raises:
            InputError: More tokens than reserved, or an invalid argument.
        """
        entry = self._get_request(request)
        ids = [] if is_integer(tokens) else read_token_ids(tokens, request)
        count = check_integer(tokens, f"tokens of request {request!r}", 0) if is_integer(tokens) else len(ids)
        if count > entry.reserved:
            raise InputError(
                "batcher.reservation_exceeded",
                f"request {request!r} has room for {entry.reserved} tokens, and {count} are given: call reserve() "
                "before the call that writes them.",
            )
        self._prefixes.record_ids(entry, ids)
        entry.length += count
        entry.reserved -= count

    def truncate(self, request: Hashable, length: int) -> None:
        """Discard all tokens of a request except the first `length`, and release the reserved room after them."""
        entry = self._get_request(request)
        target = check_integer(length, f"length of request {request!r}", 0)
        if target > entry.length:
            raise InputError(
                "batcher.length_exceeded",
                f"length of request {request!r} is {entry.length}, and cannot become {target}: call "
                "advance() to add tokens.",
            )
        self._truncate(entry, target)

    def free(self, request: Hashable) -> None:
        """Remove a request. Blocks without another owner become free."""
        self._truncate(self._get_request(request), 0)
        del self._requests[request]

    def length(self, request: Hashable) -> int:
        """Return the number of written tokens of a request."""
        return self._get_request(request).length

    def lengths(self, requests: Iterable[Hashable]) -> np.ndarray:
        """Return the number of written tokens of each request, int32 (B)."""
        return np.array([entry.length for entry in self._get_requests(read_request_names(requests))], np.int32)

    def block_offsets(self, requests: Iterable[Hashable | list[Any]], beams: int = 1) -> np.ndarray:
        """Return kv_cache_block_offsets of gpt_attention for all written and reserved tokens.

        Args:
            requests: Names, or lists of `beams` names. If beams > 1, all rows of a single name, a prompt, are its own.
            beams: Beam width.

        Returns:
            int32 (B, beams, 2, M), M >= 1. An entry is block * layers * 2, plus one for values; 0 without a block.

        Raises:
            InputError: A request does not exist or occurs twice, or a list has another number of beams.
        """
        beam_count, groups = check_integer(beams, "beams", 1), read_request_names(requests)
        for group in groups:
            if isinstance(group, list) and len(group) != beam_count:
                raise InputError(
                    "batcher.beam_count_mismatch",
                    f"requests must have {beam_count} beams each, and {group!r} has {len(group)}.",
                )
        self._get_requests([name for group in groups for name in (group if isinstance(group, list) else [group])])
        names = [name for group in groups for name in (group if isinstance(group, list) else [group] * beam_count)]
        tables = self._pad_tables([self._requests[name] for name in names])
        entries = tables.reshape(len(groups), beam_count, 1, tables.shape[1]) * (2 * self._layers)
        return np.maximum(entries + np.array([[0], [1]]), 0).astype(np.int32)

    def block_table(self, requests: Iterable[Hashable]) -> np.ndarray:
        """Return block_table of decoders compiled with `serve`, for all written and reserved tokens.

        It is int64 (B, M), M >= 1. An entry is the index of a block, or -1 if there is none.
        """
        return self._pad_tables(self._get_requests(read_request_names(requests)))

    def first_slots(self, requests: Iterable[Hashable]) -> np.ndarray:
        """Return cachestarts of MultiHeadCacheAttention with cache_mode 1, for all written and reserved tokens.

        It is int64 (B, M), M >= 1. An entry is the first slot of a block, block * tokens_per_block, or 0 if there is
        none. The caches of that operator have other axes than `pool`: copy the blocks that reserve_all returns there.
        """
        return np.maximum(self._pad_tables(self._get_requests(read_request_names(requests))) * self._size, 0)

    def usage(self) -> Usage:
        """Return the usage of the pool."""
        tokens_by_block = np.zeros(self._blocks.total, np.int64)  # number of tokens by block
        for entry in self._requests.values():
            full_blocks, rest = divmod(entry.length, self._size)
            tokens_by_block[entry.table[:full_blocks]] = self._size
            if rest:
                tokens_by_block[entry.table[full_blocks]] = max(tokens_by_block[entry.table[full_blocks]], rest)
        total, free, tokens = self._blocks.total, self._blocks.free, int(tokens_by_block.sum())
        used = total - free
        filled = tokens / (used * self._size) if used else 1.0
        return Usage(total, free, used, self._blocks.shared, tokens, used * self.pool[0].nbytes, filled)

    def _count_blocks(self, tokens: int) -> int:
        """Return the number of blocks for so many tokens."""
        return -(-tokens // self._size)

    def _find_open_column(self, entry: CachedRequest) -> int | None:
        """Return the column of the next token of a request, or None without a block for it."""
        column = entry.length // self._size
        return column if column < len(entry.table) else None

    def _share_prefix(self, donor: CachedRequest, length: int) -> CachedRequest:
        """Return a request with the first tokens of another one: all of them, or those of full blocks."""
        clone = CachedRequest(donor.table[: self._count_blocks(length)], length)
        self._prefixes.share_prefixes(donor, clone)
        self._blocks.share(clone.table)
        return clone

    def _truncate(self, entry: CachedRequest, length: int) -> None:
        self._prefixes.truncate_ids(entry, length)
        columns = self._count_blocks(length)
        self._blocks.release(reversed(entry.table[columns:]))  # so that the next request gets them in order again
        del entry.table[columns:]
        entry.length, entry.reserved = length, 0

    def _pad_tables(self, requests: list[CachedRequest]) -> np.ndarray:
        """Return the blocks of each request, int64 [B, M], padded with -1."""
        tables = np.full((len(requests), max([1, *(len(entry.table) for entry in requests)])), -1, np.int64)
        for row, entry in zip(tables, requests):
            row[: len(entry.table)] = entry.table
        return tables

    def _get_requests(self, names: list[Any]) -> list[CachedRequest]:
        """Return the requests of a call, which must be distinct: two rows must not write to the same blocks."""
        requests = [self._get_request(name) for name in names]
        if len({*names}) < len(names):
            duplicate = next(name for name, count in Counter(names).items() if count > 1)
            raise InputError(
                "batcher.names_duplicate",
                f"requests must differ, and {duplicate!r} is given twice: name each request once.",
            )
        return requests

    def _get_request(self, name: Hashable) -> CachedRequest:
        try:
            return self._requests[name]
        except KeyError:
            raise InputError("batcher.name_unknown", f"there is no request {name!r}: add() it first.") from None
        except TypeError:
            raise make_unhashable_error(name) from None

    def _check_unused(self, name: Hashable) -> None:
        try:
            if name not in self._requests:
                return
        except TypeError:
            raise make_unhashable_error(name) from None
        raise InputError(
            "batcher.name_in_use", f"there is a request {name!r} already: free() it first, or choose another name."
        )
