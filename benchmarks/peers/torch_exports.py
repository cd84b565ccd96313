"""The modules of transformers that were exported, as they were before."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch

from ..cases.exported import ExportCase


def forward(case: ExportCase) -> tuple[Callable[[], tuple[torch.Tensor, ...]], tuple[str, ...]]:
    """A call, and the names of its results."""
    sys.path.append(str(Path(__file__).parents[2] / "tests" / "exports"))
    try:
        from export import exports
        from wrappers import SETTINGS, build
    finally:
        sys.path.pop()
    export = next(export for export in exports() if export.name == case.export)
    module = build(export.model, export.past, False, export.half)
    # The arguments in the order of the graph's inputs; lists are spread there.
    tensors = iter([torch.from_numpy(array) for array in case.feeds().values()])
    form = module.inputs(SETTINGS[case.setting], np.random.default_rng(0))
    arguments = {
        name: [next(tensors) for _ in value] if isinstance(value, list) else next(tensors)
        for name, value in form.items()
    }

    def call() -> tuple[torch.Tensor, ...]:
        results: Any = module(**arguments)
        return tuple(results)

    return call, tuple(module.results())
