"""Keep processes that build and measure candidates alive from one tuning to the next.

Their start takes most of the time of a short tuning. They work in child processes, as always."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence

import pytest

from lowering.measuring import measure
from lowering.measuring.isolated import Helper
from lowering.tuning import local


@pytest.fixture(scope="session", autouse=True)
def helpers_live_on() -> Iterator[None]:
    helpers: dict[tuple, Helper] = {}

    def helper(imports: Sequence[str]) -> Helper:
        environment = {name: value for name, value in os.environ.items() if name != "PYTEST_CURRENT_TEST"}
        return helpers.setdefault((*imports, *sorted(environment.items())), Helper(imports))

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(local, "Helper", helper)
        patch.setattr(local, "runner", lambda: helper([measure.__name__]))
        patch.setattr(local.LocalBench, "close", lambda self: None)
        patch.setattr(local.LibraryBuilder, "close", lambda self: None)
        yield
    for running in helpers.values():
        running.close()
