"""Whole models on the emulated GPU: exports of transformers, caches written in place, arrays of either memory."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import ml_dtypes
import numpy as np
import onnx
import pytest
import tvm_ffi

import lowering
from lowering.choices import Precision
from lowering.manifest import TensorSpec
from lowering.runtime.arrays import tensors
from lowering.runtime.devices import Gpu
from tests import cuda_emulation as emulated
from tests.cuda.audits.matmul_code import matmuls
from tests.cuda.models import exported
from tests.cuda_emulation import device

SAMPLES = Path(__file__).parents[2] / "exports" / "samples"


BARS = {None: 1e-5, "float16": 5e-3, "bfloat16": 3e-2}
MODELS: list[tuple[str, str, Precision | None]] = [
    ("llama-past-dynamo23", "sm_90a", "bfloat16"),
    ("gemma2-past-dynamo23", "sm_80", None),
    ("t5-dynamo18", "sm_90a", "float16"),
    ("modernbert-dynamo23", "sm_80", "bfloat16"),
    ("distilbert-traced17", "sm_80", "float16"),
    ("gemma3-past-dynamo18-batch1", "sm_120", "float16"),
    ("bloom-dynamo18-fixed", "sm_100", "bfloat16"),
]


@pytest.mark.sampled(4)
@pytest.mark.parametrize(("name", "arch", "precision"), MODELS)
def test_sample(name: str, arch: str, precision: Precision | None) -> None:
    kernels, worst = emulated.run(exported.measured, SAMPLES / name, arch, precision, arch=arch, timeout=500)
    assert worst < BARS[precision] and kernels["matmuls"] > 0
    assert kernels["matmuls by ordinary" if precision is None else "matmuls by matmul"] == kernels["matmuls"]


@pytest.mark.slow
def test_a_sample_of_float16() -> None:
    folder = SAMPLES / "whisper-past-dynamo23-f16"
    kernels, worst = emulated.run(exported.measured, folder, "sm_80", None, arch="sm_80", timeout=500)
    assert worst < BARS["float16"] and kernels["matmuls by matmul"] == kernels["matmuls"] > 0


@pytest.mark.sampled(6)
@pytest.mark.no_gpu
@pytest.mark.parametrize(("name", "arch", "precision"), [m for m in MODELS if m[2] is not None])
def test_matmuls_are_on_tensor_cores(name: str, arch: str, precision: Precision) -> None:
    """By the machine code of every launch. (Attentions have heads too narrow for that in samples.)"""
    manifest, model_matmuls = matmuls(SAMPLES / name / "model.onnx", arch, precision)
    own = [matmul for matmul in model_matmuls if matmul.kind != "attention"]
    assert {kernel.name for kernel in manifest.kernels if kernel.kind in ("matmul", "conv")} == {p.name for p in own}
    assert own and all(matmul.on_tensor_cores for matmul in own), [str(matmul) for matmul in own]


@pytest.mark.no_gpu
@pytest.mark.slow
def test_matmuls_of_float32_are_not() -> None:
    _, model_matmuls = matmuls(SAMPLES / "distilbert-traced17" / "model.onnx", "sm_80", None)
    assert model_matmuls and not any(matmul.on_tensor_cores for matmul in model_matmuls)


def greedy() -> tuple[list[str], bool]:
    """Run a decoder that ends in ArgMax.

    Return the rules of its functions without matmuls, and whether each token is that of the largest logit."""
    folder = SAMPLES / "llama-past-dynamo23"
    model = onnx.load(folder / "model.onnx")
    model.graph.node.append(onnx.helper.make_node("ArgMax", ["logits"], ["token"], axis=-1, keepdims=0))
    model.graph.output.append(onnx.helper.make_tensor_value_info("token", onnx.TensorProto.INT64, ["b", "s"]))
    compiled = lowering.compile(model, "cuda:sm_80")
    with np.load(folder / "0.npz") as arrays:
        results = compiled.run({spec.name: arrays[spec.name] for spec in compiled.inputs})
    rules = [kernel.schedule for kernel in compiled.manifest.kernels if kernel.kind == "other"]
    return rules, np.array_equal(results["token"], results["logits"].argmax(-1))


def test_a_greedy_decoder() -> None:
    rules, right = emulated.run(greedy, arch="sm_80", timeout=500)
    assert right and not set(rules) & {"ordinary", "plain"}


def decoding(precision: Precision | None) -> tuple[float, set[int], bool]:
    """Compare a decoder with slot caches with the CPU, after a fork too.

    Return the difference of logits, the copies between host and GPU in a step, and whether `run` updates GPU caches
    in place."""
    path = SAMPLES / "llama-past-dynamo23" / "model.onnx"
    gpu, cpu = (
        lowering.compile(path, target, static_cache=16, precision=precision) for target in ("cuda:sm_80", "cpu")
    )
    ids = np.random.default_rng(0).integers(0, 30, (2, 7))
    gpu_decoder, cpu_decoder = gpu.decoder(), cpu.decoder()
    pairs = [(gpu_decoder.prefill(ids[:, :4])[:, -1], cpu_decoder.prefill(ids[:, :4])[:, -1])]
    copies = set()
    for a, b in ((gpu_decoder.fork(), cpu_decoder.fork()), (gpu_decoder, cpu_decoder)):
        for column in (4, 5) if a is gpu_decoder else (6,):
            device.take_calls()
            pairs.append((a.step(ids[:, column]), b.step(ids[:, column])))
            copies.add(sum(call.name.startswith("cudaMemcpy") for call in device.take_calls()))
    assert all(type(a) is np.ndarray and a.dtype == b.dtype for a, b in pairs)
    worst = max(float(np.abs(a - b).max() / np.ptp(b)) for a, b in pairs)

    rng = np.random.default_rng(1)
    sizes = {d: 2 for spec in gpu.inputs for d in spec.dims if isinstance(d, str)}
    feeds = {}
    for spec in gpu.inputs:
        shape = [d if isinstance(d, int) else sizes[d] for d in spec.dims]
        array = rng.standard_normal(shape).astype(spec.dtype) if spec.dtype == "float32" else np.ones(shape, spec.dtype)
        feeds[spec.name] = on_gpu(array) if spec.name in gpu.manifest.donated else array
    results = gpu.run(feeds)
    in_place = all(results[out] is feeds[name] for name, out in gpu.manifest.donated.items())
    return worst, copies, in_place


def serving() -> tuple[float, set[int]]:
    """Compare requests over a served decoder with an int8 cache with the CPU.

    Return the difference of logits, and the copies between host and GPU in a step."""
    path, worst = SAMPLES / "mistral-past-dynamo18" / "model.onnx", 0.0
    how = lowering.Serve(32, 8, cache="int8")
    batchers = [lowering.Batcher(lowering.compile(path, target, serve=how), 8, 9) for target in ("cuda:sm_80", "cpu")]
    for name, prompt in (("a", range(13)), ("b", range(3, 8))):
        for batcher in batchers:
            batcher.add(name, prompt)
    copies = set()
    for token in range(4):
        device.take_calls()
        gpu, cpu = (batcher.step() for batcher in batchers)
        copies.add(sum(call.name.startswith("cudaMemcpy") for call in device.take_calls()))
        assert gpu.keys() == cpu.keys()
        for name, logits in cpu.items():
            worst = max(worst, float(np.abs(gpu[name] - logits).max() / np.ptp(logits)))
            for batcher in batchers:
                batcher.extend(name, token)
    return worst, copies


def test_a_served_decoder() -> None:
    difference, copies = emulated.run(serving, arch="sm_80", timeout=500)
    assert difference < 1e-5
    assert not emulated.counts() or copies == {
        6
    }  # of tokens, row starts, lengths and tables to the GPU, of a size and the logits from it


@pytest.mark.parametrize("dtype", ["int8", "float32", "bfloat16"])
def test_rows_are_copied_on_the_gpu(dtype: str) -> None:
    assert emulated.run(rows, dtype, arch="sm_80") == ([1, 2, 1, 4], 0)


def rows(dtype: str) -> tuple[list[int], int]:
    """Copy the third row of an array to its first; return its first elements, and nonzero bytes of a new array."""
    gpu = Gpu(0)
    spec = TensorSpec("x", dtype, dtype, (4, 8))
    array, size = gpu.zeros(spec, (4, 8)), np.dtype(getattr(ml_dtypes, dtype, dtype)).itemsize
    memory = tensors.view_as(array, "uint8", (4, 8 * size))
    left = int(np.count_nonzero(np.from_dlpack(gpu.to_host(memory))))
    tensors.copy_to(tvm_ffi.from_dlpack(np.repeat(np.arange(1, 5, dtype=np.uint8), 8 * size)), memory)
    gpu.copy_row(array, 0, 2)
    copied = np.from_dlpack(gpu.to_host(memory))
    assert (copied == copied[:, :1]).all() and str(array.dtype) == dtype
    return copied[:, 0].tolist(), left


class OnGpu:
    """An array of a library with GPU memory, as the array API standard has it."""

    def __init__(self, memory: Any) -> None:
        self.memory = tvm_ffi.from_dlpack(memory)
        self.shape, self.dtype = tuple(self.memory.shape), np.dtype(str(self.memory.dtype))

    def __dlpack__(self, **options: Any) -> Any:
        return self.memory.__dlpack__(**options)

    def __dlpack_device__(self) -> tuple[int, int]:
        return self.memory.__dlpack_device__()

    def __array_namespace__(self) -> SimpleNamespace:
        return SimpleNamespace(from_dlpack=OnGpu)


def on_gpu(array: np.ndarray) -> OnGpu:
    import tvm

    return OnGpu(tvm.runtime.tensor(array, tvm.cuda(0)))


@pytest.mark.parametrize("precision", [None, pytest.param("bfloat16", marks=pytest.mark.slow)])
def test_decoding_writes_caches_in_place(precision: Precision | None) -> None:
    difference, copies, in_place = emulated.run(decoding, precision, arch="sm_80", timeout=500)
    assert difference < BARS[precision]
    assert not emulated.counts() or copies == {
        5
    }  # of token, mask and length to the GPU, of the length as a size and the logits from it
    assert in_place


def profile() -> lowering.Profile:
    model = lowering.compile(SAMPLES / "gemma2-past-dynamo23" / "model.onnx", "cuda:sm_80")
    sizes = dict.fromkeys((d for spec in model.inputs for d in spec.dims if isinstance(d, str)), 3)
    return lowering.bench(model, sizes, seconds=0)


def test_profile_of_a_model_on_a_gpu() -> None:
    measured = emulated.run(profile, arch="sm_80", timeout=500)
    attention = [call for call in measured.calls if call.kernel.kind == "attention"]
    assert attention and all(call.flops > 0 and call.kernel.schedule == "attention" for call in attention)
    assert measured.limits.flops is None and "in the GPU's memory" in str(measured)
