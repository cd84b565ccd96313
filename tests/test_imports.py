"""The arrows of docs/architecture.md, read off the sources."""

from __future__ import annotations

import ast
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]

# Package -> (modules of this project that it may import, whether it may import tvm)
RULES = {
    "lowering/runtime": (
        {
            "lowering.runtime",
            "lowering.arithmetic",
            "lowering.errors",
            "lowering.machine",
            "lowering.manifest",
            "lowering.notebook",
        },
        False,
    ),
    "lowering/packaging": (
        {
            "lowering.packaging",
            "lowering.runtime",
            "lowering.machine",
            "lowering.manifest",
            "lowering.errors",
            "lowering.version",
        },
        False,
    ),
    "lowering/diagnosis": ({"lowering.diagnosis", "lowering.cache_folder", "lowering.machine"}, False),
    "lowering/graph": (
        {
            "lowering.graph",
            "lowering.fusion",
            "lowering.arithmetic",
            "lowering.choices",
            "lowering.errors",
            "lowering.manifest",
            "lowering.runtime.checks",
        },
        False,
    ),
    "lowering/importing": (
        {
            "lowering.importing",
            "lowering.ops",
            "lowering.graph",
            "lowering.tensorir",
            "lowering.arithmetic",
            "lowering.errors",
            "lowering.manifest",
        },
        True,
    ),
    "lowering/tensorir": ({"lowering.tensorir"}, True),
    "lowering/profiling": (
        {
            "lowering.profiling",
            "lowering.runtime",
            "lowering.machine",
            "lowering.manifest",
            "lowering.notebook",
            "lowering.arithmetic",
            "lowering.errors",
            "lowering.units",
        },
        False,
    ),
    "lowering/checking": (
        {
            "lowering.checking",
            "lowering.choices",
            "lowering.compiling",
            "lowering.fusion",
            "lowering.graph",
            "lowering.importing",
            "lowering.profiling",
            "lowering.runtime",
            "lowering.serving",
            "lowering.machine",
            "lowering.manifest",
            "lowering.notebook",
            "lowering.errors",
            "lowering.version",
        },
        False,
    ),
    "lowering/reporting": (
        {
            "lowering.reporting",
            "lowering.about",
            "lowering.arithmetic",
            "lowering.compiling.dump_folder",
            "lowering.attention",
            "lowering.profiling",
            "lowering.runtime",
            "lowering.machine",
            "lowering.manifest",
            "lowering.records",
            "lowering.errors",
            "lowering.units",
            "schedules",
        },
        False,
    ),
    "lowering/measuring": ({"lowering.measuring", "lowering.runtime", "lowering.records", "lowering.errors"}, False),
    "lowering/fleet": (
        {"lowering.fleet", "lowering.machine", "lowering.measuring", "lowering.runtime", "lowering.errors"},
        True,
    ),
    "lowering/attention": ({"lowering.attention", "lowering.arithmetic", "lowering.tensorir"}, True),
    "lowering/serving": ({"lowering.serving", "lowering.manifest", "lowering.errors"}, False),
    "lowering/functions": (
        {"lowering.functions", "lowering.ops", "lowering.compiling", "lowering.runtime", "lowering.errors"},
        True,
    ),
    "lowering/flex": (
        {
            "lowering.cache_folder",
            "lowering.deprecated",
            "lowering.flex",
            "lowering.attention.alibi",
            "lowering.attention.expr.node",
            "lowering.attention.flex_node",
            "lowering.compiling.compiler",
            "lowering.machine",
            "lowering.runtime",
            "lowering.errors",
        },
        False,
    ),
    "schedules": (
        {
            "schedules",
            "lowering.attention",
            "lowering.tensorir",
        },
        True,
    ),
    "lowering/fusion": (
        {"lowering.errors", "lowering.fusion", "lowering.graph.fold", "lowering.graph.legality"},
        False,
    ),
    "lowering/ops": (
        {
            "lowering.ops",
            "lowering.importing",
            "lowering.graph.legality",
            "lowering.graph.mixture",
            "lowering.attention",
            "lowering.tensorir",
            "lowering.arithmetic",
            "lowering.errors",
        },
        True,
    ),
}


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
