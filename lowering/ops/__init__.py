"""The operator registry: (domain, operator, since_version) -> lowering function.

This file contains only the registry. A lowering function takes the `Node` and one `Value` (or None for an omitted
input) per input. It returns one Value, or a tuple of Values in output order (None for an output that the model does not
request). It rejects a node by raising `node.error(code, problem, remedy)`.
"""

from __future__ import annotations

import importlib
import pkgutil
from collections.abc import Callable
from typing import Any

Lowering = Callable[..., Any]

_REGISTRY: dict[tuple[str, str], dict[int, Lowering]] = {}


def op(name: str, since: int, domain: str = "") -> Callable[[Lowering], Lowering]:
    """Register a lowering of `domain`.`name` for opsets from `since` up to the next registered version."""

    def register(function: Lowering) -> Lowering:
        versions = _REGISTRY.setdefault((domain, name), {})
        if since in versions:
            first, second = versions[since].__code__.co_filename, function.__code__.co_filename
            raise ValueError(f"{domain or 'ai.onnx'}.{name}-{since} is registered twice: {first} and {second}")
        versions[since] = function
        return function

    return register


def lookup(domain: str, name: str, opset: int) -> Lowering | None:
    """Return the newest lowering of the domain that is not above `opset`, or None."""
    versions = _REGISTRY.get(("" if domain == "ai.onnx" else domain, name), {})
    legal = [since for since in versions if since <= opset]
    return versions[max(legal)] if legal else None


def list_registered() -> dict[tuple[str, str], tuple[int, ...]]:
    """Return every registered operator with the versions at which its lowerings start."""
    return {key: tuple(sorted(versions)) for key, versions in sorted(_REGISTRY.items())}


for _module in pkgutil.walk_packages(__path__, f"{__name__}."):
    importlib.import_module(_module.name)
