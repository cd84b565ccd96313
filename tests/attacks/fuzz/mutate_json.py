"""Mutations of JSON: values of any depth replaced, removed, repeated, exchanged."""

from __future__ import annotations

import copy
import json
import random
from typing import Any

_VALUES = (
    None, True, 0, -1, 1, 2**31, 2**63, -(2**63), 2**200, 0.5, 1e308, "", "x", "float32", "float99", "../../x", "\0",
    "\n", [], {}, [[]], [0], ["x"], {"x": 0}, "x" * 1000,
)  # fmt: skip


def mutated(data: bytes, rng: random.Random, limit: int) -> bytes | None:
    """Return JSON like that in `data`, of at most `limit` bytes; None where there is none."""
    try:
        value = json.loads(data)
    except (ValueError, RecursionError):
        return None
    for _ in range(rng.choice((1, 1, 2, 3))):
        slots = [([value], 0), *_list_slots(value)]
        holder, key = rng.choice(slots)
        choice = rng.random()
        if choice < 0.55:
            holder[key] = copy.deepcopy(rng.choice(_VALUES))
        elif choice < 0.7:
            del holder[key]
        elif choice < 0.85:
            other, name = rng.choice(slots)
            holder[key] = copy.deepcopy(other[name])
        elif isinstance(holder, list):
            holder.insert(key, copy.deepcopy(holder[key]))
        else:
            holder[rng.choice(("x", "name", key))] = holder[key]
        value = slots[0][0][0] if slots[0][0] else None
    result = json.dumps(value).encode()
    return result if len(result) <= limit else None


def _list_slots(value: Any) -> list[tuple[Any, Any]]:
    """List every list or dictionary with each of its indices or keys."""
    keys = range(len(value)) if isinstance(value, list) else list(value) if isinstance(value, dict) else ()
    slots = [(value, k) for k in keys]
    for k in keys:
        slots += _list_slots(value[k])
    return slots
