"""A function in a process of its own with a time limit, so that a hang or a crash costs that call alone."""

from __future__ import annotations

import multiprocessing
import time
from collections.abc import Callable
from dataclasses import dataclass
from multiprocessing.connection import Connection
from typing import Any


@dataclass(frozen=True)
class Answer:
    """The result of the function, or `problem`: the reason for none. doing is its last report; late: time was up."""

    result: Any = None
    problem: str = ""
    doing: str = ""
    late: bool = False


def isolated(function: Callable[..., Any], *arguments: Any, limit: float, preload: tuple[str, ...] = ()) -> Answer:
    """Run function(*arguments, say), where say(text) reports its current step. limit is in seconds.

    Processes are forked off a server that has imported the modules of `preload`. The function must be a module's.
    """
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(list(preload))  # heeded by the first call
    receiver, sender = context.Pipe(duplex=False)
    process = context.Process(target=_serve, args=(sender, function, arguments))
    process.start()
    sender.close()
    end, doing = time.monotonic() + limit, ""
    try:
        while receiver.poll(max(0.0, end - time.monotonic())):
            kind, what = receiver.recv()
            if kind == "doing":
                doing = what
            elif kind == "failed":
                return Answer(problem=what, doing=doing)
            else:
                return Answer(result=what, doing=doing)
        return Answer(problem=f"no answer in {limit:.0f} s", doing=doing, late=True)
    except EOFError:
        process.join()
        return Answer(problem=f"the process died with exit status {process.exitcode}", doing=doing)
    finally:
        process.kill()
        process.join()
        receiver.close()


def _serve(connection: Connection, function: Callable[..., Any], arguments: tuple) -> None:
    def say(text: str) -> None:
        connection.send(("doing", text))

    try:
        answer = "returned", function(*arguments, say)
    except BaseException as error:
        lines = str(error).strip().splitlines() or [""]
        answer = "failed", f"{type(error).__name__}: {lines[0][:300]}"
    connection.send(answer)
