"""Tiles: the constants of a kernel on which nothing but speed depends.

Each kernel has a record of its own. What a tuner needs of one is here: the values that are worth a try, what is legal
of them for a problem on a machine, the legal record that is nearest to any other, and the one that serves untuned.
Legality is checked once, so that kernels need not.
"""

from __future__ import annotations

import dataclasses
import heapq
from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar, TypeAlias

if TYPE_CHECKING:
    from typing import Self  # of Python 3.11

Value: TypeAlias = int | bool | None

Space: TypeAlias = dict[str, tuple[Value, ...]]
"""By field, values in an order in which neighbors are alike."""


@dataclass(frozen=True)
class Tiles(ABC):
    """`problem` is what a kernel's rule has read: an AttentionProblem, matmuls, nothing; `machine` its target's.

    version is raised when the kernel changes so that what was found for it before says nothing of it any more.
    """

    version: ClassVar[int] = 1

    @classmethod
    @abstractmethod
    def default(cls, problem: Any, machine: Any) -> Self:
        """Untuned but good."""

    @classmethod
    @abstractmethod
    def space(cls, problem: Any, machine: Any) -> Space:
        """Values of every field that are worth a try. Some combinations are illegal."""

    @abstractmethod
    def rules(self, problem: Any, machine: Any) -> dict[str, bool]:
        """Whether each rule holds, by what it says."""

    def estimate(self, problem: Any, machine: Any) -> float:
        """The logarithm of the time that such tiles should take, up to a constant: what a tuner tries first."""
        return 0.0

    def check(self, problem: Any, machine: Any) -> None:
        """Raises ValueError for tiles that the kernel cannot use."""
        broken = [rule for rule, holds in self.rules(problem, machine).items() if not holds]
        if broken:
            raise ValueError(f"Illegal {self}: {'; '.join(broken)}.")

    def is_legal(self, problem: Any, machine: Any) -> bool:
        return all(self.rules(problem, machine).values())

    def nearest_legal(self, problem: Any, machine: Any) -> Self:
        """The legal record of the space that is fewest steps away, a step being to a neighboring value of a field.

        Raises ValueError where nothing in the space is legal.
        """
        space = self.space(problem, machine)
        start = tuple(find_nearest_index(values, getattr(self, name)) for name, values in space.items())
        queue, seen = [(0, start)], {start}
        while queue:
            steps, places = heapq.heappop(queue)
            found = dataclasses.replace(self, **{n: values[k] for (n, values), k in zip(space.items(), places)})
            if found.is_legal(problem, machine):
                return found
            for axis, values in enumerate(space.values()):
                for k in (places[axis] - 1, places[axis] + 1):
                    neighbor = (*places[:axis], k, *places[axis + 1 :])
                    if 0 <= k < len(values) and neighbor not in seen:
                        seen.add(neighbor)
                        heapq.heappush(queue, (steps + 1, neighbor))
        raise ValueError(f"No {type(self).__name__} are legal for {problem} on {machine}.")

    def to_data(self) -> dict[str, Value]:
        """What JSON can hold."""
        return dataclasses.asdict(self)

    @classmethod
    def from_data(cls, data: Mapping[str, Value]) -> Self:
        """Raises TypeError for what are not the fields."""
        return cls(**data)


def find_nearest_index(values: tuple[Value, ...], value: Value) -> int:
    """The place of the value, or of the one nearest to it."""
    if value in values:
        return values.index(value)
    return min(range(len(values)), key=lambda k: abs((values[k] or 0) - (value or 0)))
