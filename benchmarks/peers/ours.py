"""onnx-lowering: the case's own model, compiled ahead of time with symbolic sizes, bound to its arrays."""

from __future__ import annotations

import re
from functools import partial
from pathlib import Path
from typing import Any

import lowering

from ..cases.case import Case
from . import ONE_THREAD, Contender, Form


class Peer:
    def __init__(self, threads: int, target: str, database: Path | None = None) -> None:
        self._threads, self._target, self._database = threads, target, database
        self._last: tuple[object, lowering.Model] | None = None

    def forms(self, case: Case) -> dict[str, Form]:
        """Bound; where there are several threads one thread as well, which shows how it scales."""
        forms = {"bound": Form(partial(self._bound, case, self._threads), self._threads)}
        if self._threads > 1 and self._database is None:
            forms[f"bound{ONE_THREAD}"] = Form(partial(self._bound, case, 1), 1)
        return forms

    def _bound(self, case: Case, threads: int) -> Contender:
        return Contender(self._compiled(case).bind(case.own_feeds(), threads=threads), dict)

    def _compiled(self, case: Case) -> lowering.Model:
        """The last one where it serves, since cases of one source follow each other."""
        key = (case.source, *case.options.items())
        if self._last is None or self._last[0] != key:
            donate = tuple(map(re.escape, case.in_place.values()))
            options: dict[str, Any] = {"donate": donate, "threads": 1, "database": self._database, **case.options}
            self._last = key, lowering.compile(case.model(), self._target, **options)
        return self._last[1]
