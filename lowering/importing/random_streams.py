"""The seed of a model's random nodes, and their independent streams: one for each node and loop iteration."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

import numpy as np

from .values import Value


@dataclass
class RandomStreams:
    """The random state shared by the random nodes of one import.

    seed is an int64 scalar: a constant, or an input of the model. steps are the iteration numbers (int64 scalars) of
    the run-time loops around the node that is being lowered.
    """

    seed: Value
    steps: list[Value] = field(default_factory=list)
    _count: int = 0

    @classmethod
    def from_number(cls, seed: int) -> RandomStreams:
        return cls(Value("int64", (), contents=np.asarray(seed, np.int64)))

    def next_stream(self) -> int:
        """Return a number that no other node has: the random nodes are counted in the order of the model."""
        self._count += 1
        return self._count - 1

    @contextmanager
    def inside_step(self, number: Value) -> Iterator[None]:
        """Make random nodes that are lowered inside draw other numbers in each iteration of a loop."""
        self.steps.append(number)
        try:
            yield
        finally:
            self.steps.pop()
