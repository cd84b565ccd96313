"""The tools that make a release: `python -m build`, and workflows, which run elsewhere and are read here."""

from __future__ import annotations

import importlib.util
import os
import re
import shlex
import shutil
import subprocess
import sys
import tarfile
import zipfile
from pathlib import Path
from typing import Any

import pytest
import yaml

from lowering.packaging.runtime_wheel import write_runtime_wheel
from lowering.version import VERSION

ROOT = Path(__file__).parents[2]
WORKFLOWS = sorted((ROOT / ".github" / "workflows").glob("*.yml"))
PACKAGES = ("lowering", "schedules")


@pytest.fixture(scope="module")
def dist(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """sdist and wheel, by the release's command, of a copy: building writes into the sources."""
    copy = tmp_path_factory.mktemp("release") / "source"
    copy.mkdir()
    for name in PACKAGES:
        shutil.copytree(ROOT / name, copy / name, ignore=shutil.ignore_patterns("__pycache__"))
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, copy)
    command = [sys.executable, "-m", "build", "--no-isolation"]
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    done = subprocess.run(command, cwd=copy, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    return copy / "dist"


def test_both_archives_contain_all_sources(dist: Path) -> None:
    """They include headers, C code and presets; the wheel was built from the contents of the sdist."""
    expected = {
        str(path.relative_to(ROOT))
        for package in PACKAGES
        for path in (ROOT / package).rglob("*")
        if path.is_file() and "__pycache__" not in path.parts
    }
    assert {Path(name).suffix for name in expected} >= {".py", ".c", ".cc", ".hpp", ".json"}
    with zipfile.ZipFile(dist / f"onnx_lowering-{VERSION}-py3-none-any.whl") as wheel:
        assert {name for name in wheel.namelist() if ".dist-info/" not in name} == expected
    with tarfile.open(dist / f"onnx_lowering-{VERSION}.tar.gz") as sdist:
        assert expected <= {name.partition("/")[2] for name in sdist.getnames()}


def test_what_is_published_is_described(dist: Path, tmp_path: Path) -> None:
    wheel = write_runtime_wheel(tmp_path)
    files = [*sorted(dist.iterdir()), wheel]
    assert len(files) == 3
    done = subprocess.run([sys.executable, "-m", "twine", "check", "--strict", *files], capture_output=True, text=True)
    assert done.returncode == 0 and done.stdout.count("PASSED") == 3, done.stdout + done.stderr


def steps(workflow: Path) -> list[dict[str, Any]]:
    jobs = yaml.safe_load(workflow.read_text())["jobs"]
    needed = {name for job in jobs.values() for name in job.get("needs", [])}
    assert needed <= jobs.keys()
    return [step for job in jobs.values() for step in job["steps"]]


@pytest.mark.parametrize("workflow", WORKFLOWS, ids=lambda path: path.name)
def test_workflows_call_what_there_is(workflow: Path) -> None:
    """Actions at a version; scripts and modules that are here, programs that are, too, or that a step has installed."""
    installed = {"python"}
    for step in steps(workflow):
        assert ("run" in step) != ("uses" in step)
        if "uses" in step:
            assert re.fullmatch(r"[\w-]+/[\w-]+@[\w./-]+", step["uses"])
            continue
        subprocess.run(["bash", "-n", "-c", step["run"]], check=True)
        program, *arguments = shlex.split(step["run"])
        if program.startswith("."):
            assert os.access(ROOT / program, os.X_OK)
        else:
            assert program in installed or shutil.which(program)
        if arguments[:1] == ["-m"]:
            assert importlib.util.find_spec(arguments[1]) is not None
        if arguments[1:3] == ["pip", "install"]:
            installed |= {"onnx-lowering" if name == "." else name for name in arguments[3:]}


def test_ci_tests_two_pythons_and_tries_the_oldest() -> None:
    jobs = yaml.safe_load((ROOT / ".github" / "workflows" / "ci.yml").read_text())["jobs"]
    oldest = re.search(r'requires-python = ">=([\d.]+)"', (ROOT / "pyproject.toml").read_text())
    assert oldest is not None and len(jobs["tests"]["strategy"]["matrix"]["python"]) == 2
    assert {"run": ".ci/run"} in jobs["tests"]["steps"]
    assert {"python-version": oldest[1]} in [step.get("with") for step in jobs["oldest-python"]["steps"]]


def test_the_tag_must_be_the_version() -> None:
    release = ROOT / ".github" / "workflows" / "release.yml"
    (check,) = [step["run"] for step in steps(release) if "GITHUB_REF_NAME" in step.get("run", "")]
    path = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
    for tag, status in ((f"v{VERSION}", 0), ("v99", 1), (VERSION, 1)):
        environment = {**os.environ, "GITHUB_REF_NAME": tag, "PATH": path}
        assert subprocess.run(["bash", "-c", check], cwd=ROOT, env=environment).returncode == status
