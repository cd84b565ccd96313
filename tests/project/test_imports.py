"""Imports follow import_rules.py, and what is imported early stays light."""

from __future__ import annotations

import ast
import subprocess
import sys
from pathlib import Path

import pytest

from tests.project.import_rules import CYCLES, FORBIDDEN, RULES

ROOT = Path(__file__).parents[2]


SOURCES = {
    ".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__"): path
    for folder in ("lowering", "schedules")
    for path in sorted((ROOT / folder).rglob("*.py"))
}


def imported(path: Path, tree: ast.Module | None = None) -> set[str]:
    """The absolute names of all modules that a source file imports, at top level or inside functions."""
    package = path.relative_to(ROOT).with_suffix("").parts[:-1]
    names = set()
    for node in ast.walk(tree or ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            base = package[: len(package) - node.level + 1] if node.level else ()
            module = ".".join((*base, node.module) if node.module else base)
            submodules = {name for alias in node.names if (name := f"{module}.{alias.name}") in SOURCES}
            names |= submodules or {module}
    return names


def imported_at_run_time(path: Path) -> set[str]:
    """Those of the imported modules that are not imported for types alone."""
    tree = ast.parse(path.read_text())
    for node in ast.walk(tree):
        if isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING":
            node.body = [ast.Pass()]
    return imported(path, tree)


def find_cycles(arrows: dict[str, set[str]]) -> set[frozenset[str]]:
    """The groups of nodes that reach each other, and have more than one node."""
    reached = {node: set(targets) for node, targets in arrows.items()}
    changed = True
    while changed:
        changed = False
        for targets in reached.values():
            more = set().union(*(reached.get(target, ()) for target in targets)) - targets
            targets |= more
            changed = changed or bool(more)
    groups = (frozenset(b for b in reached[a] if a in reached.get(b, ())) | {a} for a in reached)
    return {group for group in groups if len(group) > 1}


def package_of(module: str) -> str:
    """The package below `lowering`, or `schedules` as a whole."""
    return "schedules" if module.startswith("schedules") else ".".join(module.split(".")[:2])


def test_packages_do_not_import_each_other() -> None:
    """Not for types either. The names of `lowering` itself are functions of its packages, imported at first use."""
    arrows: dict[str, set[str]] = {}
    for module, path in SOURCES.items():
        targets = {package_of(name) for name in imported(path) if name in SOURCES and name != "lowering"}
        arrows.setdefault(package_of(module), set()).update(targets - {package_of(module)})
    arrows.pop("lowering")
    assert not find_cycles(arrows)


def test_modules_do_not_import_each_other() -> None:
    arrows = {
        module: {name for name in imported_at_run_time(path) if name in SOURCES and name not in (module, "lowering")}
        for module, path in SOURCES.items()
    }
    assert find_cycles(arrows) == set(CYCLES)


def test_cycles_are_noticed() -> None:
    assert find_cycles({"a": {"b"}, "b": {"c"}, "c": {"b"}, "d": {"a"}}) == {frozenset("bc")}


@pytest.mark.parametrize("folder", FORBIDDEN)
def test_interfaces(folder: str) -> None:
    for module, path in SOURCES.items():
        if module.split(".")[0] == folder:
            names = {name for name in imported(path) if name.startswith(FORBIDDEN[folder])}
            assert not names, f"{module} imports {names}"


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
