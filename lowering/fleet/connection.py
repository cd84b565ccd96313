"""A process with one session on a device: if the session crashes or hangs, only this process dies or is killed.

`python -m lowering.fleet.connection HOST PORT KEY` answers commands, one after the other, on its standard streams.
"""

from __future__ import annotations

import json
import os
import select
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

from ..measuring.isolated import receive, send

_SESSION_SECONDS = 24 * 3600


class LostError(Exception):
    """The device, or the connection to it, is lost."""


class Connection:
    """The client's end. It has a session when `machine` has answered; close it when done."""

    def __init__(self, tracker: tuple[str, int], key: str) -> None:
        command = [sys.executable, "-m", __name__, tracker[0], str(tracker[1]), key]
        path = os.pathsep.join(filter(None, sys.path))
        pipes: dict[str, Any] = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": subprocess.DEVNULL}
        self._process = subprocess.Popen(command, env={**os.environ, "PYTHONPATH": path}, **pipes)

    def ask(self, command: str, *arguments: Any, seconds: float) -> Any:
        """Return the answer. Raises LostError when there is none within so many seconds."""
        assert self._process.stdin is not None and self._process.stdout is not None
        try:
            send(self._process.stdin, (command, *arguments))
            ready, _, _ = select.select([self._process.stdout], [], [], seconds)
            if not ready:
                raise LostError(f"no answer within {seconds:g} seconds")
            answer = receive(self._process.stdout)
        except (OSError, EOFError) as error:
            raise LostError("its connection ended") from error
        if isinstance(answer, LostError):
            raise answer
        return answer

    def close(self) -> None:
        self._process.kill()
        self._process.communicate()


def _serve(host: str, port: int, key: str) -> None:
    from tvm import rpc

    from .device import MACHINE, MEASURE

    commands, answers = sys.stdin.buffer, os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)
    session: Any = None
    while True:
        try:
            command, *arguments = receive(commands)
        except EOFError:
            return
        try:
            if session is None:
                session = _request_session(rpc.connect_tracker(host, port), key)
            if command == "machine":
                answer: Any = json.loads(session.get_function(MACHINE)(*arguments))
            elif command == "upload":
                path, name = arguments
                answer = session.upload(bytearray(Path(path).read_bytes()), target=name)
            else:
                answer = json.loads(session.get_function(MEASURE)(json.dumps(arguments[0])))
        except Exception as error:  # an error of TVM's, or of the network
            lines = str(error).strip().splitlines() or [type(error).__name__]
            answer = LostError(lines[-1][:300])
            session = None
        send(answers, answer)


def _request_session(tracker: Any, key: str) -> Any:
    """Request a session, and wait until a device is free."""
    while True:
        try:
            return tracker.request(key, priority=1, session_timeout=_SESSION_SECONDS, max_retry=1)
        except RuntimeError:
            time.sleep(0.2)


if __name__ == "__main__":
    import lowering.fleet.connection as connection  # its LostError is that of the client, which unpickles it

    connection._serve(sys.argv[1], int(sys.argv[2]), sys.argv[3])
