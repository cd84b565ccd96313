"""Token ids of cached requests, as a tree of full blocks.

The holders of a prefix are holders of its parents, so a prefix without holders is a leaf and leaves the tree. A request
records the ids of its first tokens: those of full blocks, from the first on, in `prefixes`, and those of the next,
partial block in `partial_ids`. The first token without an id ends the record.
"""

from __future__ import annotations

from array import array
from dataclasses import dataclass, field


@dataclass(eq=False)
class Prefix:
    """A node of the prefix tree: a block of ids that follow those of `parent`, and the requests that have written it.

    Children are looked up by their tokens, which the dictionary compares: equal hashes alone share nothing.
    """

    parent: Prefix | None = None
    tokens: tuple[int, ...] = ()
    length: int = 0  # including its parents
    children: dict[tuple[int, ...], Prefix] = field(default_factory=dict)
    holders: dict[CachedRequest, None] = field(default_factory=dict)  # ordered, unlike a set


@dataclass(eq=False)
class CachedRequest:
    """A request. table[column] is the block of a column; the table covers its written and reserved tokens.

    Shared blocks are full, except that forks may share a partial last one.
    """

    table: array[int] = field(default_factory=lambda: array("q"))
    length: int = 0
    reserved: int = 0
    prefixes: list[Prefix] = field(default_factory=list)
    partial_ids: list[int] = field(default_factory=list)


class PrefixTree:
    """The prefixes of all requests of a cache with blocks of `size` tokens."""

    def __init__(self, size: int) -> None:
        self.root = Prefix()
        self._size = size

    def find_longest(self, ids: list[int]) -> Prefix:
        """Return the longest prefix of full blocks that leaves at least one of the ids."""
        prefix = self.root
        for start in range(0, len(ids) - self._size, self._size):
            child = prefix.children.get(tuple(ids[start : start + self._size]))
            if child is None:
                break
            prefix = child
        return prefix

    def record_ids(self, request: CachedRequest, ids: list[int]) -> None:
        """Record the ids of the next tokens of a request, if those of all earlier tokens are recorded."""
        if ids and len(request.prefixes) * self._size + len(request.partial_ids) == request.length:
            request.partial_ids += ids
            full_length = len(request.partial_ids) // self._size * self._size
            for start in range(0, full_length, self._size):
                self._extend(request, tuple(request.partial_ids[start : start + self._size]))
            del request.partial_ids[:full_length]

    def share_prefixes(self, donor: CachedRequest, clone: CachedRequest) -> None:
        """Record the ids of another request's first tokens, as many as a new request has."""
        clone.prefixes = donor.prefixes[: clone.length // self._size]
        if clone.length == donor.length:
            clone.partial_ids = donor.partial_ids[:]
        for prefix in clone.prefixes:
            prefix.holders[clone] = None

    def truncate_ids(self, request: CachedRequest, length: int) -> None:
        """Remove the ids of all tokens of a request except the first `length`."""
        full_blocks, rest = divmod(length, self._size)
        if len(request.prefixes) > full_blocks:
            request.partial_ids = list(request.prefixes[full_blocks].tokens[:rest])
        elif len(request.prefixes) == full_blocks:
            del request.partial_ids[rest:]
        while len(request.prefixes) > full_blocks:
            prefix = request.prefixes.pop()
            del prefix.holders[request]
            if not prefix.holders and prefix.parent is not None:
                del prefix.parent.children[prefix.tokens]

    def _extend(self, request: CachedRequest, tokens: tuple[int, ...]) -> None:
        """Record the ids of a further full block of a request."""
        parent = request.prefixes[-1] if request.prefixes else self.root
        prefix = parent.children.get(tokens)
        if prefix is None:
            prefix = parent.children[tokens] = Prefix(parent, tokens, parent.length + self._size)
        prefix.holders[request] = None
        request.prefixes.append(prefix)
