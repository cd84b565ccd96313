"""Imports follow import_rules.py, and what is imported early stays light."""

from __future__ import annotations

import ast
import subprocess
import sys
from pathlib import Path

import pytest

from tests.project.import_rules import RULES

ROOT = Path(__file__).parents[2]


def imported(path: Path) -> set[str]:
    """The absolute names of all modules that a source file imports, at top level or inside functions."""
    package = path.relative_to(ROOT).with_suffix("").parts[:-1]
    names = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            base = package[: len(package) - node.level + 1] if node.level else ()
            module = ".".join((*base, node.module) if node.module else base)
            names |= {f"{module}.{alias.name}" for alias in node.names} if not node.module else {module}
    return names


@pytest.mark.parametrize("folder", RULES)
def test_arrows(folder: str) -> None:
    allowed, compiler = RULES[folder]
    sources = sorted((ROOT / folder).rglob("*.py"))
    assert sources
    for source in sources:
        for name in imported(source):
            if name.split(".")[0] in ("lowering", "schedules"):
                assert any(name == a or name.startswith(a + ".") for a in allowed), f"{source} imports {name}"
            if name.split(".")[0] == "tvm":
                assert compiler, f"{source} imports the compiler"


def test_importing_lowering_imports_no_compiler() -> None:
    names = "lowering.load; lowering.Model; lowering.flex_attention; lowering.flex.create_block_mask"
    code = f"import sys, lowering; {names}; assert 'tvm' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True, cwd=ROOT)


def test_help_imports_nothing_heavy() -> None:
    """The command answers at once: neither NumPy nor TVM nor what they bring."""
    code = """
import sys
from lowering.commands.cli import main
try:
    main(["--help"])
except SystemExit:
    pass
heavy = {"numpy", "onnx", "onnx_ir", "rich", "torch", "tvm", "tvm_ffi"} & set(sys.modules)
assert not heavy, heavy
"""
    subprocess.run([sys.executable, "-c", code], check=True, cwd=ROOT, stdout=subprocess.DEVNULL)


@pytest.mark.parametrize("name", ["load", "compile"])
def test_torch_is_not_imported(tmp_path: Path, name: str) -> None:
    """Though tvm_ffi and tvm would where it is installed. It can be imported afterwards."""
    (tmp_path / "torch.py").write_text("imported = True\n")
    code = f"""
import lowering
lowering.{name}
assert "tvm_ffi" in sys.modules and "torch" not in sys.modules
import torch
assert torch.imported
"""
    program = f"import sys; sys.path.insert(0, {str(tmp_path)!r})\n{code}"
    subprocess.run([sys.executable, "-c", program], check=True, cwd=ROOT)


def test_public_names_are_what_they_say_however_often_they_are_used() -> None:
    """A submodule of the same name would replace the function at its first import."""
    code = """
import lowering, lowering.commands.cli
for _ in range(2):
    for name in lowering.__all__:
        assert callable(getattr(lowering, name)), name
"""
    subprocess.run([sys.executable, "-c", code], check=True, cwd=ROOT)
