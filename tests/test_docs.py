"""Generated pages and pictures are up to date, what docs/flex.md shows runs, and it names all there is."""

from __future__ import annotations

import doctest
import inspect
import re
import runpy
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from lowering.flex import masks, mods

DOCS = Path(__file__).parents[1] / "docs"
FLEX = (DOCS / "flex.md").read_text()


def test_operators_page_is_generated_anew() -> None:
    page = runpy.run_path(str(DOCS / "operators.py"))["page"]()
    assert (DOCS / "operators.md").read_text() == page, "run `python docs/operators.py`"


def test_pictures_of_masks_are_drawn_anew(tmp_path: Path) -> None:
    pictures = runpy.run_path(str(DOCS / "flex_pictures.py"))["pictures"]()
    assert {path.stem for path in (DOCS / "pictures").iterdir()} == set(pictures)
    for name, picture in pictures.items():
        picture.save(tmp_path / "picture.svg")
        made, kept = tmp_path / "picture.svg", DOCS / "pictures" / f"{name}.svg"
        assert made.read_text() == kept.read_text(), "run `python docs/flex_pictures.py`"
        assert kept.stat().st_size < 30_000
        assert f"pictures/{name}.svg" in FLEX


def library(module: ModuleType) -> set[str]:
    """The names of the functions that a module offers."""
    return {name for name, each in vars(module).items() if inspect.isfunction(each) and name[0] != "_"} - VOCABULARY


VOCABULARY = {"abs", "cast", "clip", "maximum", "minimum", "tanh", "where"}


@pytest.mark.parametrize("module", [masks, mods], ids=["masks", "mods"])
def test_the_page_of_flex_attention_names_the_library(module: ModuleType) -> None:
    listed = set(re.findall(r"`([a-z_0-9]+)(?:\(.*?\))?`", FLEX))
    assert library(module) and library(module) <= listed


def test_examples_of_flex_attention_run(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Blocks of code one after the other, and what the prompts in them print."""
    monkeypatch.setenv("COLUMNS", "80")
    monkeypatch.chdir(tmp_path)  # where they save
    names: dict[str, Any] = {}
    blocks = re.findall(r"```python\n(.*?)```", FLEX, re.DOTALL)
    assert blocks
    for block in blocks:
        if block.startswith(">>>"):
            test = doctest.DocTestParser().get_doctest(block, names, "docs/flex.md", None, None)
            assert not doctest.DocTestRunner(verbose=False).run(test).failed
        else:
            exec(block, names)
