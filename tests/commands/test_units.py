"""Numbers as people read them."""

from __future__ import annotations

import pytest

from lowering import units


@pytest.mark.parametrize(
    ("seconds", "text"),
    [(0, "0 ns"), (4.2e-8, "42 ns"), (9.996e-7, "1 us"), (0.0023456, "2.35 ms"), (0.99961, "1 s"), (1234.5, "1234 s")],
)
def test_times(seconds: float, text: str) -> None:
    """A number that rounds up to a thousand becomes one of the next unit."""
    assert units.format_time(seconds) == text
