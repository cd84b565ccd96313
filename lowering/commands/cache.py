"""The commands about cached results of compilation: cache show, cache clear."""

from __future__ import annotations

import argparse
from collections.abc import Callable
from typing import Any

from ..cache_folder import cache_folder
from .json_output import add_json, print_json


def add_command(add_parser: Callable[..., Any]) -> None:
    """Add the command and its options."""
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
    from ..compiling.cache import artifact_cache, object_cache

    caches: dict[str, Any] = {"kernels": object_cache, "artifacts": artifact_cache}
    sizes_by_name = {name: (*cache.size(), cache.MAX_BYTES) for name, cache in caches.items()}
    if arguments.action == "clear":
        for cache in caches.values():
            cache.clear()
    if arguments.json:
        json_sizes = {name: dict(zip(("count", "bytes", "most"), sizes)) for name, sizes in sizes_by_name.items()}
        print_json({"folder": str(cache_folder()), **json_sizes})
        return 0
    texts = [
        f"{count} {name}, {size / 2**20:.1f} of at most {limit / 2**20:.0f} MiB"
        for name, (count, size, limit) in sizes_by_name.items()
    ]
    print(f"{' and '.join(texts)}, in {cache_folder()}" + (": removed" if arguments.action == "clear" else ""))
    return 0
