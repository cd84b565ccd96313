"""All cases, by name. A new kind of case is a file with `cases()` and one line here."""

from __future__ import annotations

from dataclasses import replace
from fnmatch import fnmatchcase
from functools import cache
from pathlib import Path

from . import (
    attention,
    caches,
    computed_masks,
    convolutions,
    experts,
    exported,
    exporter,
    flex,
    half,
    left_over,
    linear,
    matmul,
    published,
    quantized,
    transformers,
)
from .case import Case
from .exported import ExportCase

_KINDS = (
    attention,
    computed_masks,
    flex,
    caches,
    matmul,
    transformers,
    convolutions,
    linear,
    experts,
    left_over,
    exported,
    exporter,
    published,
    quantized,
    half,
)


@cache
def all_cases() -> dict[str, Case]:
    """In the order of the report."""
    return {case.name: case for kind in _KINDS for case in kind.cases()}


def chosen(patterns: list[str], exports: Path | None = None) -> list[Case]:
    """Return the cases that match a pattern by name or group; without patterns all; exported models need `exports`.

    exports is the folder of the exported models. Raises ValueError for a vain pattern, or models without a folder.
    """
    selected = list(all_cases().values())
    for pattern in patterns:
        if not any(_matches(case, pattern) for case in selected):
            raise ValueError(f"no case or group matches '{pattern}'. The groups are {', '.join(groups())}.")
    if patterns:
        selected = [case for case in selected if any(_matches(case, pattern) for pattern in patterns)]
        if exports is None and any(isinstance(case, ExportCase) for case in selected):
            raise ValueError("exported models need --exports, the folder that tests/exports/export.py wrote.")
    elif exports is None:
        selected = [case for case in selected if not isinstance(case, ExportCase)]
    return [replace(case, folder=exports) if isinstance(case, ExportCase) else case for case in selected]


def groups() -> list[str]:
    return list(dict.fromkeys(case.group for case in all_cases().values()))


def _matches(case: Case, pattern: str) -> bool:
    return pattern in (case.group, case.name) or fnmatchcase(case.name, pattern)
