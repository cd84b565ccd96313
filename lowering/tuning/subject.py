"""The model that is tuned, with everything that decides what its kernels are."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from ..compiling import artifact
from ..compiling.compiler import Compiled, compiled
from ..graph.declared_sizes import Dims
from ..graph.model import ModelLike
from ..importing.quantised import Scheme
from ..target import Target


@dataclass(frozen=True)
class Subject:
    """Parameters as for `tune`."""

    model: ModelLike
    target: str
    sizes: Sequence[Mapping[str, int]]
    threads: int
    dims: Dims | None = None
    static_cache: int | None = None
    weights: Scheme | None = None
    donate: Sequence[str] = ()

    def compile_into(self, folder: Path, database: Path | None = None, stand_in: Target | None = None) -> Compiled:
        """Compiles it into an artifact folder; the others are as for `compiled`. Raises what that raises."""
        done = compiled(
            self.model, self.target, self.donate, self.threads, None, self.dims, self.static_cache, self.weights,
            database, stand_in,
        )  # fmt: skip
        artifact.write(folder, done.libraries, done.manifest, done.weights)
        return done
