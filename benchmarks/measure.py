"""One case: everybody is made and checked against float64 first, then those that are right take turns."""

from __future__ import annotations

import gc
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from datetime import date

from .cases.case import Arrays, Case, error
from .limits import limits
from .peers import Form, Peer
from .records import Outcome, Record
from .timing import interleaved


@dataclass
class Prepared:
    """A case whose forms are made and checked; `measure` times those that are right, once."""

    case: Case
    threads: int
    outcomes: list[Outcome]
    calls: dict[str, Callable[[], object]]

    def measure(self, turns: int, seconds: float) -> Record:
        """Beside the limits; each turn takes about `seconds`."""
        work = self.case.work()
        forms, limit_amount = limits(work, self.threads)
        bounds = [Outcome("limit", name, form.threads) for name, form in forms.items()]
        self.calls |= {_key(bound): forms[bound.form].make().call for bound in bounds}
        timings = interleaved(self.calls, turns, seconds)
        self.calls.clear()
        gc.collect()  # models are large, and the next case's come on top

        def timed(outcome: Outcome) -> Outcome:
            return replace(outcome, timing=timings.get(_key(outcome)))

        return Record(
            self.case.name,
            self.case.group,
            date.today().isoformat(),
            self.threads,
            work.amount,
            work.unit,
            [timed(outcome) for outcome in self.outcomes],
            [timed(bound) for bound in bounds],
            limit_amount,
        )


def prepare(case: Case, peers: Mapping[str, Peer], threads: int) -> Prepared:
    """peers holds everybody by name, ourselves among them."""
    prepared, expected = Prepared(case, threads, [], {}), case.expected()
    for name, peer in peers.items():
        for form_name, form in peer.forms(case).items():
            outcome, call = _checked(case, expected, Outcome(name, form_name, form.threads), form)
            prepared.outcomes.append(outcome)
            if call is not None:
                prepared.calls[_key(outcome)] = call
    return prepared


def _key(outcome: Outcome) -> str:
    return f"{outcome.contender}: {outcome.form}"


def _checked(case: Case, expected: Arrays, outcome: Outcome, form: Form) -> tuple[Outcome, Callable[[], object] | None]:
    """The form's call, if it runs and is right."""
    try:
        contender = form.make()
        answers = contender.answers(contender.call())
    except Exception as failure:  # libraries refuse in every way there is, and must not end the table
        lines = str(failure).strip().splitlines() or [""]
        return replace(outcome, refused=f"{type(failure).__name__}: {lines[0][:200]}"), None
    worst = max(error(answers[name], wanted) for name, wanted in expected.items())
    right = worst <= case.tolerance
    return replace(outcome, error=worst), contender.call if right else None
