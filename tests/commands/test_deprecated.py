"""Old public names work, and warn."""

from __future__ import annotations

import pytest

from lowering import deprecated
from lowering.commands.cli import main
from lowering.flex import masks
from lowering.runtime.artifact import pickling


@pytest.mark.parametrize(("old", "new"), deprecated.COMMANDS.items())
def test_commands(old: str, new: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        main([old, "--help"])
    captured = capsys.readouterr()
    assert ended.value.code == 0 and f"usage: onnx-lowering {new}" in captured.out
    assert captured.err == f"warning: the command {old} is now {new}\n"


def test_masks() -> None:
    with pytest.warns(DeprecationWarning, match=r"lowering\.flex\.masks\.neighbourhood is now .*\.neighborhood"):
        old = masks.neighbourhood
    assert old is masks.neighborhood
    with pytest.raises(AttributeError, match="has no attribute 'nowhere'"):
        _ = masks.nowhere


def test_json() -> None:
    document = {"quantized": 3, "nodes": [{"fix": "none"}]}
    old = {"quantized": 3, "quantised": 3, "nodes": [{"fix": "none", "mend": "none"}]}
    assert deprecated.with_old_fields(document) == old


def test_pickles() -> None:
    assert pickling.unpacked is pickling.unpack_model
