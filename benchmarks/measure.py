"""One case: everybody is made and checked against float64 first, then those that are right take turns.

On one thread all are in this process. On several each is in a process of its own, which stands still but for its turns.
"""

from __future__ import annotations

import gc
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from datetime import date
from functools import partial
from typing import Any, Protocol

from .cases.case import Arrays, Case, error
from .isolated import Failed, Isolated, said
from .limits import limits
from .peers import ONE_THREAD, Contender, Form, Peer
from .records import Outcome, Record
from .timing import Seconds, interleaved, timed

Opener = Callable[[], Peer]
"""Makes a peer, in whichever process it is called."""

_LIMIT = "limit"


class Stand(Protocol):
    """Some forms of a contender, wherever they are."""

    def check(self, form: str) -> tuple[float | None, str]:
        """Makes the form; answers with its error, or why it refuses."""

    def turn(self, form: str, calls: int) -> Seconds:
        """Times so many calls of a form that was checked."""

    def close(self) -> None: ...


class Here:
    """Forms in this process. Without `expected` their answers are not looked at."""

    def __init__(self, forms: Mapping[str, Form], expected: Arrays) -> None:
        self._forms, self._expected = forms, expected
        self._made: dict[str, Contender] = {}

    def check(self, form: str) -> tuple[float | None, str]:
        try:
            self._made[form] = contender = self._forms[form].make()
            if not self._expected:
                return None, ""
            answers = contender.answers(contender.call())
        except Exception as failure:  # libraries refuse in every way there is, and must not end the table
            return None, said(failure)
        compared = [error(answers[name], expected) for name, expected in self._expected.items() if name in answers]
        return max(compared, default=0.0), ""

    def turn(self, form: str, calls: int) -> Seconds:
        return timed(self._made[form].call, calls)

    def close(self) -> None:
        self._made.clear()


class Apart:
    """The same in a process of its own; `make` makes a `Here` there."""

    def __init__(self, make: Callable[..., Here], *arguments: Any) -> None:
        self._process = Isolated(make, *arguments)

    def check(self, form: str) -> tuple[float | None, str]:
        try:
            return self._process.ask("check", form)
        except Failed as failure:
            return None, str(failure)

    def turn(self, form: str, calls: int) -> Seconds:
        return self._process.ask("turn", form, calls)

    def close(self) -> None:
        self._process.close()


@dataclass
class Prepared:
    """A case whose forms are made and checked; `measure` times those that are right, once, and lets all of them go."""

    case: Case
    threads: int
    apart: bool
    outcomes: list[Outcome] = field(default_factory=list)
    bounds: list[Outcome] = field(default_factory=list)
    turns: dict[str, Callable[[int], Seconds]] = field(default_factory=dict)
    stands: list[Stand] = field(default_factory=list)

    def add(self, contender: str, forms: Mapping[str, Form], expected: Arrays, remake: Callable[..., Here]) -> None:
        """Checks the contender's forms; remake(expected) makes them in another process."""
        for names in filter(None, _together(forms) if self.apart else [list(forms)]):
            stand: Stand = Apart(remake, expected) if self.apart else Here(forms, expected)
            self.stands.append(stand)
            for name in names:
                worst, refused = stand.check(name)
                outcome = Outcome(contender, name, forms[name].threads, error=worst, refused=refused)
                (self.bounds if contender == _LIMIT else self.outcomes).append(outcome)
                if not refused and (worst is None or worst <= self.case.tolerance):
                    self.turns[_key(outcome)] = partial(stand.turn, name)

    def measure(self, turns: int, seconds: float) -> Record:
        """Beside the limits; each turn takes about `seconds`."""
        work = self.case.work()
        forms, amount = limits(work, self.threads)
        try:
            self.add(_LIMIT, forms, {}, partial(_limits, work, self.threads))
            timings = interleaved(self.turns, turns, seconds)
        finally:
            self.close()

        def with_timings(outcomes: list[Outcome]) -> list[Outcome]:
            return [replace(outcome, timing=timings.get(_key(outcome))) for outcome in outcomes]

        return Record(
            self.case.name,
            self.case.group,
            date.today().isoformat(),
            self.threads,
            work.amount,
            work.unit,
            with_timings(self.outcomes),
            with_timings(self.bounds),
            amount,
        )

    def close(self) -> None:
        for stand in self.stands:
            stand.close()
        self.turns.clear()
        self.stands.clear()
        gc.collect()  # models are large, and the next case's come on top


def prepare(case: Case, peers: Mapping[str, Peer], openers: Mapping[str, Opener], threads: int) -> Prepared:
    """Prepare a case. peers contains all by name, ours too; openers, which are picklable, open them elsewhere."""
    prepared, expected = Prepared(case, threads, apart=threads > 1), case.expected()
    try:
        for name, peer in peers.items():
            prepared.add(name, peer.forms(case), expected, partial(_forms, openers[name], case))
    except BaseException:
        prepared.close()
        raise
    return prepared


def _key(outcome: Outcome) -> str:
    return f"{outcome.contender}: {outcome.form}"


def _together(forms: Mapping[str, Form]) -> list[list[str]]:
    """Return the names of forms that share a process: each with its own form on one thread."""
    groups: dict[str, list[str]] = {}
    for name in forms:
        groups.setdefault(name.removesuffix(ONE_THREAD), []).append(name)
    return list(groups.values())


def _forms(opener: Opener, case: Case, expected: Arrays) -> Here:
    return Here(opener().forms(case), expected)


def _limits(work: Any, threads: int, expected: Arrays) -> Here:
    return Here(limits(work, threads)[0], expected)
