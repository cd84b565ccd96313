"""A bound call as a CUDA graph: its kernels are captured once and then launched together.

TVM's virtual machine captures and launches (passes/memory/replay.py). A graph repeats kernels with the recorded
addresses and sizes, so all memory of the call stays allocated here: intermediate tensors, which would otherwise return
to the runtime's pool; workspaces; and the results, which every launch overwrites. The runtime keeps workspaces by
thread and replaces them when a larger one is requested, so the capture has a thread of its own.
"""

from __future__ import annotations

import gc
import threading
import time
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from threading import Lock
from typing import Any

import tvm_ffi

from ..errors import InputError
from ..manifest import Manifest
from .arrays.tensors import Tensor, copy_tensor, copy_to, is_shared, item
from .devices import Gpu
from .failures import describe_failure
from .library import ModelLibrary

# Functions by which the host reads the contents of arrays, with the reason for the read.
_HOST_READS = {
    "vm.builtin.tensor_to_shape": "a size inside it is the content of an array",
    "vm.builtin.read_if_cond": "an If or a Loop depends on the content of an array",
}
# The argument of a launch in place of the captured function. Nothing calls it.
_PLACEHOLDER = tvm_ffi.convert(lambda: None)
_END_TIMEOUT = 1.0  # seconds for a thread to end


def check_graph(manifest: Manifest, gpu: Gpu | None, inputs: Mapping[str, Any], outputs: Any) -> Gpu:
    """Return the GPU of a model that can be bound as a graph, as far as can be checked before the first call.

    Raises InputError for other models.
    """
    if gpu is None:
        raise InputError(
            "cuda_graph.gpu_required",
            "graphs are for models on GPUs, and this one runs on the CPU: bind without graph=True.",
        )
    if outputs:
        raise InputError(
            "cuda_graph.outputs_unsupported",
            "a graph allocates its own arrays for outputs, the same in every call: bind without outputs.",
        )
    if not inputs:
        raise InputError(
            "cuda_graph.inputs_missing",
            "a model without inputs returns its outputs to the host, which a graph cannot: bind without graph=True.",
        )
    if manifest.slots is not None:
        raise InputError(
            "cuda_graph.static_cache_unsupported",
            f"a model compiled with static_cache cannot be a graph: the host reads '{manifest.slots.length}' in every "
            "call, as sizes depend on it. Export it with TensorScatter and with Attention's nonpad_kv_seqlen, which "
            "GPUs read, and name its caches in donate.",
        )
    return gpu


class Graph:
    """The call of a model on arguments (tensors, and the weights) that never change. Calls are serialized.

    donated are the addresses of results in the caller's arrays, which need no memory here. deliver converts the
    results, the same tensors for all calls, to the values that calls return.
    """

    def __init__(
        self,
        library: ModelLibrary,
        gpu: Gpu,
        arguments: Sequence[Any],
        donated: frozenset[int],
        deliver: Callable[[list[Tensor]], dict[str, Any]],
    ) -> None:
        self._library, self._gpu, self._arguments = library, gpu, arguments
        self._donated, self._deliver = donated, deliver
        self._replay = library.new_replay()
        self._worker, self._threads = ThreadPoolExecutor(1, "graph"), list[int]()
        weakref.finalize(self, _end_worker, self._worker, self._threads).atexit = False
        self._lock = Lock()
        self._kept: list[Any] = []
        self._outputs: dict[str, Any] | None = None

    def __call__(self, stream: int) -> dict[str, Any]:
        """Return the outputs by name, enqueued on the current stream, `stream`.

        Raises InputError if the first call fails.
        """
        with self._lock:
            if self._outputs is None:
                self._outputs = self._deliver(self._worker.submit(self._capture, stream).result())
            else:
                self._replay(_PLACEHOLDER)
            return dict(self._outputs)

    def _capture(self, stream: int) -> list[Tensor]:
        """Run the call, capture it, and return the results with the values of the run."""
        self._threads.append(threading.get_native_id())
        resources: list[Any] = []
        reads: list[str] = []
        saved_results: list[list[_SavedResult]] = []
        captured: list[Tensor] = []

        def record(function: Any, name: str, before: bool, result: Any, *arguments: Any) -> int:
            if before and name in _HOST_READS:
                reads.append(_HOST_READS[name])
                raise ValueError(name)
            resources.append((result, arguments))
            return 0

        def run_step() -> tvm_ffi.Array:
            results = machine.main(*self._arguments)
            if saved_results:
                captured.extend(item(results, k) for k in range(len(results)))
                return results
            # The capture must not allocate: it finds in the runtime's pool all tensors that the run allocated.
            resources.clear()
            machine.release()
            saved_results.append([self._save_result(item(results, k)) for k in range(len(results))])
            return tvm_ffi.convert([])

        machine = self._library.new_machine(record)
        with tvm_ffi.use_raw_stream(self._gpu.device, stream):
            try:
                with _disable_garbage_collection():
                    self._replay(tvm_ffi.convert(run_step))
            except Exception as error:
                raise InputError(*_explain_failure(error, reads, bool(saved_results))) from error
            self._kept = resources
            return [saved.restore(result) for saved, result in zip(saved_results[0], captured)]

    def _save_result(self, result: Tensor) -> _SavedResult:
        if result.data_ptr() in self._donated:
            return _SavedResult(None, False)
        return _SavedResult(copy_tensor(result), is_shared(result))


def _end_worker(worker: ThreadPoolExecutor, threads: Sequence[int]) -> None:
    """Wait until the graph's thread has freed its workspaces: the driver frees none during another capture."""
    is_own = threading.get_native_id() in threads
    worker.shutdown(wait=not is_own)
    deadline = time.monotonic() + _END_TIMEOUT
    while (
        not is_own
        and time.monotonic() < deadline
        and any(Path(f"/proc/self/task/{number}").exists() for number in threads)
    ):
        time.sleep(0.0002)


@dataclass(frozen=True)
class _SavedResult:
    """A result of the first run, saved while the capture assigns an address to it.

    copy is None for the caller's array. is_constant says that the result is a constant of the code, or a weight.
    """

    copy: Tensor | None
    is_constant: bool

    def restore(self, result: Tensor) -> Tensor:
        """Return the tensor for all calls; `result` is the captured one."""
        if self.copy is None:
            return result
        if self.is_constant:
            return self.copy
        copy_to(self.copy, result)
        return result


def _explain_failure(error: Exception, reads: list[str], has_run: bool) -> tuple[str, str]:
    """Return the code and the text of the error."""
    if reads:
        return "cuda_graph.host_read", (
            f"the call cannot be a graph, which repeats what was captured: {reads[0]}, which the host reads in every "
            "call. Bind the arrays without graph=True."
        )
    if not has_run:
        code, reason = describe_failure(error)
        return code, f"the model cannot run on these inputs: {reason}"
    reason = str(error).strip().partition("\n")[0]
    return "cuda_graph.capture_failed", (
        f"the call has run, but could not be captured as a graph ({reason}). During the first call no other thread may "
        "allocate or free memory of the GPU, or load code. Call again, or bind the arrays without graph=True."
    )


@contextmanager
def _disable_garbage_collection() -> Iterator[None]:
    """Disable garbage collection in the block: freeing GPU memory would end a capture."""
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()
