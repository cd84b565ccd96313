"""Tiles: the constants of a kernel that affect nothing but speed.

Each kernel has a record of its own. Its interface for a tuner is here: the candidate values, the legal ones for a
problem on a machine, the legal record nearest to any other, and the untuned default. Legality is checked once, so that
kernels need not check it.
"""

from __future__ import annotations

import dataclasses
import heapq
from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar, TypeAlias

if TYPE_CHECKING:
    from typing import Self  # since Python 3.11

Value: TypeAlias = int | bool | None

Space: TypeAlias = dict[str, tuple[Value, ...]]
"""By field, values in an order in which neighbors are similar."""


@dataclass(frozen=True)
class Tiles(ABC):
    """The tiles of one kernel.

    `problem` is the analysis of a kernel's rule: an AttentionProblem, matmuls, nothing; `machine` is its target's.
    version is raised when the kernel changes so that earlier tuning results no longer apply to it.
    """

    version: ClassVar[int] = 1

    @classmethod
    def default(cls, problem: Any, machine: Any) -> Self:
        """Return untuned but good tiles: those of the fields' defaults, unless a kernel chooses by the problem."""
        return cls()

    @classmethod
    @abstractmethod
    def space(cls, problem: Any, machine: Any) -> Space:
        """Return candidate values of every field. Some combinations are illegal."""

    @abstractmethod
    def rules(self, problem: Any, machine: Any) -> dict[str, bool]:
        """Return whether each rule is met, by its text."""

    def estimate(self, problem: Any, machine: Any) -> float:
        """Return the logarithm of the estimated time, up to a constant: a tuner tries low ones first."""
        return 0.0

    def check(self, problem: Any, machine: Any) -> None:
        """Raise ValueError for tiles that the kernel cannot use."""
        violated = [rule for rule, is_met in self.rules(problem, machine).items() if not is_met]
        if violated:
            raise ValueError(f"Illegal {self}: {'; '.join(violated)}.")

    def is_legal(self, problem: Any, machine: Any) -> bool:
        return all(self.rules(problem, machine).values())

    def nearest_legal(self, problem: Any, machine: Any) -> Self:
        """Return the legal record of the space that is the fewest steps away, a step being to a neighboring value of a
        field.

        Raises ValueError if nothing in the space is legal.
        """
        space = self.space(problem, machine)
        start = tuple(find_nearest_index(values, getattr(self, name)) for name, values in space.items())
        queue, seen = [(0, start)], {start}
        while queue:
            steps, indices = heapq.heappop(queue)
            candidate = dataclasses.replace(self, **{n: values[k] for (n, values), k in zip(space.items(), indices)})
            if candidate.is_legal(problem, machine):
                return candidate
            for axis, values in enumerate(space.values()):
                for k in (indices[axis] - 1, indices[axis] + 1):
                    neighbor = (*indices[:axis], k, *indices[axis + 1 :])
                    if 0 <= k < len(values) and neighbor not in seen:
                        seen.add(neighbor)
                        heapq.heappush(queue, (steps + 1, neighbor))
        raise ValueError(f"No {type(self).__name__} are legal for {problem} on {machine}.")

    def to_data(self) -> dict[str, Value]:
        """Return data that JSON can represent."""
        return dataclasses.asdict(self)

    @classmethod
    def from_data(cls, data: Mapping[str, Value]) -> Self:
        """Return the tiles of these fields. Raises TypeError for other fields."""
        return cls(**data)


def find_nearest_index(values: tuple[Value, ...], value: Value) -> int:
    """Return the index of the value, or of the one nearest to it."""
    if value in values:
        return values.index(value)
    return min(range(len(values)), key=lambda k: abs((values[k] or 0) - (value or 0)))
