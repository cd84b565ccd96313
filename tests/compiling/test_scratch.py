"""Large arrays of a compilation are in files, and the compiler needs little memory for the rest."""

from __future__ import annotations

import errno
import mmap
import os
from pathlib import Path

import numpy as np
import onnx
import pytest
from onnx import helper, numpy_helper

from benchmarks.large_decoders import compile_measured, write_decoder
from lowering import scratch
from lowering.chunks import map_columns
from lowering.compiling.compilation import compiled
from lowering.compiling.compiler import compile_to
from lowering.compiling.options import CompileOptions
from lowering.demo.decoder import DecoderConfig
from lowering.errors import ArtifactError
from tests.support.error_codes import raises

_MEBIBYTE = 1 << 20


def is_mapped(array: np.ndarray) -> bool:
    base: object = array
    while isinstance(base, np.ndarray):
        base = base.base
    return isinstance(base.obj if isinstance(base, memoryview) else base, mmap.mmap)


def test_arrays_are_in_files_of_the_folder_only(tmp_path: Path) -> None:
    array = np.arange(_MEBIBYTE, dtype=np.uint8)
    assert scratch.store(array) is array  # no folder is set
    with scratch.use_folder(tmp_path / "missing" / "artifact"):
        stored = scratch.store(array)
        assert is_mapped(stored) and (stored == array).all() and stored.dtype == array.dtype
        assert scratch.store(stored[::2]) is not stored and is_mapped(scratch.store(stored[::2]))
        assert not is_mapped(scratch.store(array[:100].copy()))
        assert not os.listdir(tmp_path)  # a nameless file
    assert not is_mapped(scratch.empty((_MEBIBYTE,), np.dtype(np.uint8)))


def test_many_arrays_need_few_descriptors(tmp_path: Path) -> None:
    """They do not overlap, and outlive the folder's use."""
    before = len(os.listdir("/proc/self/fd"))
    with scratch.use_folder(tmp_path):
        arrays = [scratch.store(np.full(_MEBIBYTE + k, k, np.uint8)) for k in range(50)]
        assert len(os.listdir("/proc/self/fd")) <= before + 2
    assert all(is_mapped(array) and (array == k).all() for k, array in enumerate(arrays))
    del arrays
    assert len(os.listdir("/proc/self/fd")) == before


def test_no_room_is_an_error_and_no_signal(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: int) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    rng = np.random.default_rng(0)
    graph = helper.make_graph(
        [helper.make_node("MatMul", ["x", "w"], ["y"])],
        "m",
        [helper.make_tensor_value_info("x", onnx.TensorProto.FLOAT, ["n", 512])],
        [helper.make_tensor_value_info("y", onnx.TensorProto.FLOAT, ["n", 1024])],
        [numpy_helper.from_array(rng.standard_normal((512, 1024), np.float32), "w")],
    )
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 21)], ir_version=10)
    monkeypatch.setattr(os, "posix_fallocate", refuse)
    with raises("artifact.scratch_not_writable", kind=ArtifactError) as caught:
        compile_to(tmp_path / "out", model)
    assert str(tmp_path) in str(caught.value) and not os.listdir(tmp_path)


@pytest.mark.parametrize("options", [{}, {"weights": "int4"}, {"weights": "int8"}, {"precision": "bfloat16"}], ids=str)
def test_packed_weights_are_mapped(options: dict, tmp_path: Path) -> None:
    model, _ = write_decoder(tmp_path, DecoderConfig(1, 512, 4, 2, 128, 4096, 8192, 512), "float32")
    with scratch.use_folder(tmp_path):
        (artifact,) = compiled(model, CompileOptions(**options)).artifacts
    large = [array for array in artifact.weights.values() if array.nbytes >= _MEBIBYTE]
    assert len(large) > 2 and all(map(is_mapped, large))


def test_chunks_of_columns() -> None:
    """All columns are visited once, in order, whatever the shape; an error of a chunk is the caller's."""
    for rows, columns, multiple in ((1, 3 << 20, 1), (100_000, 37, 8), (0, 5, 1), (7, 0, 4), (3, 1 << 20, 3)):
        chunks = map_columns(lambda chunk: chunk, rows, columns, multiple)
        assert [chunk.start for chunk in chunks] == [0, *(chunk.stop for chunk in chunks)][: len(chunks)]
        assert (chunks[-1].stop if chunks else 0) == columns
        assert all((chunk.stop - chunk.start) % multiple == 0 for chunk in chunks[:-1])
    with np.errstate(over="raise"), pytest.raises(FloatingPointError):
        map_columns(lambda chunk: np.float32(1e38) * np.ones(2, np.float32) * 10, 1 << 19, 9)


@pytest.mark.slow
@pytest.mark.parametrize("options", [[], ["--weights", "int4"], ["--precision", "bfloat16"]], ids=str)
def test_memory_does_not_grow_with_the_model(options: list[str], tmp_path: Path) -> None:
    """By 16 layers instead of 2, of 50 MiB each, it grows by less than one of them."""
    peaks = []
    for layers in (2, 16):
        (tmp_path / str(layers)).mkdir()
        model, _ = write_decoder(tmp_path / str(layers), DecoderConfig(layers, 1024, 16, 4, 64, 3072, 8192), "float32")
        peaks.append(compile_measured(model, tmp_path / str(layers), options).peak)
    assert peaks[1] < peaks[0] + 50 * _MEBIBYTE
