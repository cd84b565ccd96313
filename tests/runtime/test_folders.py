"""Writing artifact folders: nothing that was there is lost, whoever else reads or writes, and whatever fails."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest

import lowering
from lowering.runtime.artifact import folders
from tests.runtime import modules
from tests.support.error_codes import raises


@pytest.fixture
def folder(artifact: Callable[..., Path], tmp_path: Path) -> Path:
    lowering.load(artifact("dense")).save(tmp_path / "out")
    return tmp_path / "out"


def contents(folder: Path) -> dict[str, bytes]:
    return {p.name: p.read_bytes() for p in folder.iterdir()}


@pytest.fixture(params=["exchange", "two renames"])
def way(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """Both ways of replacing a folder."""
    if request.param == "two renames":
        monkeypatch.setattr(folders, "_exchange", lambda first, second: False)
    return request.param


def test_this_kernel_exchanges_folders(tmp_path: Path) -> None:
    for name in "ab":
        (tmp_path / name).mkdir()
        (tmp_path / name / name).touch()
    assert folders._exchange(tmp_path / "a", tmp_path / "b")
    assert os.listdir(tmp_path / "a") == ["b"] and os.listdir(tmp_path / "b") == ["a"]


@pytest.mark.parametrize("step", [0, 1])
def test_a_failed_rename_leaves_the_old_artifact(
    step: int, folder: Path, artifact: Callable[..., Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    before, module = contents(folder), lowering.load(artifact("addition"))
    monkeypatch.setattr(folders, "_exchange", lambda first, second: False)
    rename, calls = Path.rename, []

    def fail_once(self: Path, target: Path) -> Path:
        calls.append(target)
        if len(calls) == step + 1:
            raise OSError(5, "Input/output error", str(target))
        return rename(self, target)

    monkeypatch.setattr(Path, "rename", fail_once)
    with raises("artifact.folder_not_writable"):
        module.save(folder)
    assert contents(folder) == before and os.listdir(folder.parent) == ["out"]


def test_a_failed_exchange_leaves_the_old_artifact(
    folder: Path, artifact: Callable[..., Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(first: Path, second: Path) -> bool:
        raise OSError(16, "Device or resource busy", str(second))

    monkeypatch.setattr(folders, "_exchange", fail)
    before = contents(folder)
    with raises("artifact.folder_not_writable"):
        lowering.load(artifact("addition")).save(folder)
    assert contents(folder) == before and os.listdir(folder.parent) == ["out"]


def killed(folder: Path, where: str, patch: str = "") -> None:
    """A process that saves to the folder and is killed when `where` is called."""
    code = f"""
import os, signal, sys
sys.modules["torch"] = None
import lowering
from lowering.runtime.artifact import folders
{patch}
{where} = lambda *_: os.kill(os.getpid(), signal.SIGKILL)
lowering.load({str(folder)!r}).save({str(folder)!r})
"""
    done = subprocess.run([sys.executable, "-c", code], cwd=modules.ROOT, timeout=60)
    assert done.returncode == -signal.SIGKILL


def test_the_next_writer_removes_what_a_killed_one_has_left(folder: Path) -> None:
    module = lowering.load(folder)
    before = contents(folder)
    killed(folder, "folders._put")
    assert contents(folder) == before and len(os.listdir(folder.parent)) == 2
    with folders.replace_folder(folder.parent / "another") as new:
        (new / "model.h").touch()
    assert len(os.listdir(folder.parent)) == 3, "not those of another folder"
    module.save(folder)
    assert contents(folder) == before and sorted(os.listdir(folder.parent)) == ["another", "out"]


def test_an_artifact_that_a_killed_writer_had_moved_aside_comes_back(
    folder: Path, artifact: Callable[..., Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    before = contents(folder)
    rename = "moved = folders.Path.rename\n"
    two = f"{rename}folders._exchange = lambda *_: (moved({str(folder)!r}, _[0].parent / 'old'), kill())"
    killed(folder, "kill", two)
    assert not folder.exists()
    monkeypatch.setattr("lowering.runtime.artifact.files._PATIENCE", 0.01)
    with raises("artifact.folder_moved"):
        lowering.load(folder)
    # Also for a writer that then fails.
    with pytest.raises(ZeroDivisionError), folders.replace_folder(folder):
        raise ZeroDivisionError
    assert contents(folder) == before and os.listdir(folder.parent) == ["out"]


def test_a_writer_at_work_is_left_alone(folder: Path) -> None:
    module = lowering.load(folder)
    with folders.replace_folder(folder) as first:
        module.save(folder)
        assert first.is_dir()
        (first / "model.h").write_text("the last one stays")
    assert os.listdir(folder) == ["model.h"] and os.listdir(folder.parent) == ["out"]


# -- concurrent savers and loaders ------------------------------------------------------------------------------------

SAVER = """
import sys; sys.modules["torch"] = None
import lowering, time
from lowering.runtime.artifact import folders
if {two}: folders._exchange = lambda first, second: False
folders._sync = lambda folder: None  # the disk's time
models = [lowering.load(folder) for folder in {sources}]
print("ready", flush=True); sys.stdin.readline()
end, saves = time.monotonic() + 1.5, 0
while time.monotonic() < end:
    models[saves % 2].save({folder!r}); saves += 1
print(saves)
"""
LOADER = """
import sys; sys.modules["torch"] = None
import lowering, time, numpy as np
x = np.ones((3, 64), "f")
lowering.load({folder!r})
print("ready", flush=True); sys.stdin.readline()
end, seen = time.monotonic() + 1.5, []
while time.monotonic() < end:
    model = lowering.load({folder!r})
    outputs = model.run({{t.name: x for t in model.inputs}})
    assert ("s" in outputs) == (len(model.inputs) == 1)
    seen.append(len(outputs))
print(len(seen))
"""


def test_savers_and_loaders(way: str, artifact: Callable[..., Path], folder: Path) -> None:
    """Two processes replace an artifact by another and back while two load it: no load fails, and none is mixed."""
    fields = {
        "two": way == "two renames",
        "sources": [str(artifact(n)) for n in ("dense", "addition")],
        "folder": str(folder),
    }
    scripts = [SAVER.format(**fields)] * 2 + [LOADER.format(**fields)] * 2
    pipe = subprocess.PIPE
    children = [
        subprocess.Popen([sys.executable, "-c", c], cwd=modules.ROOT, stdin=pipe, stdout=pipe, text=True)
        for c in scripts
    ]
    for child in children:
        assert child.stdout is not None and child.stdout.readline() == "ready\n"
    results = []
    for child in children:
        assert child.stdin is not None
        child.stdin.write("\n")
        child.stdin.flush()
    for child in children:
        results.append(child.communicate(timeout=60)[0])
    assert [child.returncode for child in children] == [0] * 4
    assert all(int(count) > 2 for count in results), results
    assert os.listdir(folder.parent) == ["out"] and lowering.load(folder).inputs


# -- links ------------------------------------------------------------------------------------------------------------


def test_a_link_stays_and_what_it_points_to_is_replaced(
    way: str, folder: Path, artifact: Callable[..., Path], tmp_path: Path
) -> None:
    (tmp_path / "links").mkdir()
    link = tmp_path / "links" / "latest"
    link.symlink_to("../out")
    lowering.load(artifact("addition")).save(link)
    assert link.is_symlink() and [t.name for t in lowering.load(folder).inputs] == ["x", "y"]
    assert os.listdir(link.parent) == ["latest"] and sorted(os.listdir(tmp_path)) == ["links", "out"]


def test_links_to_nothing_and_to_each_other(artifact: Callable[..., Path], tmp_path: Path) -> None:
    (tmp_path / "link").symlink_to("nowhere/yet")
    lowering.load(artifact("addition")).save(tmp_path / "link")
    assert (tmp_path / "link").is_symlink() and lowering.load(tmp_path / "nowhere" / "yet").inputs
    for a, b in ("pq", "qp"):
        (tmp_path / a).symlink_to(b)
    with raises("artifact.folder_not_writable"):
        lowering.load(artifact("addition")).save(tmp_path / "p")
    with raises("artifact.folder_unreadable"):
        lowering.load(tmp_path / "p")


# -- what cannot be written -------------------------------------------------------------------------------------------


def test_paths_that_cannot_be_written(folder: Path, artifact: Callable[..., Path]) -> None:
    module = lowering.load(artifact("addition"))
    with raises("artifact.folder_not_writable"):
        module.save(folder / "model.so" / "deeper" / "out")
    with raises("artifact.folder_not_writable"):
        module.save(folder.parent / ("n" * 250))
    with raises("artifact.folder_not_replaceable"):
        module.save("/")


def test_a_limit_of_the_size_of_files(folder: Path) -> None:
    """A limit acts as a full disk does, in the middle of the weights: the error names the file; no data are lost."""
    before = contents(folder)
    code = f"""
import resource, lowering
model = lowering.load({str(folder)!r})
resource.setrlimit(resource.RLIMIT_FSIZE, (5000, 5000))
try: model.save({str(folder)!r})
except lowering.ArtifactError as error: message = str(error)
assert "out' cannot be written: File too large" in message and "before is unchanged." in message, message
"""
    assert modules.run_python(code) == 0
    assert contents(folder) == before and os.listdir(folder.parent) == ["out"]


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of 64 KiB; needs root."""
    folder = tmp_path / "disk"
    folder.mkdir()
    options = ["mount", "-t", "tmpfs", "-o", "size=64k", "none", str(folder)]
    if subprocess.run(options, capture_output=True).returncode != 0:
        pytest.skip("no file system can be mounted")
    yield folder
    subprocess.run(["umount", str(folder)], check=True)


def test_a_full_disk(small_disk: Path, artifact: Callable[..., Path]) -> None:
    module = lowering.load(artifact("dense"))
    with raises("artifact.folder_not_writable"):
        module.save(small_disk / "out")
    assert os.listdir(small_disk) == []
    with raises("artifact.folder_not_writable"):
        module.save(small_disk)


# -- files that change while they are loaded --------------------------------------------------------------------------


@pytest.mark.parametrize("damage", ["os.truncate(path, 0)", "path.write_bytes(bytes(path.stat().st_size))"])
@pytest.mark.parametrize("name", ["weights.bin", "model.so"])
def test_files_that_change_while_they_are_loaded(name: str, damage: str, folder: Path) -> None:
    """In a process of its own, which a mapping would end by SIGBUS; the model is not called before."""
    code = f"""
import os, lowering, numpy as np
from pathlib import Path
model, again = lowering.load({str(folder)!r}), lowering.load({str(folder)!r})
x = np.ones((2, 64), "f")
right = again.run({{"x": x}})["y"]
path = Path({str(folder / name)!r})
{damage}
np.testing.assert_array_equal(model.run({{"x": x}}, threads=2)["y"], right)
np.testing.assert_array_equal(again.bind({{"x": x}})()["y"], right)
try: model.save({str(folder.parent / "copy")!r})
except lowering.ArtifactError as error: assert "{name}' " in str(error), error
else: raise SystemExit("saved")
try: lowering.load({str(folder)!r})
except lowering.ArtifactError as error: assert "{name}' " in str(error), error
else: raise SystemExit("loaded")
"""
    assert modules.run_python(code) == 0
    assert os.listdir(folder.parent) == ["out"]


@pytest.mark.parametrize("size", [0, 1, 4096, -1])
def test_weights_that_are_cut_off(size: int, folder: Path) -> None:
    path = folder / "weights.bin"
    whole = path.stat().st_size
    os.truncate(path, size if size >= 0 else whole - 1)
    with raises("artifact.file_changed", "artifact.file_truncated"):
        lowering.load(folder)


def test_things_that_are_no_files(folder: Path) -> None:
    for name, make in (("model.h", os.mkfifo), ("weights.bin", os.mkdir)):
        (folder / name).unlink()
        make(folder / name)
        with raises("artifact.file_missing"):
            lowering.load(folder)


def test_weights_in_forked_processes(folder: Path) -> None:
    """A child shares its parent's weights, without their file."""
    code = f"""
import os, shutil, lowering, numpy as np
model = lowering.load({str(folder)!r})
x = np.ones((2, 64), "f")
right = model.run({{"x": x}}, threads=1)["y"]
shutil.rmtree({str(folder)!r})
if os.fork() == 0:
    os._exit(not np.array_equal(model.run({{"x": x}}, threads=1)["y"], right))
assert os.wait()[1] == 0
"""
    assert modules.run_python(code) == 0


def test_the_answer_does_not_depend_on_the_writer(way: str, folder: Path) -> None:
    x = np.ones((1, 64), "f")
    before = lowering.load(folder).run({"x": x})["y"]
    lowering.load(folder).save(folder)
    np.testing.assert_array_equal(lowering.load(folder).run({"x": x})["y"], before)
    assert os.listdir(folder.parent) == ["out"]
