"""CPU time and memory of the compilation of a decoder of a published width.

The weights are random and in a file of their own, as exporters write large models. The compiler runs as its command,
in a process of its own, whose memory is sampled: RssAnon and RssShmem of /proc/PID/status. Pages of mapped files do
not count: the machine can drop them.
"""

from __future__ import annotations

import os
import resource
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import onnx
from onnx import TensorProto, helper

from lowering.demo.decoder import DecoderConfig, ModelBuilder, build_decoder

WIDTHS = {
    # Llama 3.2 1B and Llama 3 8B, whose heads are matrices of their own here.
    "llama-1b": DecoderConfig(16, 2048, 32, 8, 64, 8192, 128256),
    "llama-8b": DecoderConfig(32, 4096, 32, 8, 128, 14336, 128256),
}

_DATA = "weights.data"
_SAMPLE_SECONDS = 0.02
_NOISE = 1 << 20  # random numbers that weights repeat, each from a start of its own
_BLOCK = 32  # successive k that share a scale


@dataclass(frozen=True)
class CompilationCost:
    """Seconds, seconds of CPU, and the peak of bytes that no file backs."""

    seconds: float
    cpu: float
    peak: int


class _LargeModelBuilder(ModelBuilder):
    """Writes weights to a file as nodes read them, in `dtype`; with int4, matrices are those of MatMulNBits."""

    def __init__(self, folder: Path, dtype: np.dtype, is_int4: bool) -> None:
        super().__init__(seed=0)
        self.dtype, self.is_int4, self.count = dtype, is_int4, 0
        self.file = (folder / _DATA).open("wb")
        self.noise = np.tile(self.rng.standard_normal(_NOISE).astype(np.float32), 2)
        self.pending: dict[str, tuple[tuple[int, ...], float]] = {}  # shapes and scales of weights that no node reads

    def constant(self, array: np.ndarray, name: str) -> str:
        return super().constant(array.astype(self.dtype) if array.dtype == np.float32 else array, name)

    def weight(self, *shape: int, name: str, scale: float | None = None) -> str:
        self.pending[name] = shape, float(1 / np.sqrt(shape[0]) if scale is None else scale)
        self.count += int(np.prod(shape))
        return name

    def node(self, op: str, *inputs: str, name: str, **attributes: Any) -> str:
        weight = next((value for value in inputs if value in self.pending), None)
        if weight is None:
            return super().node(op, *inputs, name=name, **attributes)
        shape, scale = self.pending.pop(weight)
        if op != "MatMul" or not self.is_int4:
            self.write(weight, shape, (self.noise * np.float32(scale)).astype(self.dtype))
            return super().node(op, *inputs, name=name, **attributes)
        (k, n), blocks = shape, shape[0] // _BLOCK
        self.write(f"{weight}.values", (n, blocks, _BLOCK // 2), self.noise.view(np.uint8))
        self.write(f"{weight}.scales", (n, blocks), np.full(2 * _NOISE, scale / 4, self.dtype))
        operands = (inputs[0], f"{weight}.values", f"{weight}.scales")
        sizes = {"K": k, "N": n, "bits": 4, "block_size": _BLOCK, "accuracy_level": 4}
        return super().node("MatMulNBits", *operands, name=name, domain="com.microsoft", **sizes, **attributes)

    def write(self, name: str, shape: tuple[int, ...], noise: np.ndarray) -> None:
        """Add an initializer whose data, which repeats `noise`, is in the file."""
        begin, left = self.file.tell(), int(np.prod(shape))
        while left:
            first = int(self.rng.integers(_NOISE))
            left -= self.file.write(noise[first : first + min(left, _NOISE)].tobytes()) // noise.itemsize
        tensor = TensorProto(name=name, dims=shape, data_type=helper.np_dtype_to_tensor_dtype(noise.dtype))
        entries = {"location": _DATA, "offset": str(begin), "length": str(self.file.tell() - begin)}
        tensor.data_location = TensorProto.EXTERNAL
        tensor.external_data.extend(onnx.StringStringEntryProto(key=k, value=v) for k, v in entries.items())
        self.initializers.append(tensor)


def write_decoder(folder: Path, config: DecoderConfig, dtype: str) -> tuple[Path, int]:
    """Write the model with weights, activations and caches of that type; return its path and number of weights.

    With int4, matrices are those of MatMulNBits, and the rest is float16.
    """
    numpy_dtype = np.dtype({"bfloat16": ml_dtypes.bfloat16, "int4": np.float16}.get(dtype, dtype))
    graph = _LargeModelBuilder(folder, numpy_dtype, dtype == "int4")
    model = build_decoder(config, graph)
    graph.file.close()
    for value in (*model.graph.input, *model.graph.output):
        if value.type.tensor_type.elem_type == TensorProto.FLOAT:
            value.type.tensor_type.elem_type = helper.np_dtype_to_tensor_dtype(numpy_dtype)
    model.opset_import.append(helper.make_opsetid("com.microsoft", 1))
    path = folder / "model.onnx"
    onnx.save(model, path)
    return path, graph.count


def run(names: Sequence[str], dtype: str, options: Sequence[str], parent: Path | None) -> None:
    """Print the cost of compiling each decoder; the compiler's cache of artifacts is not used."""
    for name in names:
        with tempfile.TemporaryDirectory(dir=parent, prefix="large-decoder-") as folder:
            path, count = write_decoder(Path(folder), WIDTHS[name], dtype)
            cost = compile_measured(path, Path(folder), options)
            data = (Path(folder) / _DATA).stat().st_size
            size = sum(file.stat().st_size for file in (Path(folder) / "compiled").iterdir())
            print(
                f"{name} {dtype} {' '.join(options) or 'unchanged'}: {count / 1e9:.2f} billion weights, "
                f"{data / 2**30:.2f} GiB; {cost.seconds:.0f} s, {cost.cpu:.0f} s of CPU "
                f"({cost.cpu / 60 / (count / 1e9):.2f} minutes a billion); peak {cost.peak / 2**30:.2f} GiB of RssAnon "
                f"and RssShmem; artifact {size / 2**30:.2f} GiB",
                flush=True,
            )


def compile_measured(path: Path, folder: Path, options: Sequence[str]) -> CompilationCost:
    """Compile a model into `folder`/compiled, without other caches, and return the cost."""
    command = [sys.executable, "-m", "lowering", "compile", str(path), "-o", str(folder / "compiled"), *options]
    environment = {**os.environ, "ONNX_LOWERING_CACHE": str(folder / "cache")}
    before, start, peak = resource.getrusage(resource.RUSAGE_CHILDREN), time.perf_counter(), 0
    process = subprocess.Popen(command, env=environment)
    while process.poll() is None:
        peak = max(peak, _read_memory(process.pid))
        time.sleep(_SAMPLE_SECONDS)
    if process.returncode:
        sys.exit(f"{' '.join(command)} failed with exit status {process.returncode}")
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    cpu = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
    return CompilationCost(time.perf_counter() - start, cpu, peak)


def _read_memory(pid: int) -> int:
    """Return the bytes of a process that no file backs; 0 once it has ended."""
    try:
        lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    except OSError:
        return 0
    return sum(int(line.split()[1]) << 10 for line in lines if line.startswith(("RssAnon", "RssShmem")))
