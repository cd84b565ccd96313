"""Kernels are compiled once for each kind of call, and cached on disk for other processes."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest

from lowering import flex

RNG = np.random.default_rng(0)


@pytest.fixture(autouse=True)
def empty_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    monkeypatch.setenv("ONNX_LOWERING_CACHE", str(tmp_path))
    flex.cache_clear()
    yield tmp_path / "flex"
    flex.cache_clear()


def biased(s, b, h, i, j, *, bias):
    return s + bias[i, j]


def attend(rows: int = 3, keys: int = 5, batch: int = 1, dtype: Any = "f", **options: Any) -> np.ndarray:
    q = RNG.standard_normal((batch, 2, rows, 4)).astype(dtype)
    k, v = (RNG.standard_normal((batch, 2, keys, 4)).astype(dtype) for _ in range(2))
    return flex.flex_attention(q, k, v, **options)


def count_compiled(call: Callable[[], Any]) -> int:
    """Return how many kernels a call compiles."""
    before = flex.cache_info().misses
    call()
    return flex.cache_info().misses - before


# -- what needs a kernel of its own -----------------------------------------------------------------------------------


def test_values_and_lengths_share_a_kernel() -> None:
    def call(rows: int, keys: int, batch: int, more: int = 0) -> None:
        attend(rows, keys, batch, score_mod=biased, captures={"bias": RNG.standard_normal((rows + more, keys))})

    assert count_compiled(lambda: call(3, 5, 1)) == 1
    for sizes in ((3, 5, 1), (1, 5, 1), (40, 70, 3), (3, 5, 1, 2), (0, 3, 2), (3, 0, 2)):
        assert count_compiled(lambda: call(*sizes)) == 0  # noqa: B023
    assert flex.cache_info() == (6, 0, 1, 1)


def test_a_mod_that_is_written_twice_shares_a_kernel() -> None:
    assert count_compiled(lambda: attend(score_mod=lambda s, b, h, i, j: s + (i - j))) == 1
    assert count_compiled(lambda: attend(score_mod=lambda score, x, y, row, key: score + (row - key))) == 0


def test_block_masks_share_a_kernel_but_for_sizes_of_blocks() -> None:
    def call(size: int, rows: int, heads: int | None = None) -> None:
        attend(rows, 9, block_mask=flex.create_block_mask(flex.masks.causal, None, heads, rows, 9, size))

    assert count_compiled(lambda: call(4, 7)) == 2  # one that finds the blocks
    assert count_compiled(lambda: call(4, 30)) == 0
    assert count_compiled(lambda: call(4, 7, 2)) == 1  # which differ by head
    assert count_compiled(lambda: call(8, 7)) == 2


VARIATIONS: dict[str, dict[str, Any]] = {
    "type": {"dtype": "f2"},
    "half precision": {"dtype": ml_dtypes.bfloat16},
    "lse": {"return_lse": True},
    "scale": {"scale": 0.25},
    "mod": {"score_mod": lambda s, b, h, i, j, *, bias: s - bias[i, j]},
    "mask": {"mask_mod": flex.masks.causal},
    "type of a captured array": {"captures": {"bias": np.ones((3, 5), "f2")}},
    "rank of a captured array": {
        "score_mod": lambda s, b, h, i, j, *, bias: s + bias[0, i, j],
        "captures": {"bias": np.ones((1, 3, 5), "f")},
    },
}


@pytest.mark.sampled(3)
@pytest.mark.parametrize("case", VARIATIONS)
def test_each_variation_has_a_kernel_of_its_own(case: str) -> None:
    usual = {"score_mod": biased, "captures": {"bias": np.ones((3, 5), "f")}}
    attend(**usual)
    assert count_compiled(lambda: attend(**usual | VARIATIONS[case])) == 1
    assert count_compiled(lambda: attend(**usual | VARIATIONS[case])) == 0


# -- the folder -------------------------------------------------------------------------------------------------------

SCRIPT = """
import sys
import numpy as np
from lowering import flex
x = np.arange(48, dtype="f").reshape(1, 2, 6, 4) % 5
block_mask = flex.create_block_mask(flex.masks.causal, None, None, 6, 6, 2)
y = flex.flex_attention(x, x, x, lambda s, b, h, i, j: 3 * flex.tanh(s / 3), block_mask=block_mask)
info = flex.cache_info()
print("tvm" in sys.modules, info.disk_hits, info.misses, float(y.sum()))
"""


def other_process(folder: Path) -> subprocess.Popen[str]:
    environment = os.environ | {"ONNX_LOWERING_CACHE": str(folder)}
    return subprocess.Popen([sys.executable, "-c", SCRIPT], env=environment, stdout=subprocess.PIPE, text=True)


def read_report(process: subprocess.Popen[str]) -> tuple[bool, int, int, float]:
    """Return whether the compiler was imported, kernels from disk, kernels compiled, and a result."""
    compiler, disk, misses, result = process.communicate()[0].split()
    assert process.returncode == 0
    return compiler == "True", int(disk), int(misses), float(result)


def test_other_processes_find_kernels_on_disk_without_the_compiler(empty_cache: Path) -> None:
    first = read_report(other_process(empty_cache.parent))
    assert first[:3] == (True, 0, 2)
    assert read_report(other_process(empty_cache.parent)) == (False, 2, 0, first[3])


def truncated(kernel: Path) -> None:
    code = next(kernel.glob("*.so"))
    code.write_bytes(code.read_bytes()[: code.stat().st_size // 2])


def other_bytes(kernel: Path) -> None:
    code = next(kernel.glob("*.so"))
    code.write_bytes(b"\0" * code.stat().st_size)


def without_manifest(kernel: Path) -> None:
    (kernel / "manifest.json").unlink()


def no_json(kernel: Path) -> None:
    (kernel / "manifest.json").write_text("{")


def emptied(kernel: Path) -> None:
    shutil.rmtree(kernel)
    kernel.mkdir()


def a_file(kernel: Path) -> None:
    shutil.rmtree(kernel)
    kernel.write_text("no kernel")


def of_something_else(kernel: Path) -> None:
    shutil.rmtree(kernel)
    kernel.mkdir()
    (kernel / "notes.txt").write_text("no kernel")


@pytest.mark.parametrize(
    "damage", [truncated, other_bytes, without_manifest, no_json, emptied, a_file, of_something_else]
)
def test_a_damaged_kernel_is_compiled_anew(damage: Callable[[Path], None], empty_cache: Path) -> None:
    x = np.arange(24, dtype="f").reshape(1, 2, 3, 4)
    expected = flex.flex_attention(x, x, x)
    (kernel,) = empty_cache.iterdir()
    damage(kernel)
    for misses, disk in ((1, 0), (0, 1)):  # it is written again, too
        flex.cache_clear()
        np.testing.assert_array_equal(flex.flex_attention(x, x, x), expected)
        assert flex.cache_info() == (0, disk, misses, 1)


def test_processes_that_compile_the_same_at_once(empty_cache: Path) -> None:
    results = [read_report(process) for process in [other_process(empty_cache.parent) for _ in range(2)]]
    assert results[0][3] == results[1][3]
    assert read_report(other_process(empty_cache.parent)) == (False, 2, 0, results[0][3])
    assert len(list(empty_cache.iterdir())) == 2  # nothing half written is left


def test_a_folder_that_cannot_be_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("ONNX_LOWERING_CACHE", str(tmp_path / "file"))
    assert np.isfinite(attend()).all() and flex.cache_info().misses == 1


def test_clearing_the_disk(empty_cache: Path) -> None:
    attend()
    flex.cache_clear(disk=True)
    assert not empty_cache.exists()
    assert count_compiled(attend) == 1
