"""The command about what compiling has kept: cache show, cache clear."""

from __future__ import annotations

import argparse
from collections.abc import Callable
from typing import Any

from ..cache_folder import cache_folder
from .printed import add_json, print_json


def add(add_parser: Callable[..., Any]) -> None:
    """Its options."""
    c = add_parser(
        "cache",
        help="what compiling has kept: how much there is, or remove it",
        description="Kernels that were compiled once are kept, and only linked again by the next compile that needs "
        "them; artifacts, too, which are copied when the same model file is compiled again in the same way. The folder "
        "is ONNX_LOWERING_CACHE, else one in the user's cache folder.",
        example="cache show",
    )
    c.add_argument("action", choices=("show", "clear"), help="show where and how much, or remove all of it")
    add_json(c)
    c.set_defaults(run=_cache)


def _cache(arguments: argparse.Namespace) -> int:
    from ..compiling import artifact_cache, object_cache

    kept: dict[str, Any] = {"kernels": object_cache, "artifacts": artifact_cache}
    found = {name: (*cache.size(), cache.MOST) for name, cache in kept.items()}
    if arguments.action == "clear":
        for cache in kept.values():
            cache.clear()
    if arguments.json:
        parts = {name: dict(zip(("count", "bytes", "most"), sizes)) for name, sizes in found.items()}
        print_json({"folder": str(cache_folder()), **parts})
        return 0
    texts = [
        f"{count} {name}, {size / 2**20:.1f} of at most {most / 2**20:.0f} MiB"
        for name, (count, size, most) in found.items()
    ]
    print(f"{' and '.join(texts)}, in {cache_folder()}" + (": removed" if arguments.action == "clear" else ""))
    return 0
