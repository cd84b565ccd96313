"""onnx-lowering: the case's own model, compiled ahead of time with symbolic sizes, bound to its arrays."""

from __future__ import annotations

import re
from functools import cache, partial

import lowering

from ..cases.case import Case
from . import Contender, Form


class Peer:
    def __init__(self, threads: int) -> None:
        self._threads = threads

    def forms(self, case: Case) -> dict[str, Form]:
        """Bound; where there are several threads one thread as well, which shows how it scales."""
        compiled = cache(
            lambda: lowering.compile(
                case.model(), donate=tuple(map(re.escape, case.in_place.values())), threads=1, **case.options
            )
        )

        def bound(threads: int) -> Contender:
            return Contender(compiled().bind(case.feeds(), threads=threads), dict)

        forms = {"bound": Form(partial(bound, self._threads), self._threads)}
        if self._threads > 1:
            forms["bound, one thread"] = Form(partial(bound, 1), 1)
        return forms
