"""From tensors to the kernel that puts new keys and values into a cache (lowering/attention/kv_write.py)."""

from __future__ import annotations

from collections.abc import Mapping

from ..attention.kv_write import KvWrite, copy_and_write
from ..importing.node import Node
from ..importing.values import Value


def kv_write(node: Node, record: KvWrite, given: Mapping[str, Value]) -> dict[str, Value]:
    """The caches with the new rows, by the names that the record has for them; in place where they are donated.

    given holds the kernel's parameters by name, of sizes that fit.
    """
    arguments = [node.tensor(given[name]) for name in record.inputs()]
    outputs = [(given[name].shape, given[name].dtype) for name in record.caches()]
    results = node.call_tir(copy_and_write(record), arguments, outputs, "kv_write")
    return dict(zip(record.caches(), results, strict=True))
