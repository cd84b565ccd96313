"""The captured arrays of the library's masks, computed from lengths, page tables and trees."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from ..errors import InputError


def documents(lengths: Sequence[int], prefixes: Sequence[int] | None = None) -> dict[str, np.ndarray]:
    """Return the captured arrays of `document` for concatenated documents of these lengths, or of `shared_prefix`.

    Args:
        lengths: the length of each document.
        prefixes: for `shared_prefix`, the index of the document that each document continues, or -1.

    Returns:
        start: int32 [N], the position at which the document of a position begins; with prefixes also prefix: int32 [N],
        the position at which the document begins that it continues, or -1.

    Raises:
        InputError: a prefix is not another document.
    """
    counts = np.asarray(lengths, np.int64)
    starts = np.cumsum(counts) - counts
    arrays = {"start": np.repeat(starts, counts).astype(np.int32)}
    if prefixes is not None:
        parents = np.asarray(prefixes, np.int64)
        if parents.shape != counts.shape:
            raise InputError(
                "flex.prefix_count_mismatch",
                f"there are {len(counts)} lengths and {len(parents)} prefixes. Give one prefix for each document.",
            )
        for k, prefix in enumerate(parents.tolist()):
            if not -1 <= prefix < len(counts) or prefix == k:
                raise InputError(
                    "flex.prefix_invalid",
                    f"document {k} continues document {prefix}. Give the number of another document, of "
                    f"{len(counts)}, or -1.",
                )
        # An empty document begins where the next one does, and shows nothing.
        begins = np.where((parents >= 0) & (counts[parents] > 0), starts[parents], -1) if len(parents) else parents
        arrays["prefix"] = np.repeat(begins, counts).astype(np.int32)
    return arrays


def pages(page_table: Any, lengths: Any, page_size: int, count: int) -> dict[str, np.ndarray]:
    """Return the captured arrays of `paged`.

    Args:
        page_table: int [B, n], the physical page of each page of a sequence, or -1.
        lengths: int [B], the number of keys of each sequence.
        page_size: keys in a page.
        count: the number of physical pages, which have count * page_size keys.

    Returns:
        logical: int32 [B, count], the page of the sequence that a physical page is, or -1; lengths: int32 [B].

    Raises:
        InputError: a page does not exist, a sequence has a page twice, or a page for its keys is missing.
    """
    table, keys = np.asarray(page_table), np.asarray(lengths)
    if table.ndim != 2 or keys.shape != table.shape[:1]:
        raise InputError(
            "flex.page_table_shape_mismatch",
            f"page_table has the shape {list(table.shape)} and lengths {list(keys.shape)}. Make them [B, n] and [B].",
        )
    logical = np.full((len(table), count), -1, np.int32)
    for b, (row, length) in enumerate(zip(table.tolist(), keys.tolist())):
        for page in row:
            if page >= count:
                raise InputError(
                    "flex.page_out_of_range", f"page_table of batch {b} has page {page}, but there are {count} pages."
                )
        needed = row[: -(-length // page_size)]
        if len(needed) * page_size < length or any(page < 0 for page in needed):
            raise InputError(
                "flex.page_count_too_small",
                f"batch {b} has {length} keys, for which page_table has too few pages of {page_size}.",
            )
        used = [(index, page) for index, page in enumerate(row) if page >= 0]
        for index, page in used:
            if logical[b, page] != -1:
                raise InputError("flex.page_repeated", f"page_table of batch {b} has page {page} twice.")
            logical[b, page] = index
    return {"logical": logical, "lengths": keys.astype(np.int32)}


def ancestors_of(parents: Sequence[int]) -> np.ndarray:
    """Return int32 [nodes, 32-bit words] for `tree`: for each node of a tree the bits of itself and all its ancestors.

    Args:
        parents: the parent of each node, which comes before it, or -1.

    Raises:
        InputError: a parent does not come before its child.
    """
    bits = np.zeros((len(parents), -(-len(parents) // 32)), np.uint32)
    for node, parent in enumerate(parents):
        if not -1 <= parent < node:
            raise InputError(
                "flex.tree_parent_invalid", f"the parent of node {node} is {parent}. Give an earlier node, or -1."
            )
        if parent >= 0:
            bits[node] = bits[parent]
        bits[node, node // 32] |= np.uint32(1 << node % 32)
    return bits.view(np.int32)
