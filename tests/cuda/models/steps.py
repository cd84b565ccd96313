"""Decode steps on the emulated GPU, call by call of the driver. Tests call these functions in its process."""

from __future__ import annotations

import gc
import runpy
import time
from collections import Counter
from collections.abc import Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager, nullcontext, suppress
from functools import cache, partial
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import onnx
import tvm_ffi

import lowering
from lowering.demo.decoder import DecoderConfig, build_decoder
from lowering.runtime import graphs, library
from lowering.runtime.arrays import tensors
from tests.cuda_emulation import device
from tests.support.pass_states import leave_out

TARGET, STEPS = "cuda:sm_80", 6
# Calls that only ask for or set something in the host's memory.
FREE = {"cudaGetDevice", "cudaSetDevice", "cudaDeviceGetAttribute"}

# One token attends to a cache that grows by it.
ATTENTION = runpy.run_path(str(Path(__file__).parents[3] / "examples" / "cpp_host" / "compile_model.py"))["MODEL"]
DECODER = DecoderConfig(layers=2, vocabulary=64)


@cache
def model(name: str) -> lowering.Model:
    proto = build_decoder(DECODER) if name == "decoder" else onnx.parser.parse_model(ATTENTION)
    return lowering.compile(proto, TARGET, donate=("cache_.*",))


class Steps:
    """A bound step of a model. Two of them with one seed get the same tokens."""

    def __init__(self, model: lowering.Model, graph: bool, capacity: int = 600, batch: int = 2) -> None:
        self.model, self._rng, self._number = model, np.random.default_rng(0), 0
        sizes = {"C": capacity, "capacity": capacity, "B": batch, "batch": batch, "tokens": 1}
        self.arrays = {}
        for spec in model.inputs:
            shape = [sizes.get(d, d) for d in spec.dims]
            self.arrays[spec.name] = model.gpu.copy(np.zeros(shape, spec.dtype))
        self._call = model.bind(self.arrays, graph=graph)
        self.outputs: dict[str, Any] = {}
        self.calls: list[device.Call] = []

    def __call__(self) -> dict[str, np.ndarray]:
        """Run the next step on new tokens. `outputs` are its arrays, `calls` its calls of the driver."""
        for name, array in self.arrays.items():
            if name == "write_indices":
                tensors.copy_to(tvm_ffi.from_dlpack(np.full(array.shape, self._number)), array)
            elif name == "ids":
                tensors.copy_to(tvm_ffi.from_dlpack(self._rng.integers(0, DECODER.vocabulary, array.shape)), array)
            elif not name.startswith("cache_"):
                tensors.copy_to(tvm_ffi.from_dlpack(self._rng.standard_normal(array.shape).astype("f")), array)
        self._number += 1
        device.take_calls()
        self.outputs = self._call()
        self.calls = device.take_calls()
        return {name: on_host(array) for name, array in self.outputs.items()}


def on_host(array: Any) -> np.ndarray:
    """Return a copy of an array of the GPU."""
    return np.from_dlpack(tensors.copy_tensor(array, tvm_ffi.device("cpu")))


def work(calls: Iterable[device.Call]) -> Counter[str]:
    """Count the calls by name that do more than look into memory."""
    return Counter(call.name for call in calls if call.name not in FREE)


@contextmanager
def own_stream(model: lowering.Model) -> Iterator[int]:
    """Let calls go to a new stream in the block, and yield its address."""
    gpu = model.gpu.device
    stream = tvm_ffi.get_global_func("runtime.Device_StreamCreate")(gpu)
    try:
        with tvm_ffi.use_raw_stream(gpu, stream):
            yield stream
    finally:
        with model.gpu.use_stream_of([]):  # the next call does not look for this one
            tvm_ffi.get_global_func("runtime.Device_StreamFree")(gpu, stream)


def calls_of_steps(name: str, graph: bool) -> list[tuple[Counter[str], Counter[str]]]:
    """Return the calls of each step on a stream of the caller's: those that do something, and the others.

    Calls on the caller's stream have their names. Names of calls on other streams end with "elsewhere".
    """
    step, calls_by_step = Steps(model(name), graph), []
    with own_stream(step.model) as stream:
        for _ in range(STEPS):
            step()
            calls = [
                device.Call(call.name + (" elsewhere" if call.stream not in (None, stream) else ""), call.stream)
                for call in step.calls
            ]
            calls_by_step.append((work(calls), Counter(call.name for call in calls if call.name in FREE)))
    return calls_by_step


def disturb(name: str, number: int) -> None:
    """Do what may happen between steps.

    The same thread runs the model at a size that needs more memory than before, and the runtime returns unused memory
    to the driver."""
    Steps(model(name), False, batch=4 << number)()
    tvm_ffi.get_global_func("vm.builtin.memory_manager.clear")()


def replayed(name: str, fault: str | None = None) -> tuple[float, bool]:
    """Return the largest difference between outputs of replayed and ordinary steps, and whether arrays stay the same.

    The arrays of a replayed step are always the same, and caches are those that were bound."""
    with ThreadPoolExecutor(1) as fresh:  # a thread whose workspaces are small
        return fresh.submit(_replayed, name, fault).result()


def _replayed(name: str, fault: str | None) -> tuple[float, bool]:
    plain = Steps(model(name), False)
    worst, first, same = 0.0, {}, True
    with FAULTS[fault]() if fault else nullcontext():
        steps = Steps(model(name), True)
        for number in range(STEPS):
            expected = plain()
            disturb(name, number)
            results = steps()
            worst = max([worst, *(float(np.abs(results[key] - expected[key]).max()) for key in expected)])
            first = first or steps.outputs
            same = same and all(first[key] is steps.outputs[key] for key in first)
    donated = steps.model.manifest.donated
    return worst, same and all(steps.arrays[key] is first[output] for key, output in donated.items())


def captured_again() -> tuple[str, float]:
    """Return the error of a first call during which another thread allocates, and the difference of the next calls
    from calls without a graph."""
    plain, steps = Steps(model("attention"), False), Steps(model("attention"), True)
    _Disturbed.calls, message, worst = 0, "", 0.0
    with mock.patch.object(library, "Machine", _Disturbed):
        for _ in range(STEPS):
            expected = plain()
            try:
                results = steps()
            except lowering.InputError as error:
                message += str(error)
                continue
            worst = max([worst, *(float(np.abs(results[key] - expected[key]).max()) for key in expected)])
    return message, worst


class _Copying(graphs.Graph):
    def __init__(self, library: Any, gpu: Any, arguments: Any, *rest: Any) -> None:
        self._originals = arguments
        super().__init__(library, gpu, [tensors.copy_tensor(argument) for argument in arguments], *rest)


class _Waiting(library.Machine):
    def __init__(self, machine: Any) -> None:
        super().__init__(machine)
        main = self.main

        def main_and_wait(*arguments: Any) -> Any:
            results, gpu = main(*arguments), tvm_ffi.device("cuda", 0)
            tvm_ffi.get_global_func("runtime.Device_StreamSync")(gpu, tvm_ffi.get_raw_stream(gpu))
            return results

        self.main = main_and_wait


class _Forgetting(graphs.Graph):
    def __setattr__(self, name: str, value: Any) -> None:
        super().__setattr__(name, [] if name == "_kept" else value)


class _Here:
    """A ThreadPoolExecutor without threads."""

    def __init__(self, *arguments: Any) -> None:
        self._done: Future = Future()

    def submit(self, function: Any, *arguments: Any) -> Future:
        self._done.set_result(function(*arguments))
        return self._done


class _Disturbed(library.Machine):
    """Machines of which the first has, in its second call, another thread allocate memory of the GPU."""

    calls = 0

    def __init__(self, machine: Any) -> None:
        super().__init__(machine)
        main = self.main

        def main_and_allocate(*arguments: Any) -> Any:
            _Disturbed.calls += 1
            if _Disturbed.calls == 2:
                with ThreadPoolExecutor(1) as other, suppress(RuntimeError):
                    other.submit(tensors.copy_tensor, arguments[0]).result()
            return main(*arguments)

        self.main = main_and_allocate


FAULTS = {
    "copies are recorded": partial(mock.patch, "lowering.runtime.bound_call.Graph", _Copying),
    "a step waits": partial(mock.patch.object, library, "Machine", _Waiting),
    "memory is not retained": partial(mock.patch, "lowering.runtime.bound_call.Graph", _Forgetting),
    "no thread is retained": partial(mock.patch.object, graphs, "ThreadPoolExecutor", _Here),
}


def copies_of_a_step() -> list[str]:
    """Return the calls of a step on a stream of the caller's after its kernels, where an array is bound to its output.

    A call is its name with the stream, "own" or "default"."""
    steps = Steps(model("attention"), False)
    y = steps.model.gpu.copy(np.zeros((2, 4, 1, 32), "f"))
    call = steps.model.bind(steps.arrays, {"y": y})
    with own_stream(steps.model) as stream:
        call()
        device.take_calls()
        call()
        calls = device.take_calls()
    names = {stream: " own", 0: " default", None: ""}
    last = max(k for k, call in enumerate(calls) if call.name == "cuLaunchKernelEx")
    return [call.name + names[call.stream] for call in calls[last + 1 :] if call.name not in FREE]


def matmul_by_tensor_maps() -> list[tuple[float, int]]:
    """Return the error of a replayed matmul against one that is not, and the number of tensor maps, for each step."""
    rng = np.random.default_rng(0)
    weight = onnx.numpy_helper.from_array(rng.standard_normal((128, 264)).astype("float16"), "w")
    text = """<ir_version: 11, opset_import: ["" : 24]>
    matmul (float16[n, 128] x, float16[128, 264] w) => (float16[n, 264] y) { y = MatMul (x, w) }"""
    proto = onnx.parser.parse_model(text)
    proto.graph.initializer.append(weight)
    del proto.graph.input[1]
    module = lowering.compile(proto, "cuda:sm_90a")
    x = module.gpu.copy(np.zeros((200, 128), "float16"))  # rows of a cluster of two blocks
    plain, replayed = module.bind({"x": x}), module.bind({"x": x}, graph=True)
    results = []
    for _ in range(3):
        tensors.copy_to(tvm_ffi.from_dlpack(rng.standard_normal((200, 128)).astype("float16")), x)
        right = on_host(plain()["y"]).astype("f")
        device.take_calls()
        difference = float(np.abs(on_host(replayed()["y"]).astype("f") - right).max() / np.ptp(right))
        results.append((difference, work(device.take_calls())["cuTensorMapEncodeTiled"]))
    return results


def memory_of_a_graph() -> tuple[int, int]:
    """Return how many allocations a graph took from the driver, and how many it freed when it was dropped."""
    module, clear = model("attention"), tvm_ffi.get_global_func("vm.builtin.memory_manager.clear")
    arrays = Steps(module, False).arrays
    module.bind(arrays)()
    gc.collect()
    clear()
    device.take_calls()
    step = module.bind(arrays, graph=True)
    for _ in range(3):
        step()
    del step
    gc.collect()
    clear()
    calls = work(device.take_calls())
    deadline = time.monotonic() + 10
    while calls["cudaFree"] < calls["cudaMalloc"] and time.monotonic() < deadline:  # the graph's thread is ending
        time.sleep(0.01)
        calls += work(device.take_calls())
    return calls["cudaMalloc"], calls["cudaFree"]


# -- refusals


def reads_a_size() -> None:
    graph = """
    <ir_version: 11, opset_import: ["" : 24]>
    pick (float[N] x, bool c) => (float[N] y) {
      y = If (c) <then_branch = first () => (float[N] a) { a = Neg (x) },
                  else_branch = second () => (float[N] b) { b = Exp (x) }>
    }
    """
    module = lowering.compile(onnx.parser.parse_model(graph), TARGET)
    arrays = {"x": module.gpu.copy(np.ones(3, "f")), "c": module.gpu.copy(np.array(True))}
    module.bind(arrays)()
    module.bind(arrays, graph=True)()


def has_slots(folder: str) -> None:
    slots = lowering.compile(f"{folder}/model.onnx", TARGET, static_cache=16)
    sizes = {d: 1 for spec in slots.inputs for d in spec.dims if isinstance(d, str)}
    slots.bind(
        {t.name: slots.gpu.copy(np.zeros([sizes.get(d, d) for d in t.dims], t.dtype)) for t in slots.inputs}, graph=True
    )


def binds_an_output() -> None:
    steps = Steps(model("attention"), False)
    y = steps.model.gpu.copy(np.zeros((2, 4, 1, 32), "f"))
    steps.model.bind(steps.arrays, {"y": y}, graph=True)


def is_old() -> None:
    with leave_out("add_replay"):
        module = lowering.compile(onnx.parser.parse_model(ATTENTION), TARGET)
    module.bind(Steps(module, False).arrays, graph=True)


def has_no_inputs() -> None:
    text = """<ir_version: 11, opset_import: ["" : 24]>
    constant () => (float[2] y) { y = Constant <value_floats = [1.0, 2.0]> () }"""
    lowering.compile(onnx.parser.parse_model(text), TARGET).bind({}, graph=True)
