"""The model to tune, with all options that determine its kernels."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from ...compiling import artifact
from ...compiling.compilation import CompiledModel, compiled
from ...compiling.options import CompileOptions
from ...graph.loading.model import ModelLike
from ...target import Target


@dataclass(frozen=True)
class TunedModel:
    """The model to tune. sizes are those that kernels are tuned at, as for `tune`."""

    model: ModelLike
    sizes: Sequence[Mapping[str, int]]
    options: CompileOptions

    @property
    def threads(self) -> int:
        """The number of threads that kernels are tuned for."""
        return self.options.threads or 1

    def compile_into(self, folder: Path, database: Path | None = None, stand_in: Target | None = None) -> CompiledModel:
        """Compile the model into an artifact folder, with the records of that database.

        stand_in is as for `compiled`. Raises its exceptions.
        """
        result = compiled(self.model, replace(self.options, database=database), stand_in)
        artifact.write_artifact(folder, result.artifacts)
        return result
