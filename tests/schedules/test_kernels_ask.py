"""Kernels ask `Bound` what they need of a problem: none looks at its masks, windows, lengths or layouts itself."""

from __future__ import annotations

import ast
from pathlib import Path

import schedules

ROOT = Path(schedules.__file__).parent
FORBIDDEN = {"mask", "window", "lengths", "row_axes", "layout"}


def looks(source: str) -> list[str]:
    """Expressions that read such a field of a problem."""
    found = []
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Attribute) and node.attr in FORBIDDEN:
            of = ast.unparse(node.value)
            if of in ("p", "problem") or of.endswith(".problem"):
                found.append(f"{of}.{node.attr}")
    return found


def test_kernels_ask() -> None:
    found = {str(path.relative_to(ROOT)): looks(path.read_text()) for path in ROOT.rglob("*.py")}
    assert len(found) > 30
    # The chooser makes sizes of 0 symbolic.
    assert {path: sorted(set(names)) for path, names in found.items() if names} == {
        "cuda/attention.py": ["problem.mask"]
    }


def test_a_look_is_noticed() -> None:
    source = "if self.bound.problem.window is None or p.mask: pass"
    assert sorted(looks(source)) == ["p.mask", "self.bound.problem.window"]
