"""What was found, and what is wrong with it."""

from __future__ import annotations

from dataclasses import dataclass, field


@dataclass(frozen=True)
class Problem:
    """What is wrong and how to fix it; blocks says whether compiling for this machine needs it."""

    what: str
    fix: str
    blocks: bool


@dataclass
class Report:
    """Facts by area and name, as text, and problems."""

    facts: dict[str, dict[str, str]] = field(default_factory=dict)
    problems: list[Problem] = field(default_factory=list)

    @property
    def ok(self) -> bool:
        """Whether nothing is missing that compiling for this machine needs."""
        return not any(problem.blocks for problem in self.problems)

    def say(self, area: str, name: str, value: str) -> None:
        self.facts.setdefault(area, {})[name] = value

    def blame(self, what: str, fix: str, blocks: bool = False) -> None:
        self.problems.append(Problem(what, fix, blocks))

    def __str__(self) -> str:
        lines = []
        for area, facts in self.facts.items():
            width = max(map(len, facts))
            lines += [area, *(f"  {name:{width}}  {value}" for name, value in facts.items())]
        for problem in self.problems:
            lines += [f"{'PROBLEM' if problem.blocks else 'note'}: {problem.what}", f"  {problem.fix}"]
        return "\n".join([*lines, "all that is needed is here" if self.ok else "something that is needed is missing"])
