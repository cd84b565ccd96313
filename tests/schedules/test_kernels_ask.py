"""Kernels ask `Bound` for facts of a problem: none reads its masks, windows, lengths or layouts itself."""

from __future__ import annotations

import ast
from pathlib import Path

import schedules

ROOT = Path(schedules.__file__).parent
FORBIDDEN = {"mask", "window", "lengths", "row_axes", "layout"}


def looks(source: str) -> list[str]:
    """Return the expressions that read such a field of a problem."""
    reads = []
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Attribute) and node.attr in FORBIDDEN:
            owner = ast.unparse(node.value)
            if owner in ("p", "problem") or owner.endswith(".problem"):
                reads.append(f"{owner}.{node.attr}")
    return reads


def test_kernels_ask() -> None:
    reads_by_file = {str(path.relative_to(ROOT)): looks(path.read_text()) for path in ROOT.rglob("*.py")}
    assert len(reads_by_file) > 30
    # The chooser makes sizes of 0 symbolic.
    assert {path: sorted(set(names)) for path, names in reads_by_file.items() if names} == {
        "cuda/attention/attention.py": ["problem.mask"]
    }


def test_a_look_is_noticed() -> None:
    source = "if self.bound.problem.window is None or p.mask: pass"
    assert sorted(looks(source)) == ["p.mask", "self.bound.problem.window"]
