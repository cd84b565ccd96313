"""The packages that errors and pages recommend can be installed: this package is on no index."""

from __future__ import annotations

import builtins
import json
import re
from collections.abc import Iterator
from importlib import metadata
from pathlib import Path
from typing import Any

import pytest

import lowering
from lowering import machine

ROOT = Path(__file__).parents[2]


def texts() -> Iterator[Path]:
    for pattern in (
        "README.md",
        "lowering/**/*.py",
        "docs/**/*.md",
        "docs/*.py",
        "examples/**/*",
        "benchmarks/**/*.py",
    ):
        yield from (path for path in ROOT.glob(pattern) if path.is_file() and path.suffix not in (".png", ".pyc"))


def test_nobody_is_sent_to_an_index_for_this_package() -> None:
    """By its name pip would find nothing, or what somebody else has put there."""
    wrong_lines = []
    for path in texts():
        for line in path.read_text().splitlines():
            asked = re.search(r"pip install\b([^&]*)", line)
            if asked and re.search(r"(?<![/\w])onnx[-_]lowering(-runtime)?(?![\w*.])", asked[1]):
                is_in_checkout = re.search(r"'?\.(\[\w+\])?'?.* in a checkout of onnx-lowering", asked[1])
                if not is_in_checkout and "--find-links" not in asked[1] and "WHEEL" not in asked[1]:
                    wrong_lines.append(f"{path.relative_to(ROOT)}: {line.strip()}")
    assert not wrong_lines, "\n".join(wrong_lines)


@pytest.mark.parametrize("extra", ["", "cuda", "fleet", "tune"])
def test_from_a_checkout(extra: str) -> None:
    suffix = f"[{extra}]" if extra else ""
    assert machine.install_command(extra) == f"pip install '{ROOT}{suffix}'"
    assert machine.install_command(extra, "--upgrade") == f"pip install --upgrade '{ROOT}{suffix}'"
    assert not extra or extra in (ROOT / "pyproject.toml").read_text()


class Wheel:
    """An installed distribution, which knows where it came from."""

    def __init__(self, said: str | None) -> None:
        self.said = said

    def read_text(self, name: str) -> str | None:
        return self.said if name == "direct_url.json" else None


@pytest.fixture
def elsewhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """As if the package lay in site-packages."""
    monkeypatch.setattr(machine, "__file__", str(tmp_path / "site-packages" / "lowering" / "machine.py"))
    return tmp_path


GONE = "pip install '.[tune]' in a checkout of onnx-lowering"


def test_from_a_wheel_file(elsewhere: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    wheel = elsewhere / "a folder" / "onnx_lowering-0.1.0-py3-none-any.whl"
    said = json.dumps({"url": wheel.as_uri(), "archive_info": {}})
    monkeypatch.setattr(metadata, "distributions", lambda name: [Wheel(None), Wheel(said)])
    assert machine.install_command("tune") == GONE  # no longer there
    wheel.parent.mkdir()
    wheel.write_bytes(b"")
    assert machine.install_command("tune") == f"pip install '{wheel}[tune]'"


ORIGINS = {
    "not installed": [],
    "from an index": [Wheel(None)],
    "from a web page": [Wheel('{"url": "https://example.org/onnx_lowering.whl"}')],
    "damaged": [Wheel("{")],
    "of another form": [Wheel("{}")],
}


@pytest.mark.parametrize("case", ORIGINS)
def test_an_unknown_source_of_the_package(case: str, elsewhere: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(metadata, "distributions", lambda name: ORIGINS[case])
    assert machine.install_command("tune") == GONE
    monkeypatch.setattr(machine, "runtime_alone", lambda: True)
    assert machine.install_command("cuda") == (
        "pip install 'WHEEL[cuda]', where WHEEL is the file of onnx-lowering-runtime"
    )


def test_a_missing_onnxruntime(monkeypatch: pytest.MonkeyPatch) -> None:
    """It is one package, and no extra of ours."""
    real = builtins.__import__

    def without(name: str, *arguments: Any) -> Any:
        if name.partition(".")[0] == "onnxruntime":
            raise ImportError(name)
        return real(name, *arguments)

    monkeypatch.setattr(builtins, "__import__", without)
    model = '<ir_version: 10, opset_import: ["" : 20]> m (float[n] x) => (float[n] y) { y = Exp (x) }'
    import onnx

    with pytest.raises(lowering.LoweringError) as error:
        lowering.verify(onnx.parser.parse_model(model), against="onnxruntime")
    assert str(error.value) == "onnxruntime is not installed. Install it: pip install onnxruntime."
