"""The report of `doctor`: facts and problems."""

from __future__ import annotations

from dataclasses import dataclass, field


@dataclass(frozen=True)
class SetupProblem:
    """A problem and its fix; `blocks` says whether compiling for this machine needs the fix."""

    what: str
    fix: str
    blocks: bool


@dataclass
class DiagnosisReport:
    """Facts by area and name, as text, and problems."""

    facts: dict[str, dict[str, str]] = field(default_factory=dict)
    problems: list[SetupProblem] = field(default_factory=list)

    @property
    def ok(self) -> bool:
        """Return whether everything needed to compile for this machine is present."""
        return not any(problem.blocks for problem in self.problems)

    def add_fact(self, area: str, name: str, value: str) -> None:
        self.facts.setdefault(area, {})[name] = value

    def add_problem(self, what: str, fix: str, blocks: bool = False) -> None:
        self.problems.append(SetupProblem(what, fix, blocks))

    def __str__(self) -> str:
        lines = []
        for area, facts in self.facts.items():
            width = max(map(len, facts))
            lines += [area, *(f"  {name:{width}}  {value}" for name, value in facts.items())]
        for problem in self.problems:
            lines += [f"{'PROBLEM' if problem.blocks else 'note'}: {problem.what}", f"  {problem.fix}"]
        return "\n".join([*lines, "all that is needed is here" if self.ok else "something that is needed is missing"])
