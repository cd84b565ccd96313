"""One zygote for each test process."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from .pool import Zygote


@pytest.fixture(scope="session")
def zygote() -> Iterator[Zygote]:
    with Zygote() as started:
        yield started
