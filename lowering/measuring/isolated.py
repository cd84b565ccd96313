"""Functions in processes of their own, with limits: what crashes, hangs or eats memory there is an answer, no accident.

A helper process (`python -m lowering.measuring.isolated`) imports once what the functions need and forks a child for
each call. The caller's own process is never forked, and its main module is never imported again.
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
"""Why a candidate is out of the question: it cannot be built, its process died, it ran too long or wanted too much
memory, its answer is wrong, or it raised."""

_PR_SET_PDEATHSIG = 1
_SHORT_OF_MEMORY = "bad_alloc"  # as C++ says it
_LENGTH = struct.Struct("<Q")


class Failed(Exception):
    """What was called gave no answer, for a cause that is counted, and in words."""

    def __init__(self, cause: Cause, text: str) -> None:
        self.cause, self.text = cause, text
        super().__init__(f"{cause}: {text}")

    def __reduce__(self) -> tuple:
        return Failed, (self.cause, self.text)


@dataclass(frozen=True)
class _Limits:
    """Seconds of wall time, and bytes beside what the helper has, None for as many as there are."""

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
    """The caller's end. It starts with the first call, and again when it has died; close it when done."""

    def __init__(self, imports: Sequence[str], environment: dict[str, str] | None = None) -> None:
        self._command = [sys.executable, "-m", __name__, *imports]
        path = os.pathsep.join(filter(None, sys.path))
        self._environment = {**os.environ, **(environment or {}), "PYTHONPATH": path, "OPENBLAS_NUM_THREADS": "1"}
        self._process: subprocess.Popen[bytes] | None = None
        self._preparations: list[_Call] = []

    def call(self, function: Callable[..., Any], *arguments: Any, seconds: float, memory: int | None) -> Any:
        """What the function, one of a module's, returns. Everything that is passed must be picklable.

        Raises Failed.
        """
        return self._answer(_Call(function.__module__, function.__qualname__, arguments, _Limits(seconds, memory)))

    def prepare(self, function: Callable[..., None], *arguments: Any) -> None:
        """Calls a function in the helper itself: what it keeps there, all later calls find. Raises Failed."""
        self._preparations.append(_Call(function.__module__, function.__qualname__, arguments, None))
        if self._process is not None:
            self._answer(self._preparations[-1])

    def _answer(self, call: _Call) -> Any:
        process = self._running()
        assert process.stdin is not None and process.stdout is not None
        try:
            send(process.stdin, call)
            answer = receive(process.stdout)
        except BaseException as error:  # an interrupt leaves an answer behind that nobody waits for
            self.close()
            if isinstance(error, EOFError | OSError):
                raise Failed("crash", "the process that starts others died") from error
            raise
        if isinstance(answer, Failed):
            raise answer
        return answer

    def _running(self) -> subprocess.Popen[bytes]:
        if self._process is None or self._process.poll() is not None:
            pipes: dict[str, Any] = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": subprocess.DEVNULL}
            self._process = subprocess.Popen(self._command, env=self._environment, start_new_session=True, **pipes)
            for preparation in self._preparations:
                self._answer(preparation)
        return self._process

    def close(self) -> None:
        """Ends the helper and what it runs."""
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
    """The helper: a child for each call, one after the other."""
    _die_with_parent()
    while True:
        try:
            call = receive(calls)
        except EOFError:
            return
        try:
            answer = _done(call) if call.limits is None else _forked(call, call.limits)
        except Failed as failed:
            answer = failed
        send(answers, answer)


def _done(call: _Call) -> Any:
    """The call's answer. Raises Failed."""
    try:
        return getattr(importlib.import_module(call.module), call.name)(*call.arguments)
    except Failed:
        raise
    except Exception as error:
        lines = str(error).strip().splitlines() or [""]
        short = isinstance(error, MemoryError) or _SHORT_OF_MEMORY in str(error)
        raise Failed("memory" if short else "error", f"{type(error).__name__}: {lines[-1][:300]}") from error


def _forked(call: _Call, limits: _Limits) -> Any:
    """The call's answer out of a child. Raises Failed."""
    mine, theirs = os.pipe()
    child = os.fork()
    if child == 0:
        os.close(mine)
        _run(call, limits, theirs)
    os.close(theirs)
    try:
        data = _read_until(mine, time.monotonic() + limits.seconds)
    finally:
        os.close(mine)
        with suppress(ProcessLookupError):
            os.kill(child, signal.SIGKILL)
        _, status = os.waitpid(child, 0)
    if data is None:
        raise Failed("hang", f"it was stopped after {limits.seconds:g} seconds")
    if not data:
        code = os.waitstatus_to_exitcode(status)
        raise Failed("crash", signal.strsignal(-code) or f"signal {-code}" if code < 0 else f"exit status {code}")
    answer = pickle.loads(data)
    if isinstance(answer, Failed):
        raise answer
    return answer


def _read_until(pipe: int, end: float) -> bytes | None:
    """All that comes until the other end is closed; None where that takes longer."""
    parts: list[bytes] = []
    while True:
        ready, _, _ = select.select([pipe], [], [], max(0.0, end - time.monotonic()))
        if not ready:
            return None
        part = os.read(pipe, 1 << 20)
        if not part:
            return b"".join(parts)
        parts.append(part)


def _run(call: _Call, limits: _Limits, pipe: int) -> None:
    """The child: sends what the function returns, or a Failed, and ends without cleaning up."""
    try:
        _die_with_parent()
        used = resource.getpagesize() * int(Path("/proc/self/statm").read_text().split()[0])
        if limits.memory is not None:
            resource.setrlimit(resource.RLIMIT_AS, (used + limits.memory, resource.RLIM_INFINITY))
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
        try:
            data = pickle.dumps(_done(call))
        except Failed as failed:
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
    os.dup2(2, 1)  # what is printed meanwhile must not get between answers
    # The classes of this module, as pickles of other processes name it.
    importlib.import_module("lowering.measuring.isolated")._serve(sys.stdin.buffer, answers)
