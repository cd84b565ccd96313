"""The command about what compiling has kept: cache show, cache clear."""

from __future__ import annotations

import argparse
from collections.abc import Callable
from typing import Any

from .printed import add_json, print_json


def add(add_parser: Callable[..., Any]) -> None:
    """Its options."""
    c = add_parser(
        "cache",
        help="the code of kernels that was kept: how much there is, or remove it",
        description="Kernels that were compiled once are kept, and only linked again by the next compile that needs "
        "them. The folder is ONNX_LOWERING_CACHE, else one in the user's cache folder.",
        example="cache show",
    )
    c.add_argument("action", choices=("show", "clear"), help="show where and how much, or remove all of it")
    add_json(c)
    c.set_defaults(run=_cache)


def _cache(arguments: argparse.Namespace) -> int:
    from ..compiling import object_cache

    count, size = object_cache.size()
    if arguments.action == "clear":
        object_cache.clear()
    found = {"folder": str(object_cache.folder()), "objects": count, "bytes": size, "most": object_cache.MOST}
    if arguments.json:
        print_json(found)
        return 0
    text = f"{count} kernels, {size / 2**20:.1f} of at most {object_cache.MOST / 2**20:.0f} MiB, in {found['folder']}"
    print(text + (": removed" if arguments.action == "clear" else ""))
    return 0
