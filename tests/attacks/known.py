"""Findings that are known: by operator, the kinds that an attack in CI meets today, and why.

The list is to become empty. Whoever mends an operator removes its line, and `pytest tests/attacks/test_attacks.py` must
pass without it; when none is left, this file goes, and with it `known` in test_attacks.py. What CI runs of an operator
is `python -m tests.attacks OPERATOR --seed 0`.
"""

from __future__ import annotations

KNOWN: dict[str, tuple[str, ...]] = {
    # A legal length for which there is no memory: the allocator's error names no node (`--seed 1`).
    "Range": ("unclear",),
}
