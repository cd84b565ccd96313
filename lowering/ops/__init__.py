"""The operator registry: (domain, operator, since_version) -> lowering function.

Nothing else lives here. A lowering function takes the `Node` and one `Value` (or None for a hole) per input, and
returns one Value, or a tuple of Values in output order (None for an output nobody asked for). It says no by raising
`node.error(what, remedy)`.
"""

from __future__ import annotations

import importlib
import pkgutil
from collections.abc import Callable
from typing import Any

Lowering = Callable[..., Any]

_REGISTRY: dict[tuple[str, str], dict[int, Lowering]] = {}


def op(name: str, since: int, domain: str = "") -> Callable[[Lowering], Lowering]:
    """Registers a lowering of `domain`.`name` for opset versions from `since` on, up to the next registered one."""

    def register(function: Lowering) -> Lowering:
        versions = _REGISTRY.setdefault((domain, name), {})
        if since in versions:
            first, second = versions[since].__code__.co_filename, function.__code__.co_filename
            raise ValueError(f"{domain or 'ai.onnx'}.{name}-{since} is registered twice: {first} and {second}")
        versions[since] = function
        return function

    return register


def lookup(domain: str, name: str, opset: int) -> Lowering | None:
    """The newest lowering not above `opset` within the same domain; None if there is none."""
    versions = _REGISTRY.get(("" if domain == "ai.onnx" else domain, name), {})
    legal = [since for since in versions if since <= opset]
    return versions[max(legal)] if legal else None


def registered() -> dict[tuple[str, str], tuple[int, ...]]:
    """Every registered operator with the versions at which its lowering starts."""
    return {key: tuple(sorted(versions)) for key, versions in sorted(_REGISTRY.items())}


for _module in pkgutil.iter_modules(__path__):
    importlib.import_module(f"{__name__}.{_module.name}")
