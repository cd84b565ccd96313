"""A thread that does what others ask of it, and futures that may be waited for in it.

Callbacks of a future run in the thread. One that waits for another future of the same thread, by its `result` or its
`exception`, would wait for ever: it does what is before that instead. A forked child has no threads of its parent: it
starts its own. At the end of the process all is done that was submitted; nothing can be submitted then.
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


class Answer(Future[Any]):
    """A future of what a worker does."""

    def __init__(self, worker: Worker) -> None:
        super().__init__()
        self._worker = worker

    def result(self, timeout: float | None = None) -> Any:
        self._worker.work_for(self)
        return super().result(timeout)

    def exception(self, timeout: float | None = None) -> BaseException | None:
        self._worker.work_for(self)
        return super().exception(timeout)

    def compute(self, function: Callable[..., Any], *arguments: Any) -> None:
        """Set what the function returns or raises, whatever that is: the thread goes on."""
        try:
            result = function(*arguments)
        except BaseException as error:
            self.set_exception(error)
        else:
            self.set_result(result)


class Worker:
    """The thread's part, which knows nothing of who submits, so that nobody need close it.

    `tasks` makes tasks of a request that was submitted; it may take requests behind that, and put one back.
    """

    def __init__(self, name: str, tasks: Callable[[Any, Worker], Iterable[Task]]) -> None:
        self._queue: queue.SimpleQueue[Any] = queue.SimpleQueue()  # None is the last
        self._make, self._put_back, self._tasks = tasks, deque[Any](), deque[Task]()
        self._lock, self._is_ended = threading.RLock(), False  # a finalizer may come in between
        self._thread = threading.Thread(target=self._work, name=name, daemon=True)
        _WORKERS.add(self)
        self._thread.start()

    def put(self, request: Any) -> bool:
        """Queue a request; False once the worker is to end."""
        with self._lock:
            if not self._is_ended:
                self._queue.put(request)
            return not self._is_ended

    def end(self) -> None:
        """Have the thread end after what was submitted."""
        with self._lock:
            self._is_ended = True
            self._queue.put(None)

    def join(self) -> None:
        """Wait until the thread has ended, if that is another one."""
        if self._thread is not threading.current_thread():
            self._thread.join()

    def take(self, timeout: float) -> Any:
        """Return the next request within so many seconds. Raises queue.Empty."""
        return self._queue.get(timeout=timeout) if timeout > 0 else self._queue.get_nowait()

    def put_back(self, request: Any) -> None:
        self._put_back.append(request)

    def work_for(self, answer: Answer) -> None:
        """In the thread itself do what is before the answer; elsewhere nothing."""
        while threading.current_thread() is self._thread and not answer.done() and self._turn():
            pass

    def _work(self) -> None:
        goes_on = True
        while goes_on:
            try:
                goes_on = self._turn()
            except BaseException:  # of a callback, which ends nothing else
                LOG.exception("a callback of a future has raised")
        _WORKERS.discard(self)

    def _turn(self) -> bool:
        """Do one task, or make more; False where there will be none."""
        if self._tasks:
            self._tasks.popleft()()
            return True
        request = self._put_back.pop() if self._put_back else self._queue.get()
        if request is None:
            self.put_back(None)
            return False
        self._tasks.extend(self._make(request, self))
        return True


class Background:
    """A worker, which begins when something is submitted and ends behind that once its holder is gone."""

    def __init__(self, name: str, tasks: Callable[[Any, Worker], Iterable[Task]]) -> None:
        self._name, self._tasks, self._closed = name, tasks, False
        self.reset()
        _BACKGROUNDS.add(self)

    def reset(self) -> None:
        """Forget the worker, which a forked child does not have."""
        self._lock = threading.Lock()
        self._worker: Worker | None = None

    def submit(self, request: Callable[[Answer], Any]) -> Answer:
        """Return a future, and queue the request that is made for it. Raises InputError once closed."""
        with self._lock:
            if self._closed:
                raise InputError(f"this {self._name} is closed.")
            if self._worker is None:
                self._worker = Worker(self._name, self._tasks)
                weakref.finalize(self, self._worker.end).atexit = False
            answer = Answer(self._worker)
            if not self._worker.put(request(answer)):
                raise InputError("the process is about to end.")
        return answer

    def close(self) -> None:
        """Wait for all that was submitted, unless this is called by a callback."""
        with self._lock:
            self._closed = True
        if self._worker is not None:
            self._worker.end()
            self._worker.join()


_BACKGROUNDS: weakref.WeakSet[Background] = weakref.WeakSet()
_WORKERS: set[Worker] = set()


def _reset() -> None:
    _WORKERS.clear()
    for each in list(_BACKGROUNDS):
        each.reset()


def _finish() -> None:
    """At the end of the process, what was submitted is done."""
    for each in list(_WORKERS):
        each.end()
        each.join()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_reset)
atexit.register(_finish)
