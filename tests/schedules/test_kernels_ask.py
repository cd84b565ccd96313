"""Kernels ask `Bound` for facts of a problem: none reads its masks, windows, lengths or layouts itself.

mypy checks it by type: it reads the records without these fields, and names every expression of a kernel that has one.
"""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from mypy import api

ROOT = Path(__file__).parents[2]

HIDDEN = {
    "lowering/attention/record/problem.py": ("mask", "window", "lengths", "row_axes", "layout"),
    "lowering/attention/kv_write.py": ("layout",),
}
"""Fields that visibility and addressing depend on, by the file of the record."""


def find_reads(folder: Path, *sources: Path) -> list[str]:
    """Return the errors of mypy for reads of hidden fields in the sources, schedules by default."""
    options = []
    for file, fields in HIDDEN.items():
        text, shadow = (ROOT / file).read_text(), folder / Path(file).name
        for field in fields:
            text, count = re.subn(rf"^    {field}: ", f"    hidden_{field}: ", text, count=1, flags=re.MULTILINE)
            assert count == 1, f"{file} has no field {field}"
        shadow.write_text(text)
        options += ["--shadow-file", file, str(shadow)]
    files = tuple(map(str, sources)) or ("schedules",)
    command = [*options, "--cache-dir", str(folder / "cache"), "--no-error-summary", *files, "lowering/attention"]
    output, failure, _ = api.run(command)
    assert not failure, failure
    assert "lowering/attention/" in output  # the records read their own hidden fields
    return [
        line
        for line in output.splitlines()
        if line.startswith(files) and re.search(r'"(AttentionProblem|KvWrite)" has no attribute', line)
    ]


@pytest.fixture(autouse=True)
def in_root(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a folder for the shadows of the records, and for mypy's cache."""
    return tmp_path_factory.mktemp("shadows")


def test_kernels_ask(folder: Path) -> None:
    assert find_reads(folder) == []


def test_a_read_is_noticed_under_any_name(folder: Path, tmp_path: Path) -> None:
    source = tmp_path / "kernel.py"
    source.write_text("""
from lowering.attention.codegen.bound import BoundAttention
from lowering.attention.kv_write import BoundKvWrite

def emit(attention: BoundAttention, write: BoundKvWrite) -> None:
    facts = attention.problem
    print(facts.window, attention.problem.mask, facts.head_dim, write.record.layout)
""")
    names = [re.findall(r'no attribute "(\w+)"', line)[0] for line in find_reads(folder, source)]
    assert names == ["window", "mask", "layout"]
