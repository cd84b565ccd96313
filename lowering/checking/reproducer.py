"""A folder that reproduces a failure: a model, its inputs, and the command that fails with them."""

from __future__ import annotations

import os
import shlex
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import quote

import numpy as np
import onnx_ir as ir

from ..errors import InputError, LoweringError
from ..version import VERSION
from .references import MOST_INSIDE, count_weight_bytes, inline_weights
from .submodels import Submodel

MODEL, _TEXT = "model.onnx", "README.txt"
_MAX_NAMED = 8  # operators in the summary


@dataclass(frozen=True)
class Reproducer:
    """The minimal failing submodel: its folder, its operators, and the command that shows the failure.

    `of` is the number of nodes of the whole model. `fails` says whether the command failed with the written files.
    """

    folder: str
    operators: tuple[str, ...]
    of: int
    command: str
    fails: bool

    def __str__(self) -> str:
        names = ", ".join(self.operators[:_MAX_NAMED]) + (", ..." if len(self.operators) > _MAX_NAMED else "")
        status = "still fail" if self.fails else "failed, but the written files do not reproduce it"
        return f"{len(self.operators)} of {self.of} nodes {status} ({names}); see it by: {self.command}"


def check_folder_is_free(folder: Path) -> None:
    """Raise InputError unless the folder is absent or empty, and its nearest existing ancestor is a folder."""
    for ancestor in (folder, *folder.parents):
        if os.path.lexists(ancestor):
            if not ancestor.is_dir() or (ancestor == folder and os.listdir(folder)):
                raise InputError(
                    "argument.folder_not_empty",
                    f"'{ancestor}' exists and is not an empty folder. Name a new folder for the reduced model.",
                )
            return


def write_reproducer(submodel: Submodel, folder: Path, options: Sequence[str]) -> str:
    """Write the folder, atomically, and return the command.

    Raises:
        LoweringError: The folder cannot be written.
    """
    check_folder_is_free(folder)
    files = {name: f"{quote(name, safe='')}.npy" for name in submodel.feeds}
    inputs = [argument for name, file in files.items() for argument in ("--input", f"{name}={folder / file}")]
    command = shlex.join(["onnx-lowering", "verify", str(folder / MODEL), *inputs, *options])
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(prefix=f".{folder.name}.", dir=folder.parent) as temporary:
            staging = Path(temporary) / "new"
            staging.mkdir()
            if count_weight_bytes(submodel.model) < MOST_INSIDE:
                ir.save(inline_weights(submodel.model), staging / MODEL)
            else:
                ir.save(submodel.model, staging / MODEL, external_data=f"{MODEL}.data")
            for name, file in files.items():
                np.save(staging / file, submodel.feeds[name])
            (staging / _TEXT).write_text(
                f"Part of a larger model that onnx-lowering {VERSION} compiles wrongly or not at all.\nIts inputs are "
                f"values of that model as the reference computes them. To see it:\n\n    {command}\n"
            )
            staging.rename(folder)
    except OSError as error:
        raise LoweringError(
            "argument.path_unwritable", f"'{folder}' cannot be written: {error.strerror or error}."
        ) from error
    return command


def list_operators(submodel: Submodel) -> tuple[str, ...]:
    """Return the operators of the submodel's nodes, in order."""
    return tuple(node.op_type for node in submodel.model.graph if node.op_type != "Constant")
