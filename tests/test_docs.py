"""The generated page of operators is up to date."""

from __future__ import annotations

import runpy
from pathlib import Path

DOCS = Path(__file__).parents[1] / "docs"


def test_operators_page_is_generated_anew() -> None:
    page = runpy.run_path(str(DOCS / "operators.py"))["page"]()
    assert (DOCS / "operators.md").read_text() == page, "run `python docs/operators.py`"
