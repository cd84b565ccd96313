"""A bound call as a CUDA graph: what it enqueues is captured once, and from then on launched as a whole.

TVM's virtual machine captures and launches (passes/replay.py). A graph repeats kernels with the addresses and sizes
they had, so all memory of the call is kept here: what kernels read and write in between, which would go back to the
runtime's pool; workspaces, which the runtime has by thread and replaces where more is asked for, so that the capture
has a thread of its own; and the results, which every launch writes anew.
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
from .devices import Gpu
from .failures import sentence
from .library import Library
from .tensors import Tensor, copy_of, copy_to, held_elsewhere, item

# Functions by which the host reads the contents of arrays, and what of a model does that.
_READS = {
    "vm.builtin.tensor_to_shape": "a size inside it is the content of an array",
    "vm.builtin.read_if_cond": "an If or a Loop depends on the content of an array",
}
# What a launch is given for the function that was captured, which nobody calls.
_CAPTURED = tvm_ffi.convert(lambda: None)
_PATIENCE = 1.0  # seconds for a thread to end


def check_graph(manifest: Manifest, gpu: Gpu | None, inputs: Mapping[str, Any], outputs: Any) -> Gpu:
    """The GPU of a model that may be bound as a graph, as far as that is known before the first call.

    Raises InputError for others.
    """
    if gpu is None:
        raise InputError("graphs are for models on GPUs, and this one runs on the CPU: bind without graph=True.")
    if outputs:
        raise InputError("a graph has arrays of its own for outputs, the same in every call: bind without outputs.")
    if not inputs:
        raise InputError("a model without inputs gives its outputs to the host, which a graph cannot.")
    if manifest.slots is not None:
        raise InputError(
            f"a model compiled with static_cache cannot be a graph: the host reads '{manifest.slots.length}' in every "
            "call, as sizes depend on it. Export it with TensorScatter and with Attention's nonpad_kv_seqlen, which "
            "GPUs read, and name its caches in donate."
        )
    return gpu


class Graph:
    """The call of a model on arguments (tensors, and the weights) that never change; calls take turns.

    donated holds the addresses of results that need no memory: the caller's arrays. delivered makes of the results,
    the same tensors for all calls, what calls return.
    """

    def __init__(
        self,
        library: Library,
        gpu: Gpu,
        arguments: Sequence[Any],
        donated: frozenset[int],
        delivered: Callable[[list[Tensor]], dict[str, Any]],
    ) -> None:
        self._library, self._gpu, self._arguments = library, gpu, arguments
        self._donated, self._delivered = donated, delivered
        self._replay = library.new_replay()
        self._worker, self._threads = ThreadPoolExecutor(1, "graph"), list[int]()
        weakref.finalize(self, _end, self._worker, self._threads).atexit = False
        self._lock = Lock()
        self._kept: list[Any] = []
        self._outputs: dict[str, Any] | None = None

    def __call__(self, stream: int) -> dict[str, Any]:
        """The outputs by name, enqueued on the current stream, `stream`. Raises InputError if the first call fails."""
        with self._lock:
            if self._outputs is None:
                self._outputs = self._delivered(self._worker.submit(self._capture, stream).result())
            else:
                self._replay(_CAPTURED)
            return dict(self._outputs)

    def _capture(self, stream: int) -> list[Tensor]:
        """Runs the call, and captures it. The results, which hold what the run gave."""
        self._threads.append(threading.get_native_id())
        kept: list[Any] = []
        reads: list[str] = []
        first: list[list[_Aside]] = []
        captured: list[Tensor] = []

        def keep(function: Any, name: str, before: bool, result: Any, *arguments: Any) -> int:
            if before and name in _READS:
                reads.append(_READS[name])
                raise ValueError(name)
            kept.append((result, arguments))
            return 0

        def step() -> tvm_ffi.Array:
            results = machine.main(*self._arguments)
            if first:
                captured.extend(item(results, k) for k in range(len(results)))
                return results
            # The capture, which must not allocate, finds in the runtime's pool all that the run took from it.
            kept.clear()
            machine.release()
            first.append([self._set_aside(item(results, k)) for k in range(len(results))])
            return tvm_ffi.convert([])

        machine = self._library.new_machine(keep)
        with tvm_ffi.use_raw_stream(self._gpu.device, stream):
            try:
                with _no_garbage_collected():
                    self._replay(tvm_ffi.convert(step))
            except Exception as error:
                raise InputError(_refusal(error, reads, bool(first))) from error
            self._kept = kept
            return [aside.given_back(result) for aside, result in zip(first[0], captured)]

    def _set_aside(self, result: Tensor) -> _Aside:
        if result.data_ptr() in self._donated:
            return _Aside(None, False)
        return _Aside(copy_of(result), held_elsewhere(result))


def _end(worker: ThreadPoolExecutor, threads: Sequence[int]) -> None:
    """Wait until the thread of a graph has given its workspaces back: the driver takes none while another captures."""
    own = threading.get_native_id() in threads
    worker.shutdown(wait=not own)
    deadline = time.monotonic() + _PATIENCE
    while not own and time.monotonic() < deadline and any(Path(f"/proc/self/task/{each}").exists() for each in threads):
        time.sleep(0.0002)


@dataclass(frozen=True)
class _Aside:
    """A result of the first run, put aside while the capture gives it an address.

    copy is None where it is the caller's array; constant says that it is the code's own, or a weight.
    """

    copy: Tensor | None
    constant: bool

    def given_back(self, result: Tensor) -> Tensor:
        """The tensor for all calls, `result` being the captured one."""
        if self.copy is None:
            return result
        if self.constant:
            return self.copy
        copy_to(self.copy, result)
        return result


def _refusal(error: Exception, reads: list[str], has_run: bool) -> str:
    if reads:
        return (
            f"the call cannot be a graph, which repeats what was captured: {reads[0]}, which the host reads in every "
            "call. Bind the arrays without graph=True."
        )
    if not has_run:
        return f"the model cannot run on these inputs: {sentence(error)}"
    reason = str(error).strip().partition("\n")[0]
    return (
        f"the call has run, but could not be captured as a graph ({reason}). During the first call no other thread may "
        "allocate or free memory of the GPU, or load code. Call again, or bind the arrays without graph=True."
    )


@contextmanager
def _no_garbage_collected() -> Iterator[None]:
    """While it is open: what is collected may be memory of the GPU, and to free it ends a capture."""
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()
