"""One file per family of operators; a generator for every operator that has a lowering (test_attacks.py)."""

from __future__ import annotations

import importlib
import pkgutil
import sys
from pathlib import Path

from ..attack import GENERATORS, Generator


def generator(domain: str, op: str) -> Generator:
    return GENERATORS[domain, op]


# References and cases of serving operators, and helpers of all tests, which tests import by name.
sys.path += [str(Path(__file__).parents[2] / "serving"), str(Path(__file__).parents[2])]

for _module in pkgutil.iter_modules(__path__):
    importlib.import_module(f"{__name__}.{_module.name}")
