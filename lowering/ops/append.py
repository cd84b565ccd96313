"""From tensors to the kernel that puts new keys and values into a cache (lowering/attention/append.py)."""

from __future__ import annotations

from collections.abc import Mapping

from ..attention.append import Append, copy_and_append
from ..importing.node import Node
from ..importing.values import Value


def append(node: Node, record: Append, given: Mapping[str, Value]) -> dict[str, Value]:
    """The caches with the new rows, by the names that the record has for them; in place where they are donated.

    given holds the kernel's parameters by name, of sizes that fit.
    """
    arguments = [node.tensor(given[name]) for name in record.inputs()]
    outputs = [(given[name].shape, given[name].dtype) for name in record.caches()]
    results = node.call_tir(copy_and_append(record), arguments, outputs, "append")
    return dict(zip(record.caches(), results, strict=True))
