"""Artifacts that many tests load: each built once per test process."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

import lowering
from tests.runtime import modules


@pytest.fixture(scope="session")
def artifact(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Path]:
    """artifact(name, *arguments): the folder of the model that `modules.<name>` builds."""
    built: dict[tuple, Path] = {}

    def get(name: str, *arguments: object, **fields: object) -> Path:
        key = (name, arguments, tuple(fields.items()))
        if key not in built:
            folder = tmp_path_factory.mktemp("artifacts") / name
            built[key] = getattr(modules, name)(folder, *arguments, **fields)
        return built[key]

    return get


@pytest.fixture(scope="session")
def model(artifact: Callable[..., Path]) -> Callable[..., lowering.Model]:
    """model(name, *arguments): the loaded artifact."""
    return lambda name, *arguments, **fields: lowering.load(artifact(name, *arguments, **fields))
