"""All cases, by name. A new kind of case is a file with `cases()` and one line here."""

from __future__ import annotations

from fnmatch import fnmatchcase

from . import attention, caches, computed_masks, matmul, transformers
from .case import Case

_KINDS = (attention, computed_masks, caches, matmul, transformers)


def all_cases() -> dict[str, Case]:
    """In the order of the report."""
    return {case.name: case for kind in _KINDS for case in kind.cases()}


def chosen(patterns: list[str]) -> list[Case]:
    """The cases that a pattern matches by name or by group, all without patterns. Raises ValueError for a vain one."""
    found = all_cases().values()
    for pattern in patterns:
        if not any(_matches(case, pattern) for case in found):
            raise ValueError(f"no case or group matches '{pattern}'. The groups are {', '.join(groups())}.")
    return [case for case in found if not patterns or any(_matches(case, p) for p in patterns)]


def groups() -> list[str]:
    return list(dict.fromkeys(case.group for case in all_cases().values()))


def _matches(case: Case, pattern: str) -> bool:
    return pattern in (case.group, case.name) or fnmatchcase(case.name, pattern)
