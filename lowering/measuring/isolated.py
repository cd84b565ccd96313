"""Functions in child processes with limits: crashes, hangs and lack of memory are results there.

A helper process (`python -m lowering.measuring.isolated`) imports once the modules that the functions need, and forks a
child for each call. The caller's own process is never forked, and its main module is never imported again.
"""

from __future__ import annotations

import ctypes
import importlib
import os
import pickle
import resource
import select
import signal
import struct
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any, Literal

Cause = Literal["build", "crash", "hang", "memory", "wrong", "error"]
"""Why a candidate is ruled out.

It cannot be built, its process died, it ran too long or needed too much memory, its answer is wrong, or it raised.
"""

_PR_SET_PDEATHSIG = 1
_OUT_OF_MEMORY = "bad_alloc"  # the C++ exception
_LENGTH = struct.Struct("<Q")


class CandidateFailure(Exception):
    """A call without an answer, with a cause that is counted, and a text."""

    def __init__(self, cause: Cause, text: str) -> None:
        self.cause, self.text = cause, text
        super().__init__(f"{cause}: {text}")

    def __reduce__(self) -> tuple:
        return CandidateFailure, (self.cause, self.text)


@dataclass(frozen=True)
class _Limits:
    """Seconds of wall time, and bytes in addition to those of the helper; None means unlimited."""

    seconds: float
    memory: int | None


@dataclass(frozen=True)
class _Call:
    """A function by module and name; without limits it runs in the helper itself."""

    module: str
    name: str
    arguments: tuple[Any, ...]
    limits: _Limits | None


class Helper:
    """The caller's end of a helper process.

    It starts with the first call, and again when it has died; close it when done.
    """

    def __init__(self, imports: Sequence[str], environment: dict[str, str] | None = None) -> None:
        self._command = [sys.executable, "-m", __name__, *imports]
        path = os.pathsep.join(filter(None, sys.path))
        self._environment = {**os.environ, **(environment or {}), "PYTHONPATH": path, "OPENBLAS_NUM_THREADS": "1"}
        self._process: subprocess.Popen[bytes] | None = None
        self._preparations: list[_Call] = []

    def call(self, function: Callable[..., Any], *arguments: Any, seconds: float, memory: int | None) -> Any:
        """Return the result of a module's function. All arguments and results must be picklable.

        Raises CandidateFailure.
        """
        return self._answer(_Call(function.__module__, function.__qualname__, arguments, _Limits(seconds, memory)))

    def prepare(self, function: Callable[..., None], *arguments: Any) -> None:
        """Call a function in the helper itself, where all later calls see what it stored. Raises CandidateFailure."""
        self._preparations.append(_Call(function.__module__, function.__qualname__, arguments, None))
        if self._process is not None:
            self._answer(self._preparations[-1])

    def _answer(self, call: _Call) -> Any:
        process = self._ensure_running()
        assert process.stdin is not None and process.stdout is not None
        try:
            send(process.stdin, call)
            answer = receive(process.stdout)
        except BaseException as error:  # an interrupt leaves an answer that nobody reads
            self.close()
            if isinstance(error, EOFError | OSError):
                raise CandidateFailure("crash", "the process that starts others died") from error
            raise
        if isinstance(answer, CandidateFailure):
            raise answer
        return answer

    def _ensure_running(self) -> subprocess.Popen[bytes]:
        if self._process is None or self._process.poll() is not None:
            pipes: dict[str, Any] = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": subprocess.DEVNULL}
            self._process = subprocess.Popen(self._command, env=self._environment, start_new_session=True, **pipes)
            for preparation in self._preparations:
                self._answer(preparation)
        return self._process

    def close(self) -> None:
        """Kill the helper and its children."""
        if self._process is not None:
            with suppress(ProcessLookupError):
                os.killpg(self._process.pid, signal.SIGKILL)
            self._process.communicate()
            self._process = None


def send(file: IO[bytes], value: Any) -> None:
    data = pickle.dumps(value)
    file.write(_LENGTH.pack(len(data)) + data)
    file.flush()


def receive(file: IO[bytes]) -> Any:
    (length,) = _LENGTH.unpack(_read(file, _LENGTH.size))
    return pickle.loads(_read(file, length))


def _read(file: IO[bytes], size: int) -> bytes:
    data = file.read(size)
    if len(data) < size:
        raise EOFError
    return data


def _serve(calls: IO[bytes], answers: IO[bytes]) -> None:
    """Serve as the helper: run a child for each call, one after the other."""
    _die_with_parent()
    while True:
        try:
            call = receive(calls)
        except EOFError:
            return
        try:
            answer = _execute(call) if call.limits is None else _execute_in_child(call, call.limits)
        except CandidateFailure as failed:
            answer = failed
        send(answers, answer)


def _execute(call: _Call) -> Any:
    """Return the call's answer. Raises CandidateFailure."""
    try:
        return getattr(importlib.import_module(call.module), call.name)(*call.arguments)
    except CandidateFailure:
        raise
    except Exception as error:
        lines = str(error).strip().splitlines() or [""]
        is_out_of_memory = isinstance(error, MemoryError) or _OUT_OF_MEMORY in str(error)
        raise CandidateFailure(
            "memory" if is_out_of_memory else "error", f"{type(error).__name__}: {lines[-1][:300]}"
        ) from error


def _execute_in_child(call: _Call, limits: _Limits) -> Any:
    """Return the call's answer from a child. Raises CandidateFailure."""
    read_end, write_end = os.pipe()
    child = os.fork()
    if child == 0:
        os.close(read_end)
        _run_child(call, limits, write_end)
    os.close(write_end)
    try:
        data = _read_until(read_end, time.monotonic() + limits.seconds)
    finally:
        os.close(read_end)
        with suppress(ProcessLookupError):
            os.kill(child, signal.SIGKILL)
        _, status = os.waitpid(child, 0)
    if data is None:
        raise CandidateFailure("hang", f"it was stopped after {limits.seconds:g} seconds")
    if not data:
        code = os.waitstatus_to_exitcode(status)
        raise CandidateFailure(
            "crash", signal.strsignal(-code) or f"signal {-code}" if code < 0 else f"exit status {code}"
        )
    answer = pickle.loads(data)
    if isinstance(answer, CandidateFailure):
        raise answer
    return answer


def _read_until(pipe: int, end: float) -> bytes | None:
    """Return all data until the other end is closed, or None if that takes too long."""
    chunks: list[bytes] = []
    while True:
        ready, _, _ = select.select([pipe], [], [], max(0.0, end - time.monotonic()))
        if not ready:
            return None
        chunk = os.read(pipe, 1 << 20)
        if not chunk:
            return b"".join(chunks)
        chunks.append(chunk)


def _run_child(call: _Call, limits: _Limits, pipe: int) -> None:
    """Run as the child: send what the function returns, or a CandidateFailure, and exit without cleaning up."""
    try:
        _die_with_parent()
        used = resource.getpagesize() * int(Path("/proc/self/statm").read_text().split()[0])
        if limits.memory is not None:
            resource.setrlimit(resource.RLIMIT_AS, (used + limits.memory, resource.RLIM_INFINITY))
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
        try:
            data = pickle.dumps(_execute(call))
        except CandidateFailure as failed:
            data = pickle.dumps(failed)
        view = memoryview(data)
        while view:
            view = view[os.write(pipe, view) :]
    finally:
        os._exit(0)


def _die_with_parent() -> None:
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)


if __name__ == "__main__":
    for name in sys.argv[1:]:
        importlib.import_module(name)
    answers = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)  # other output must not get between the answers
    # Classes must be those of this module under the name that pickles of other processes use.
    importlib.import_module("lowering.measuring.isolated")._serve(sys.stdin.buffer, answers)
