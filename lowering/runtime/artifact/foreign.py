"""Models that this machine cannot run, because they were compiled for another one."""

from __future__ import annotations

from typing import Any, NoReturn

from ...errors import ArtifactError
from ...manifest import Manifest
from ..model import Model
from .files import ArtifactFiles


class ForeignModel(Model):
    """A model that can be inspected and saved. Calls raise ArtifactError with the reason."""

    def __init__(self, files: ArtifactFiles, manifest: Manifest, reason: str) -> None:
        self.manifest = manifest
        self.gpu = self.setup = None
        self._files = files
        self._reason, self._threads = reason, None

    def _refuse(self, *arguments: Any, **options: Any) -> NoReturn:
        raise ArtifactError(
            "artifact.machine_unsupported",
            f"the model was compiled for '{self.manifest.target}' and cannot run here: {self._reason} "
            "Save it, and load it on a machine that can.",
        )

    run = submit = bind = decoder = instrumented = function = _refuse
