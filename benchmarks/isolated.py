"""An object in a process of its own that stands still unless it is asked something.

Thread pools spin for a while after a call, some for good: with two cores, one that waits for its next turn takes a core
from whoever has its turn now. A process that is stopped by SIGSTOP takes nothing, whatever its threads do.
"""

from __future__ import annotations

import ctypes
import multiprocessing
import os
import signal
import time
from collections.abc import Callable
from multiprocessing import forkserver
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

_PR_SET_PDEATHSIG = 1

_PRELOADED = "benchmarks.measure"  # seconds of imports, among them the compiler's, that processes then share


class Failed(Exception):
    """The object raised, or its process died: the text says which and why."""


class Isolated:
    """`make(*arguments)`, created and stored in a new process; all of them must be picklable. Close it when done."""

    def __init__(self, make: Callable[..., Any], *arguments: Any) -> None:
        context = multiprocessing.get_context("forkserver")
        context.set_forkserver_preload([_PRELOADED])  # heeded by the first call
        self._connection, child_end = context.Pipe()
        self._process = context.Process(target=_serve, args=(child_end, make, arguments), daemon=True)
        self._process.start()
        child_end.close()
        self._running = True

    @property
    def pid(self) -> int:
        assert self._process.pid is not None
        return self._process.pid

    def ask(self, method: str, *arguments: Any) -> Any:
        """Return the result of the object's method. Its process runs for that long, and has stopped when this returns.

        Raises Failed, also for what `make` raised.
        """
        if not self._running:
            os.kill(self.pid, signal.SIGCONT)
        try:
            self._connection.send((method, arguments))
            worked, answer = self._connection.recv()
        except (EOFError, OSError):
            self._process.join()
            raise Failed(f"the process died with exit status {self._process.exitcode}") from None
        self._stop()
        if not worked:
            raise Failed(answer)
        return answer

    def _stop(self) -> None:
        """Returns when no thread of the process runs any more."""
        os.kill(self.pid, signal.SIGSTOP)
        while not self._stands():
            time.sleep(1e-4)
        self._running = False

    def _stands(self) -> bool:
        """Whether all threads are stopped, or gone. The process is a child of the fork server, so none to wait for."""
        try:
            tasks = Path(f"/proc/{self.pid}/task").glob("*/stat")
            states = [path.read_text().rpartition(")")[2].split()[0] for path in tasks]
        except (FileNotFoundError, ProcessLookupError):  # one ended meanwhile
            return False
        return all(state in "TXZ" for state in states)

    def close(self) -> None:
        """Ends the process, stopped or not."""
        self._process.kill()
        self._process.join()
        self._connection.close()


def _serve(connection: Connection, make: Callable[..., Any], arguments: tuple[Any, ...]) -> None:
    # A stopped process would outlive a benchmark that is killed. The fork server, its parent, ends when the other end
    # of a pipe is closed everywhere; this process got one, to start others, which it does not.
    os.close(forkserver._forkserver._forkserver_alive_fd)  # type: ignore[attr-defined]
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    instance, problem = None, ""
    try:
        instance = make(*arguments)
    except Exception as error:
        problem = said(error)
    while True:
        try:
            method, method_arguments = connection.recv()
        except EOFError:
            return
        try:
            answer = (False, problem) if problem else (True, getattr(instance, method)(*method_arguments))
        except Exception as error:
            answer = False, said(error)
        connection.send(answer)


def said(error: Exception) -> str:
    """Its kind and the first line of what it says."""
    lines = str(error).strip().splitlines() or [""]
    return f"{type(error).__name__}: {lines[0][:200]}"
