"""The process of emulated kernels: neither a crash nor the pretended GPU reaches the process of the tests."""

import atexit
import os
import pickle
import socket
import subprocess
import sys
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from multiprocessing.connection import Connection
from typing import Any

import pytest

from tests.support import seeds

from . import accesses, card, device
from .accesses import Access
from .device import Arrivals, Order


class EmulationError(RuntimeError):
    """A launch failed in the emulation, or its process died: the error of the kernel."""


class Worker:
    """A process that calls functions with the emulated device."""

    def __init__(self) -> None:
        own_end, worker_end = socket.socketpair()
        path = os.pathsep.join(entry for entry in sys.path if entry)
        code = f"from tests.cuda_emulation.worker import serve; serve({worker_end.fileno()})"
        environment = {**os.environ, "PYTHONPATH": path, "TVM_BACKTRACE": "0"}
        self._process = subprocess.Popen([sys.executable, "-c", code], env=environment, pass_fds=[worker_end.fileno()])
        worker_end.close()
        self._connection = Connection(own_end.detach())

    def call(
        self,
        function: Callable,
        arguments: tuple,
        arch: str,
        turn: tuple[Order, Arrivals],
        timeout: float,
        counted: list[Access] | None,
    ) -> Any:
        """Call a function there, and return or raise its result. The function is pickled: it must be a module's."""
        try:
            self._connection.send_bytes(pickle.dumps((function, arguments, arch, turn, counted is not None)))
            if not self._connection.poll(timeout):
                self.stop()
                raise EmulationError(f"the emulation did not answer within {timeout:.0f} seconds: an endless loop?")
            good, result, accesses_of_call = pickle.loads(self._connection.recv_bytes())
        except (EOFError, BrokenPipeError, ConnectionResetError):
            status = self._process.wait()
            raise EmulationError(f"the emulation's process died with exit status {status}") from None
        if counted is not None:
            counted += accesses_of_call
        if good:
            return result
        if card.is_used() and "CUDA" in str(result):
            self.stop()  # all calls of the GPU fail after such an error in this process
        raise result

    @property
    def alive(self) -> bool:
        return self._process.poll() is None

    def stop(self) -> None:
        self._process.kill()
        self._process.wait()


_worker: Worker | None = None
_counted: list[Access] | None = None


@contextmanager
def counting() -> Iterator[list[Access]]:
    """Count the accesses of warps in the block. The list is complete when it ends."""
    global _counted
    _counted = []
    try:
        yield _counted
    finally:
        _counted = None


def run(
    function: Callable,
    *arguments: Any,
    arch: str = "sm_90a",
    order: Order = "ascending",
    arrivals: Arrivals = "late",
    timeout: float = 300,
) -> Any:
    """Call a function of a module in the process that has the emulated device; a new one after a crash.

    There `tvm.cuda(0)` is the emulation of a GPU of the architecture, and whatever compiles for CUDA compiles for it.
    Returns what the function returns. Raises what it raises, and EmulationError for launches that failed, crashes and
    endless loops. With `pytest --gpu` the process has the real GPU; a test for an architecture that is none of its own
    is skipped.
    """
    global _worker
    if card.is_used() and not card.runs(arch):
        pytest.skip(f"the GPU here is {card.architecture()}, the code is for {arch}")
    if _worker is None or not _worker.alive:
        _worker = Worker()
        atexit.register(_worker.stop)
    return _worker.call(function, arguments, arch, (order, arrivals), timeout, _counted)


def serve(descriptor: int) -> None:
    """Serve calls in the process itself."""
    connection = Connection(descriptor)
    seeds.renew()
    card.prepare() if card.is_used() else device.pretend()
    while True:
        try:
            function, arguments, arch, (order, arrivals), counts = pickle.loads(connection.recv_bytes())
        except EOFError:
            return
        if not card.is_used():
            device.set_arch(arch)
            device.set_order(order, arrivals)
            device.set_counting(counts)
            device.take_calls()  # those of the call before
        try:
            answer = True, function(*arguments)
        except BaseException as error:
            answer = False, _portable(error)
        counted = [] if card.is_used() else accesses.read(device.take_accesses())
        try:
            message = pickle.dumps((*answer, counted))
        except Exception as error:
            message = pickle.dumps((False, RuntimeError(f"the result cannot be sent: {error}"), counted))
        connection.send_bytes(message)


def _portable(error: BaseException) -> Exception:
    """Return the error as one that pickles; a report of the emulation is an EmulationError."""
    failure = "" if card.is_used() else device.take_failure()
    if failure and "CUDA" in str(error):
        return EmulationError(failure)
    trace = "".join(traceback.format_exception(error))
    try:
        copy = pickle.loads(pickle.dumps(error))
    except Exception:
        copy = None
    if not isinstance(copy, Exception):
        return RuntimeError(trace)
    copy.add_note(trace)
    return copy
