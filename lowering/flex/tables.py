"""What the masks of the library read, made of what a program has: lengths, page tables, trees."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from ..errors import InputError


def documents(lengths: Sequence[int], prefixes: Sequence[int] | None = None) -> dict[str, np.ndarray]:
    """The captured arrays of `document` for documents of these lengths, one behind the other; with prefixes those of
    `shared_prefix`: for each document the number of the one that it continues, or -1.

    start: int32 [N], where the document of a position begins; prefix: int32 [N], where the one that it continues does,
    or -1.

    Raises InputError for a prefix that is no other document.
    """
    counts = np.asarray(lengths, np.int64)
    starts = np.cumsum(counts) - counts
    found = {"start": np.repeat(starts, counts).astype(np.int32)}
    if prefixes is not None:
        named = np.asarray(prefixes, np.int64)
        if named.shape != counts.shape:
            raise InputError(f"there are {len(counts)} lengths and {len(named)} prefixes: give one for each document.")
        for k, prefix in enumerate(named.tolist()):
            if not -1 <= prefix < len(counts) or prefix == k:
                raise InputError(
                    f"document {k} continues document {prefix}: give another one's number, of {len(counts)}, or -1."
                )
        # An empty document begins where the next one does, and shows nothing.
        begins = np.where((named >= 0) & (counts[named] > 0), starts[named], -1) if len(named) else named
        found["prefix"] = np.repeat(begins, counts).astype(np.int32)
    return found


def pages(page_table: Any, lengths: Any, page_size: int, count: int) -> dict[str, np.ndarray]:
    """The captured arrays of `paged`.

    page_table: int [B, n], the physical page of each page of a sequence, or -1. lengths: int [B], keys of each
    sequence. count: how many physical pages there are, in which count * page_size keys lie.

    logical: int32 [B, count], which page of the sequence a physical page is, or -1; lengths: int32 [B].

    Raises InputError for a page that is none, that a sequence has twice, or that its keys need and it has not.
    """
    table, keys = np.asarray(page_table), np.asarray(lengths)
    if table.ndim != 2 or keys.shape != table.shape[:1]:
        raise InputError(
            f"page_table has the shape {list(table.shape)} and lengths {list(keys.shape)}: make them [B, n] and [B]."
        )
    logical = np.full((len(table), count), -1, np.int32)
    for b, (row, length) in enumerate(zip(table.tolist(), keys.tolist())):
        for page in row:
            if page >= count:
                raise InputError(f"page_table of batch {b} has page {page}, of {count}.")
        needed = row[: -(-length // page_size)]
        if len(needed) * page_size < length or any(page < 0 for page in needed):
            raise InputError(f"batch {b} has {length} keys, for which page_table has too few pages of {page_size}.")
        used = [(place, page) for place, page in enumerate(row) if page >= 0]
        for place, page in used:
            if logical[b, page] != -1:
                raise InputError(f"page_table of batch {b} has page {page} twice.")
            logical[b, page] = place
    return {"logical": logical, "lengths": keys.astype(np.int32)}


def ancestors_of(parents: Sequence[int]) -> np.ndarray:
    """int32 [nodes, words] for `tree`: for each node of a tree the bits of itself and all nodes above it. parents: the
    parent of each node, which comes before it, or -1.

    Raises InputError for a parent that does not come before its child.
    """
    bits = np.zeros((len(parents), -(-len(parents) // 32)), np.uint32)
    for node, parent in enumerate(parents):
        if not -1 <= parent < node:
            raise InputError(f"the parent of node {node} is {parent}: give a node before it, or -1.")
        if parent >= 0:
            bits[node] = bits[parent]
        bits[node, node // 32] |= np.uint32(1 << node % 32)
    return bits.view(np.int32)
