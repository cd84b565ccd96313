"""The modules of transformers that were exported, as they were before."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import torch

from ..cases.exported import ExportCase, exports_module


def forward(case: ExportCase) -> tuple[Callable[[], tuple[torch.Tensor, ...]], tuple[str, ...]]:
    """A call, and the names of its results."""
    exports, wrappers = exports_module("export"), exports_module("wrappers")
    export = next(export for export in exports.exports() if export.name == case.export)
    model = exports.BY_NAME[export.model]
    module = wrappers.build(model, export.past, model.size, export.half)
    # The arguments in the order of the graph's inputs; lists are spread there.
    tensors = iter([torch.from_numpy(array) for array in case.feeds().values()])
    form = module.inputs(exports_module("forms").SETTINGS[case.setting], np.random.default_rng(0))
    arguments = {
        name: [next(tensors) for _ in value] if isinstance(value, list) else next(tensors)
        for name, value in form.items()
    }

    def call() -> tuple[torch.Tensor, ...]:
        results: Any = module(**arguments)
        return tuple(results)

    return call, tuple(module.results())
