"""Random cases of gpt_attention: configurations in which every two features soon meet, and calls of each.

Every case is legal. gpt_case_features lists the features and their contradictions, gpt_call_drawing draws the data,
gpt_malformed_calls makes illegal calls of them.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np

from tests.serving.gpt_attention.gpt_call_drawing import draw_arguments
from tests.serving.gpt_attention.gpt_case_features import DOMAINS, NA, TRAPS, Features, draw_configurations, is_trapped
from tests.serving.gpt_attention.gpt_malformed_calls import Malformed, malformed

__all__ = ["FEATURES", "Case", "Malformed", "cases", "malformed"]


@dataclass(frozen=True)
class Case(Features):
    """A configuration. `arrays` draws one call after another, each of other sizes."""

    def arrays(self, rng: np.random.Generator) -> dict[str, Any]:
        """Draw all arguments of one call, attributes and qkv among them, without return_lse, check and target.

        Caches and pools are new arrays that the call writes in place; copy them before the call to compare.
        """
        return draw_arguments(self, rng)


def cases(seed: int, count: int) -> Iterator[Case]:
    """Yield `count` cases, the same for the same seed; the first forty include a case for each trap."""
    for features in itertools.islice(draw_configurations(seed), count):
        yield Case(**vars(features))


def _matches(name: str, value: Any) -> Callable[[Features], bool]:
    return lambda case: getattr(case, name) == value


def _falls_into(trap: str) -> Callable[[Features], bool]:
    return lambda case: is_trapped(case, TRAPS[trap])


FEATURES: list[tuple[str, Callable[[Features], bool]]] = [
    *(
        (f"{name}: {value}", _matches(name, value))
        for name, values in DOMAINS.items()
        for value in values
        if value != NA
    ),
    *((f"trap: {trap}", _falls_into(trap)) for trap in TRAPS),
]
