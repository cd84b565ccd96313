"""Generated pages and pictures are up to date, what pages show runs, and they name all there is."""

from __future__ import annotations

import dataclasses
import inspect
import json
import re
import runpy
import shlex
import shutil
from pathlib import Path
from types import ModuleType
from typing import Any

import onnx
import pytest

import lowering
from lowering import flex
from lowering.commands.cli import create_parser
from lowering.flex import masks, mods
from lowering.manifest import Manifest
from lowering.version import VERSION
from tests.cases import node_cases
from tests.support.browser import what_is_cut
from tests.support.pages import blocks, follow

ROOT = Path(__file__).parents[2]
DOCS = ROOT / "docs"
EVERY = [ROOT / "README.md", *sorted(DOCS.rglob("*.md"))]
FLEX = (DOCS / "flex.md").read_text()


def test_the_site_is_built_without_a_warning_and_nothing_is_cut_off(tmp_path: Path) -> None:
    """Dead links and anchors, pages that the menu lacks, and names that are not found are warnings."""
    problems = runpy.run_path(str(DOCS / "site" / "build.py"))["build"](tmp_path)
    assert not problems, problems
    site = tmp_path / "site"
    assert (site / "reference" / "python.html").is_file()
    if shutil.which("chromium"):  # at the widths of common screens neither code nor tables are cut off
        names = ["index", "tutorial", "results", "flex", "reference/commands", "howto/gpu_host", "howto/decoder"]
        pages = [site / f"{name}.html" for name in names]
        selector = ".md-content pre > code, .md-content .md-typeset__scrollwrap"
        assert what_is_cut(pages, (1280, 1400), selector, tmp_path) == {}


def test_operators_page_is_generated_anew() -> None:
    page = runpy.run_path(str(DOCS / "operators.py"))["page"]()
    assert (DOCS / "operators.md").read_text() == page, "run `python docs/operators.py`"


@pytest.mark.parametrize(
    "operator",
    ["BatchNormalization", "Binarizer", "If", "Momentum", "Relu", "SequenceInsert", "StringSplit", "TreeEnsemble"],
)
def test_the_page_of_node_cases_is_generated_anew(operator: str) -> None:
    """A few operators: all cases take minutes."""
    namespace = runpy.run_path(str(DOCS / "node_cases.py"))
    text = (DOCS / "node_cases.md").read_text()
    refusals = namespace["refusals"](node_cases.every_model(operator))
    page = [line for line in text.splitlines() if line.startswith(f"| {operator} |")]
    assert page == namespace["rows"](refusals), "run `python docs/node_cases.py`"
    assert all(f"\n## {refusal.group().title}\n" in text for refusal in refusals)
    assert f"\nonnx {onnx.__version__} has " in text


@pytest.mark.parametrize("name", ["commands", "errors", "error_codes", "import_rules"])
def test_pages_of_the_reference_are_generated_anew(name: str) -> None:
    page = runpy.run_path(str(DOCS / f"{name}.py"))["page"]()
    assert (DOCS / "reference" / f"{name}.md").read_text() == page, f"run `python docs/{name}.py`"


def test_the_reference_has_every_public_name() -> None:
    """lowering.compile_flex and its like are the same objects as those of lowering.flex."""
    for module, page in ((lowering, "python.md"), (flex, "flex.md")):
        text = (DOCS / "reference" / page).read_text()
        named = set(re.findall(r"^::: ([\w.]+)$", text, re.MULTILINE)) | set(re.findall(r"`([\w.]+)`", text))
        for name in module.__all__:
            same = module is lowering and getattr(lowering, name) is getattr(flex, name, None)
            assert same or {f"{module.__name__}.{name}", name} & named, f"{name} is not in docs/reference/{page}"


def test_the_page_of_artifacts_names_every_field() -> None:
    text = (DOCS / "reference" / "artifact.md").read_text()
    assert not [field.name for field in dataclasses.fields(Manifest) if f"`{field.name}`" not in text]


def test_pictures_of_masks_are_drawn_anew(tmp_path: Path) -> None:
    pictures = runpy.run_path(str(DOCS / "flex_pictures.py"))["pictures"]()
    assert {path.stem for path in (DOCS / "pictures").iterdir()} == set(pictures)
    for name, picture in pictures.items():
        picture.save(tmp_path / "picture.svg")
        drawn, stored = tmp_path / "picture.svg", DOCS / "pictures" / f"{name}.svg"
        assert drawn.read_text() == stored.read_text(), "run `python docs/flex_pictures.py`"
        assert stored.stat().st_size < 30_000
        assert f"pictures/{name}.svg" in FLEX


CHEAP = ("online_softmax", "tiles", "masks", "memory")


@pytest.mark.parametrize(
    "name", [*CHEAP, *(pytest.param(name, marks=pytest.mark.slow) for name in ("stages", "numerics"))]
)
def test_figures_are_of_runs(name: str) -> None:
    """Numbers that rounding decides may be others on another machine."""
    run, _ = runpy.run_path(str(DOCS / "figures.py"))["FIGURES"][name]
    stored = json.loads((DOCS / "figures" / "data.json").read_text())[name]
    computed = json.loads(json.dumps(run()))
    assert close(computed, stored, 1.0 if name == "numerics" else 1e-3), "run `python docs/figures.py`"


def close(actual: Any, expected: Any, tolerance: float) -> bool:
    """Return whether two values of JSON are equal up to numbers that are close."""
    if isinstance(expected, dict):
        return list(actual) == list(expected) and all(close(actual[key], expected[key], tolerance) for key in expected)
    if isinstance(expected, list):
        return len(actual) == len(expected) and all(close(a, b, tolerance) for a, b in zip(actual, expected))
    return actual == expected or abs(actual - expected) <= tolerance * max(abs(expected), 1e-2 * tolerance)


def test_every_figure_is_shown() -> None:
    pages = "".join(path.read_text() for path in EVERY)
    drawn = {path.stem for path in (DOCS / "figures").glob("*.svg")}
    assert drawn == set(json.loads((DOCS / "figures" / "data.json").read_text()))
    assert not [name for name in drawn if f"figures/{name}.svg)" not in pages]


def library(module: ModuleType) -> set[str]:
    """Return the names of the functions that a module offers."""
    return {name for name, member in vars(module).items() if inspect.isfunction(member) and name[0] != "_"} - VOCABULARY


VOCABULARY = {"abs", "cast", "clip", "maximum", "minimum", "tanh", "where"}


@pytest.mark.parametrize("module", [masks, mods], ids=["masks", "mods"])
def test_the_page_of_flex_attention_names_the_library(module: ModuleType) -> None:
    listed = set(re.findall(r"`([a-z_0-9]+)(?:\(.*?\))?`", FLEX))
    assert library(module) and library(module) <= listed


# Those that are followed from the first block to the last one.
FOLLOWED = ["tutorial.md", "inspecting.md", "deployment.md", "flex.md", "flex_onnx.md"]
FOLLOWED += sorted(path.relative_to(DOCS).as_posix() for path in (DOCS / "howto").glob("*.md"))


@pytest.mark.parametrize("name", FOLLOWED)
def test_what_a_page_shows_runs(name: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    monkeypatch.chdir(tmp_path)
    follow(DOCS / name)


@pytest.mark.slow
@pytest.mark.parametrize("name", [n for n in FOLLOWED if any(b.mark == "slow" for b in blocks(DOCS / n))])
def test_all_that_a_page_shows_runs(name: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.chdir(tmp_path)
    follow(DOCS / name, slow=True)


def test_the_front_page_says_what_it_is_for_whom_and_in_what_state() -> None:
    text = (ROOT / "README.md").read_text().partition("## Why")[0]
    assert f"**Status**: {VERSION}, not on a package index yet" in text
    assert re.search(r"\*\*Requirements\*\*: Linux, Python 3\.10 .*gcc.*AVX2.*AArch64", text)
    assert re.search(r"\*\*Platforms\*\*: .*Windows.*macOS", text)
    assert "compiles whole models" in text and "It is for " in text
    assert text.count("```") == 4 and "pip install . && onnx-lowering demo" in text


def test_a_block_that_is_not_run_leaves_the_reader_in_place() -> None:
    """Blocks that run are followed in one terminal, which shows the folder; others must not change it."""
    blind = [block for page in EVERY for block in blocks(page) if block.language == "bash" and block.mark]
    lines = [(block.where, line) for block in blind for line in block.lines()]
    assert blind and not [(where, line) for where, line in lines if re.search(r"(^|&& *|; *)cd ", line)]


def test_every_command_that_is_shown_can_be_given() -> None:
    parser = create_parser()
    shown = [(block.where, arguments) for page in EVERY for block in blocks(page) for arguments in block.commands()]
    assert {arguments[0] for _, arguments in shown} >= {
        "compile",
        "verify",
        "tune",
        "measure",
        "device",
        "db",
        "package",
    }
    for where, arguments in shown:
        try:
            parser.parse_args(arguments)
        except SystemExit as error:
            assert error.code == 0, f"{where}: onnx-lowering {shlex.join(arguments)}"
