"""A paged cache of keys and values for continuous batching: which block of a pool holds which tokens of whom."""

from __future__ import annotations

from array import array
from collections import Counter
from collections.abc import Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from ..errors import InputError
from .arguments import cache_dtype, integer, is_integer, listed, token_ids, unhashable
from .blocks import Blocks, PoolFullError


@dataclass(frozen=True)
class Usage:
    """What a cache holds. A block that several requests share counts once, and so do its tokens."""

    total: int
    """Blocks of the pool."""
    free: int
    """Blocks that nobody holds."""
    used: int
    """Blocks that some request holds, reserved ones included."""
    shared: int
    """Blocks that several requests hold."""
    tokens: int
    """Slots that hold tokens."""
    bytes: int
    """Size of the used blocks."""
    filled: float
    """Share of the used blocks' slots that hold tokens; 1 where no block is used."""
    state_slots: int = 0
    """Slots for the states of a request; 0 for a decoder without states."""
    free_state_slots: int = 0
    """Of these, slots that no request has."""
    source_blocks: int = 0
    """Blocks for the sources of requests; 0 for a decoder without sources."""
    free_source_blocks: int = 0
    """Of these, blocks that no request has."""


@dataclass(eq=False)
class _Prefix:
    """A block of known tokens behind those of `parent`, and the requests that have written all of them.

    Who holds a prefix holds its parents, so that one without holders has no children either. Children are found by
    their tokens, which the dictionary compares: equal hashes alone share nothing.
    """

    parent: _Prefix | None = None
    tokens: tuple[int, ...] = ()
    length: int = 0  # with those of its parents
    children: dict[tuple[int, ...], _Prefix] = field(default_factory=dict)
    holders: dict[_Request, None] = field(default_factory=dict)  # in order; a set's would depend on addresses


@dataclass(eq=False)
class _Request:
    """Block column of a request lies in table[column]; there are as many as its written and reserved tokens take.

    The ids of the first tokens are known: those of whole blocks, from the first on, are in `prefixes`, those of the
    next, partly known block in `tail`. Blocks are shared with all their tokens written, and the last one by forks.
    """

    table: array[int] = field(default_factory=lambda: array("q"))
    length: int = 0
    reserved: int = 0
    prefixes: list[_Prefix] = field(default_factory=list)
    tail: list[int] = field(default_factory=list)


class PagedKVCache:
    """Keys and values of many requests, in blocks of one pool that requests with equal beginnings share.

    `pool` is an array (blocks, layers, 2, kv_heads, tokens_per_block, head_dim), zeros at first, where index 0 of the
    axis of 2 is keys. The cache never reads it, and writes it only to copy blocks. Kernels write it, in this order:

        past = cache.add(name, prompt)                      # a new request; the first `past` tokens are there already
        cache.reserve_all({name: len(prompt) - past})       # room, in blocks that nobody else reads
        ...                                                 # a call, with block_offsets([name]) or first_slots([name])
        cache.advance(name, prompt[past:])                  # what it has written

    The name of a request is anything that can be a key of a dictionary. Wrong arguments raise InputError, a full pool
    PoolFullError, and a method that raises has changed nothing. One thread at a time.
    """

    def __init__(
        self, blocks: int, tokens_per_block: int, *, layers: int, kv_heads: int, head_dim: int, dtype: Any = "float32"
    ) -> None:
        """tokens_per_block is a power of two; dtype float32, float16, bfloat16, int8 or float8_e4m3fn."""
        total, size = integer(blocks, "blocks", 1), integer(tokens_per_block, "tokens_per_block", 1)
        rest = integer(kv_heads, "kv_heads", 1), size, integer(head_dim, "head_dim", 1)
        if size & (size - 1):
            raise InputError(f"tokens_per_block must be a power of two, not {size}.")
        self._layers = integer(layers, "layers", 1)
        if total * max(2 * self._layers, size) >= 2**31:
            raise InputError(f"blocks must be fewer than {total}: entries of tables and lengths are int32.")
        self.pool = np.zeros((total, self._layers, 2, *rest), cache_dtype(dtype))
        self._size, self._blocks, self._root = size, Blocks(total), _Prefix()
        self._requests: dict[Hashable, _Request] = {}

    @property
    def tokens_per_block(self) -> int:
        return self._size

    def add(self, request: Hashable, tokens: Any = None) -> int:
        """A new request; answers how many tokens it has already, which are those of whole blocks that it shares.

        tokens, a sequence of integers, are the ids of its prompt. Blocks are shared with a request that has written the
        same ids from the first on, all but the last of `tokens`, which is left to be computed. An id must tell all that
        its keys and values depend on: give none where pictures or adapters matter too.
        """
        self._unused(request)
        ids = [] if tokens is None else token_ids(tokens, request)
        prefix = self._root
        for start in range(0, len(ids) - self._size, self._size):
            child = prefix.children.get(tuple(ids[start : start + self._size]))
            if child is None:
                break
            prefix = child
        # the newest holder: in front of the oldest one a dictionary may have many removed entries
        donor = next(reversed(prefix.holders), None)
        new = self._requests[request] = _Request() if donor is None else self._copy(donor, prefix.length)
        return new.length

    def fewest(self, request: Hashable, count: int, candidates: Sequence[Hashable]) -> list[Hashable] | None:
        """Return which of these requests must be freed for reserve(request, count) to have room; the first are spared.

        None where there is no room even without all of them.
        """
        ours, tables = self._request(request), [self._request(name).table for name in candidates]
        column = self._open(ours)
        copied = None if column is None else ours.table[column]
        needed = max(0, self._columns(ours.length + count) - len(ours.table))
        chosen = self._blocks.fewest(tables, needed, copied)
        return None if chosen is None else [candidates[k] for k in chosen]

    def fork(self, request: Hashable, new: Hashable) -> None:
        """A second request, `new`, that goes on from where `request` is, and shares all of its blocks.

        The last one is copied when one of them reserves room in it. What is reserved and not written cannot be shared:
        it must be written, or given up by truncate(request, length(request)).
        """
        ours = self._request(request)
        self._unused(new)
        if ours.reserved:
            raise InputError(
                f"request {request!r} has room for {ours.reserved} tokens that are not written yet: call advance(), or "
                f"truncate({request!r}, {ours.length}), before fork()."
            )
        self._requests[new] = self._copy(ours, ours.length)

    def reserve(self, request: Hashable, count: int) -> list[tuple[int, int]]:
        """Room for the next `count` tokens of a request, in blocks that are its own; see reserve_all."""
        self._request(request)
        return self.reserve_all({request: count})

    def reserve_all(self, counts: Mapping[Any, int]) -> list[tuple[int, int]]:
        """Room for the next counts[request] tokens of each request; for none of them if PoolFullError is raised.

        The blocks of these tokens are then the request's own: a shared one that is partly written is copied. Counts are
        from length(request) on, so that a second call before advance() asks for the larger of both. Answers which block
        was copied to which: who keeps other arrays in step with `pool` (scales, a copy on a GPU) copies them there too.
        """
        if not isinstance(counts, Mapping):
            raise InputError(f"counts must map requests to numbers of tokens, and is {counts!r}.")
        given = [(self._request(name), integer(n, f"count of request {name!r}", 0)) for name, n in counts.items()]
        plan = [(ours, count) for ours, count in given if count]
        needed = sum(max(0, self._columns(ours.length + count) - len(ours.table)) for ours, count in plan)
        # the last owner of a block need not copy it
        writers = Counter(ours.table[column] for ours, _ in plan if (column := self._open(ours)) is not None)
        needed += sum(min(count, self._blocks.owners(block) - 1) for block, count in writers.items())
        if needed > self._blocks.free:
            who = f"request {next(iter(counts))!r}" if len(counts) == 1 else f"a batch of {len(counts)} requests"
            raise PoolFullError(who, needed, self._blocks.free, self._blocks.total)
        copies = []
        for ours, count in plan:
            column = self._open(ours)
            if column is not None and self._blocks.owners(source := ours.table[column]) > 1:
                ours.table[column] = target = self._blocks.take()
                self.pool[target] = self.pool[source]
                self._blocks.release([source])
                copies.append((source, target))
            ours.table.extend(self._blocks.take() for _ in range(self._columns(ours.length + count) - len(ours.table)))
            ours.reserved = max(ours.reserved, count)
        return copies

    def advance(self, request: Hashable, tokens: Any) -> None:
        """The next tokens of a request are written: their ids, a sequence of integers, or only how many.

        They must have been reserved. Blocks can be shared with later requests up to the first token without an id.
        """
        ours = self._request(request)
        ids = [] if is_integer(tokens) else token_ids(tokens, request)
        count = integer(tokens, f"tokens of request {request!r}", 0) if is_integer(tokens) else len(ids)
        if count > ours.reserved:
            raise InputError(
                f"tokens of request {request!r} are {count}, and room for {ours.reserved} is reserved: call reserve() "
                "before the call that writes them."
            )
        if ids and len(ours.prefixes) * self._size + len(ours.tail) == ours.length:
            ours.tail += ids
            whole = len(ours.tail) // self._size * self._size
            for start in range(0, whole, self._size):
                self._extend(ours, tuple(ours.tail[start : start + self._size]))
            del ours.tail[:whole]
        ours.length += count
        ours.reserved -= count

    def truncate(self, request: Hashable, length: int) -> None:
        """Forgets all tokens of a request but the first `length`, and gives up what is reserved behind them."""
        ours = self._request(request)
        left = integer(length, f"length of request {request!r}", 0)
        if left > ours.length:
            raise InputError(f"length of request {request!r} is {ours.length}, and cannot become {left}: advance() it.")
        self._cut(ours, left)

    def free(self, request: Hashable) -> None:
        """Forgets a request. Blocks that no other one holds are free."""
        self._cut(self._request(request), 0)
        del self._requests[request]

    def length(self, request: Hashable) -> int:
        """How many tokens of a request are written."""
        return self._request(request).length

    def lengths(self, requests: Iterable[Hashable]) -> np.ndarray:
        """How many tokens of each request are written: int32 (B)."""
        return np.array([ours.length for ours in self._batch(listed(requests))], np.int32)

    def block_offsets(self, requests: Iterable[Hashable | list[Any]], beams: int = 1) -> np.ndarray:
        """kv_cache_block_offsets of gpt_attention: int32 (B, beams, 2, M), M >= 1, of all written and reserved tokens.

        An entry is block * layers * 2, one more for values; 0 where a request has no block. A request is a name or a
        list of `beams` names; where beams > 1 all rows of a name alone, a prompt, are its own.
        """
        wide, given = integer(beams, "beams", 1), listed(requests)
        for group in given:
            if isinstance(group, list) and len(group) != wide:
                raise InputError(f"requests must have {wide} beams each, and {group!r} has {len(group)}.")
        self._batch([name for group in given for name in (group if isinstance(group, list) else [group])])
        names = [name for group in given for name in (group if isinstance(group, list) else [group] * wide)]
        tables = self._tables([self._requests[name] for name in names])
        entries = tables.reshape(len(given), wide, 1, tables.shape[1]) * (2 * self._layers)
        return np.maximum(entries + np.array([[0], [1]]), 0).astype(np.int32)

    def block_table(self, requests: Iterable[Hashable]) -> np.ndarray:
        """block_table of decoders compiled with `serve`: int64 (B, M), M >= 1, of written and reserved tokens.

        An entry is the number of a block; -1 where a request has none.
        """
        return self._tables(self._batch(listed(requests)))

    def first_slots(self, requests: Iterable[Hashable]) -> np.ndarray:
        """cachestarts of MultiHeadCacheAttention, cache_mode 1: int64 (B, M), M >= 1, of written and reserved tokens.

        An entry is the first slot of a block, block * tokens_per_block; 0 where a request has no block. That operator's
        caches have other axes than `pool`: what reserve_all answers is to be copied there.
        """
        return np.maximum(self._tables(self._batch(listed(requests))) * self._size, 0)

    def usage(self) -> Usage:
        held = np.zeros(self._blocks.total, np.int64)  # tokens in each block
        for ours in self._requests.values():
            whole, rest = divmod(ours.length, self._size)
            held[ours.table[:whole]] = self._size
            if rest:
                held[ours.table[whole]] = max(held[ours.table[whole]], rest)
        total, free, tokens = self._blocks.total, self._blocks.free, int(held.sum())
        used = total - free
        filled = tokens / (used * self._size) if used else 1.0
        return Usage(total, free, used, self._blocks.shared, tokens, used * self.pool[0].nbytes, filled)

    def _columns(self, tokens: int) -> int:
        """How many blocks so many tokens take."""
        return -(-tokens // self._size)

    def _open(self, ours: _Request) -> int | None:
        """The column of the next token of a request, if it has a block already."""
        column = ours.length // self._size
        return column if column < len(ours.table) else None

    def _copy(self, donor: _Request, length: int) -> _Request:
        """A request with the first tokens of another one: all of them, or those of some known blocks."""
        new = _Request(donor.table[: self._columns(length)], length, 0, donor.prefixes[: length // self._size])
        if length == donor.length:
            new.tail = donor.tail[:]
        self._blocks.share(new.table)
        for prefix in new.prefixes:
            prefix.holders[new] = None
        return new

    def _extend(self, ours: _Request, tokens: tuple[int, ...]) -> None:
        """One more block of a request is written, and known."""
        parent = ours.prefixes[-1] if ours.prefixes else self._root
        prefix = parent.children.get(tokens)
        if prefix is None:
            prefix = parent.children[tokens] = _Prefix(parent, tokens, parent.length + self._size)
        prefix.holders[ours] = None
        ours.prefixes.append(prefix)

    def _cut(self, ours: _Request, length: int) -> None:
        whole, rest = divmod(length, self._size)
        if len(ours.prefixes) > whole:
            ours.tail = list(ours.prefixes[whole].tokens[:rest])
        elif len(ours.prefixes) == whole:
            del ours.tail[rest:]
        while len(ours.prefixes) > whole:
            prefix = ours.prefixes.pop()
            del prefix.holders[ours]
            if not prefix.holders and prefix.parent is not None:
                del prefix.parent.children[prefix.tokens]
        columns = self._columns(length)
        self._blocks.release(reversed(ours.table[columns:]))  # so that the next request gets them in order again
        del ours.table[columns:]
        ours.length, ours.reserved = length, 0

    def _tables(self, requests: list[_Request]) -> np.ndarray:
        """The blocks of each request, int64 [B, M], filled up by -1."""
        tables = np.full((len(requests), max([1, *(len(ours.table) for ours in requests)])), -1, np.int64)
        for row, ours in zip(tables, requests):
            row[: len(ours.table)] = ours.table
        return tables

    def _batch(self, names: list[Any]) -> list[_Request]:
        """The requests of a call, each named once: two rows of a call that write to the same blocks would be wrong."""
        requests = [self._request(name) for name in names]
        if len({*names}) < len(names):
            twice = next(name for name, count in Counter(names).items() if count > 1)
            raise InputError(f"requests must differ, and {twice!r} is given twice.")
        return requests

    def _request(self, name: Hashable) -> _Request:
        try:
            return self._requests[name]
        except KeyError:
            raise InputError(f"there is no request {name!r}: add() it first.") from None
        except TypeError:
            raise unhashable(name) from None

    def _unused(self, name: Hashable) -> None:
        try:
            if name not in self._requests:
                return
        except TypeError:
            raise unhashable(name) from None
        raise InputError(f"there is a request {name!r} already: free() it first, or choose another name.")
