"""One file per family of operators; a generator for every operator that has a lowering (test_attacks.py)."""

from __future__ import annotations

import importlib
import pkgutil

from ..attack import GENERATORS, Generator


def generator(domain: str, op: str) -> Generator:
    return GENERATORS[domain, op]


for _module in pkgutil.walk_packages(__path__, f"{__name__}."):
    importlib.import_module(_module.name)
