"""How each library runs the cases: one file each, with one class `Peer`, imported only when it takes part.

A case may have several forms in a library (an operator of its own for grouped heads, a compiled kernel, a cache that is
written in place). All are checked and timed, and the fastest that is right stands for the library.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import Any, Protocol

from ..cases.case import Arrays, Case

OURS = "onnx-lowering"
TUNED = "onnx-lowering, tuned"  # the same with a database of `onnx-lowering tune`
PEERS = ("torch", "onnxruntime", "openvino", "llama_cpp")

ONE_THREAD = ", one thread"  # after the name of a form that also runs on several


@dataclass(frozen=True)
class Contender:
    """call runs the case once, as often as one likes; answers makes of what it returned arrays by output name.

    Answers that are left out are not compared: llama.cpp's keys of a past are others.
    """

    call: Callable[[], Any]
    answers: Callable[[Any], Arrays]


@dataclass(frozen=True)
class Form:
    """One way to run a case, on so many threads. Whatever `make` raises is a refusal."""

    make: Callable[[], Contender]
    threads: int


class Peer(Protocol):
    """A library. Made with the number of threads; raises ImportError where it is not installed."""

    def forms(self, case: Case) -> dict[str, Form]:
        """Ways to run the case, by name."""


def load(name: str, threads: int, target: str = "cpu", database: Path | None = None) -> Peer:
    """The peer of that name; target and database are for ours. Raises ImportError."""
    if name in (OURS, TUNED):
        from .ours import Peer as Ours

        return Ours(threads, target, database)
    return import_module(f".{name}", __name__).Peer(threads)
