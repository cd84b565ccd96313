"""From tensors to the kernel that writes new keys and values to a cache (lowering/attention/kv_write.py)."""

from __future__ import annotations

from collections.abc import Mapping

from ...attention.kv_write import KvWrite, copy_and_write
from ...importing.node import Node
from ...importing.values import Value


def kv_write(node: Node, record: KvWrite, tensors: Mapping[str, Value]) -> dict[str, Value]:
    """Return the caches with the new rows, by their names in the record; in place where they are donated.

    `tensors` are the kernel's parameters by name, with asserted sizes.
    """
    arguments = [node.tensor(tensors[name]) for name in record.inputs()]
    outputs = [(tensors[name].shape, tensors[name].dtype) for name in record.caches()]
    results = node.call_tir(copy_and_write(record), arguments, outputs, "kv_write")
    return dict(zip(record.caches(), results, strict=True))
