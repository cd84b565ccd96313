"""Compiled code of others is not used: the cache and all folders above it are the user's alone."""

from __future__ import annotations

import os
import stat
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import onnx
import pytest

import lowering
from lowering import cache_folder
from lowering.compiling import compilation
from lowering.compiling.cache import artifact_cache, object_cache

pytestmark = pytest.mark.optimized  # other code has a folder of its own

TEXT = '<ir_version: 10, opset_import: ["": 21]> g (float[n] x) => (float[n] y) { y = Exp (x) }'
Patch = pytest.MonkeyPatch


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, artifacts_are_cached: None) -> Path:
    folder = tmp_path / "above" / "cache"
    monkeypatch.setenv("ONNX_LOWERING_CACHE", str(folder))
    return folder


def test_new_folders_are_private(cache: Path) -> None:
    before = os.umask(0)
    try:
        object_cache.put("k", b"code")
    finally:
        os.umask(before)
    assert object_cache.get("k") == b"code"
    for folder in (cache / "objects", cache, cache.parent):
        assert stat.S_IMODE(folder.stat().st_mode) == 0o700


def of_another(path: Path, monkeypatch: Patch) -> None:
    """Give it away, or be somebody else where only root can do that."""
    other = os.geteuid() + 1000
    if os.geteuid() == 0:
        os.chown(path, other, other)
    else:
        monkeypatch.setattr(os, "geteuid", lambda: other)


CHANGES: dict[str, Callable[[Path, Patch], None]] = {
    "all may write": lambda cache, _: cache.chmod(0o777),
    "its group may": lambda cache, _: (cache / "objects").chmod(0o770),
    "all may write above": lambda cache, _: cache.parent.chmod(0o777),
    "all may write, and remove what is theirs": lambda cache, _: (cache / "objects").chmod(0o1777),
    "it is somebody else's": lambda cache, patch: of_another(cache / "objects", patch),
    "what is above is": lambda cache, patch: of_another(cache.parent, patch),
}


@pytest.mark.parametrize("change", CHANGES)
def test_folders_of_others_are_not_used(
    change: str, cache: Path, caplog: pytest.LogCaptureFixture, monkeypatch: Patch
) -> None:
    object_cache.put("k", b"code")
    assert object_cache.get("k") == b"code"
    CHANGES[change](cache, monkeypatch)
    cache_folder._is_private.cache_clear()
    assert object_cache.get("k") is None and object_cache.size() == (0, 0)
    object_cache.put("other", b"code")
    assert not (cache / "objects" / "other.object").exists()
    (text,) = [record.getMessage() for record in caplog.records]  # said once
    assert "is not used" in text and "ONNX_LOWERING_CACHE" in text


@pytest.mark.parametrize(
    ("members", "own_group", "is_trusted"),
    [([], 77, True), (["me"], 77, True), (["me", "you"], 77, False), ([], 78, False)],
)
def test_groups_of_one_user(
    members: list[str], own_group: int, is_trusted: bool, tmp_path: Path, monkeypatch: Patch
) -> None:
    """Where each user has a group, that group may write: nobody else is in it."""
    status = SimpleNamespace(st_uid=os.geteuid(), st_gid=77, st_mode=0o40775)
    monkeypatch.setattr(cache_folder.grp, "getgrgid", lambda _: SimpleNamespace(gr_mem=members))
    monkeypatch.setattr(cache_folder.pwd, "getpwuid", lambda _: SimpleNamespace(pw_gid=own_group, pw_name="me"))
    monkeypatch.setattr(Path, "stat", lambda *_, **__: status)
    assert (cache_folder.find_distrust_reason(tmp_path) is None) == is_trusted


def test_loops_of_links_are_no_cache(cache: Path) -> None:
    cache.parent.mkdir()
    cache.symlink_to(cache)
    object_cache.put("k", b"code")
    assert object_cache.get("k") is None


def test_links_are_followed(cache: Path, tmp_path: Path) -> None:
    """The location of the folder decides."""
    real = tmp_path / "real"
    real.mkdir()
    real.chmod(0o777)
    cache.parent.mkdir()
    cache.symlink_to(real)
    assert cache_folder.find_distrust_reason(cache / "objects") is not None
    real.chmod(0o700)
    assert cache_folder.find_distrust_reason(cache / "objects") is None


def test_sticky_folders_above_are_no_harm(tmp_path: Path) -> None:
    tmp_path.chmod(0o1777)
    (tmp_path / "own").mkdir(mode=0o700)
    assert cache_folder.find_distrust_reason(tmp_path / "own" / "new") is None
    assert cache_folder.find_distrust_reason(tmp_path) is not None


def test_a_planted_artifact_is_not_delivered(cache: Path, tmp_path: Path) -> None:
    """The cache has another model under the key, in a folder that others could write."""
    path = tmp_path / "m.onnx"
    onnx.save(onnx.parser.parse_model(TEXT), path)
    key = artifact_cache.key(path, compilation.CompileOptions())
    assert key is not None
    planted = lowering.compile(onnx.parser.parse_model(TEXT.replace("Exp", "Neg")))
    planted.save(cache / "artifacts" / key.name)
    x = np.ones(3, np.float32)
    np.testing.assert_array_equal(lowering.compile(path).run({"x": x})["y"], -x)  # whoever could write is trusted
    cache.chmod(0o777)
    cache_folder._is_private.cache_clear()
    np.testing.assert_allclose(lowering.compile(path).run({"x": x})["y"], np.exp(x), rtol=1e-6)


def test_names_in_a_database_count(tmp_path: Path, cache: Path) -> None:
    path, database = tmp_path / "m.onnx", tmp_path / "database"
    onnx.save(onnx.parser.parse_model(TEXT), path)
    (database / "x86-aaa").mkdir(parents=True)
    (database / "x86-aaa" / "records.json").write_text("{}")
    options = compilation.CompileOptions(database=database)
    first = artifact_cache.key(path, options)
    (database / "x86-aaa").rename(database / "x86-bbb")
    second = artifact_cache.key(path, options)
    assert first is not None and second is not None and first.name != second.name


def test_doctor_says_so(cache: Path) -> None:
    cache.mkdir(parents=True)
    cache.chmod(0o777)
    done = subprocess.run([sys.executable, "-m", "lowering", "doctor"], capture_output=True, text=True)
    assert "others may write to" in done.stdout and "chmod go-w" in done.stdout
