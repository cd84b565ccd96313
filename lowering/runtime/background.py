"""Worker threads that run submitted requests in order, and futures that can be awaited in them.

Callbacks of a future run in the worker thread. A callback that waits for another future of the same thread, by `result`
or `exception`, would deadlock: it runs the preceding tasks instead. A forked child does not inherit the threads of its
parent and starts its own. At process exit all submitted requests are finished, and new ones are rejected.
"""

from __future__ import annotations

import atexit
import logging
import os
import queue
import threading
import weakref
from collections import deque
from collections.abc import Callable, Iterable
from concurrent.futures import Future
from typing import Any

from ..errors import InputError

LOG = logging.getLogger("lowering")

Task = Callable[[], None]


class WorkerFuture(Future[Any]):
    """A future for the result of a worker's task."""

    def __init__(self, worker: Worker) -> None:
        super().__init__()
        self._worker = worker

    def result(self, timeout: float | None = None) -> Any:
        self._worker.run_until_done(self)
        return super().result(timeout)

    def exception(self, timeout: float | None = None) -> BaseException | None:
        self._worker.run_until_done(self)
        return super().exception(timeout)

    def compute(self, function: Callable[..., Any], *arguments: Any) -> None:
        """Set the return value or the exception of a function, whatever it is: the thread continues."""
        try:
            result = function(*arguments)
        except BaseException as error:
            self.set_exception(error)
        else:
            self.set_result(result)


class Worker:
    """The thread, which does not refer to its submitters, so that nobody has to close it.

    `tasks` creates the tasks for a submitted request. It may take further requests from the queue, and return one of
    them.
    """

    def __init__(self, name: str, tasks: Callable[[Any, Worker], Iterable[Task]]) -> None:
        self._queue: queue.SimpleQueue[Any] = queue.SimpleQueue()  # None ends the queue
        self._create_tasks, self._returned, self._tasks = tasks, deque[Any](), deque[Task]()
        self._lock, self._is_ended = threading.RLock(), False  # a finalizer may run in between
        self._thread = threading.Thread(target=self._work, name=name, daemon=True)
        _WORKERS.add(self)
        self._thread.start()

    def put(self, request: Any) -> bool:
        """Queue a request. Return False if the worker is ending."""
        with self._lock:
            if not self._is_ended:
                self._queue.put(request)
            return not self._is_ended

    def end(self) -> None:
        """Make the thread end after all submitted requests."""
        with self._lock:
            self._is_ended = True
            self._queue.put(None)

    def join(self) -> None:
        """Wait until the thread has ended, unless called from that thread."""
        if self._thread is not threading.current_thread():
            self._thread.join()

    def take(self, timeout: float) -> Any:
        """Return the next request within the given number of seconds. Raises queue.Empty."""
        return self._queue.get(timeout=timeout) if timeout > 0 else self._queue.get_nowait()

    def put_back(self, request: Any) -> None:
        """Return a request that `take` gave, to be handled next."""
        self._returned.append(request)

    def run_until_done(self, answer: WorkerFuture) -> None:
        """Run the tasks that precede a future if called in the thread itself, or else do nothing."""
        while threading.current_thread() is self._thread and not answer.done() and self._run_next():
            pass

    def _work(self) -> None:
        has_work = True
        while has_work:
            try:
                has_work = self._run_next()
            except BaseException:  # raised by a callback, which must end nothing else
                LOG.exception("a callback of a future has raised")
        _WORKERS.discard(self)

    def _run_next(self) -> bool:
        """Run one task, or create more from the next request. Return False at the end."""
        if self._tasks:
            self._tasks.popleft()()
            return True
        request = self._returned.pop() if self._returned else self._queue.get()
        if request is None:
            self.put_back(None)
            return False
        self._tasks.extend(self._create_tasks(request, self))
        return True


class BackgroundThread:
    """A worker that starts at the first submission, and ends after the last one when its owner is collected."""

    def __init__(self, name: str, tasks: Callable[[Any, Worker], Iterable[Task]]) -> None:
        self._name, self._tasks, self._is_closed = name, tasks, False
        self.reset()
        _BACKGROUNDS.add(self)

    def reset(self) -> None:
        """Discard the worker, which a forked child does not have."""
        self._lock = threading.Lock()
        self._worker: Worker | None = None

    def submit(self, request: Callable[[WorkerFuture], Any]) -> WorkerFuture:
        """Return a future and queue the request created for it. Raises InputError if closed."""
        with self._lock:
            if self._is_closed:
                raise InputError("run.closed", f"this {self._name} is closed. Create a new one.")
            if self._worker is None:
                self._worker = Worker(self._name, self._tasks)
                weakref.finalize(self, self._worker.end).atexit = False
            answer = WorkerFuture(self._worker)
            if not self._worker.put(request(answer)):
                raise InputError("run.process_ending", "the process is ending. Submit requests earlier.")
        return answer

    def close(self) -> None:
        """Wait for all submitted requests, unless called from a callback."""
        with self._lock:
            self._is_closed = True
        if self._worker is not None:
            self._worker.end()
            self._worker.join()


_BACKGROUNDS: weakref.WeakSet[BackgroundThread] = weakref.WeakSet()
_WORKERS: set[Worker] = set()


def _reset_after_fork() -> None:
    _WORKERS.clear()
    for background in list(_BACKGROUNDS):
        background.reset()


def _finish_workers() -> None:
    """Finish all submitted requests at process exit."""
    for worker in list(_WORKERS):
        worker.end()
        worker.join()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_reset_after_fork)
atexit.register(_finish_workers)
