"""A folder that shows a failure to others: a model, its inputs, and the command that fails with them."""

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
from .parts import Part
from .references import MOST_INSIDE, bytes_of_weights, with_weights_inside

MODEL, _TEXT = "model.onnx", "README.txt"
_NAMED = 8  # operators


@dataclass(frozen=True)
class Reproducer:
    """Where the smallest part of a model that still fails is, of how many nodes, and the command that shows it.

    fails says whether the command was seen to fail with what the files hold.
    """

    folder: str
    operators: tuple[str, ...]
    of: int
    command: str
    fails: bool

    def __str__(self) -> str:
        names = ", ".join(self.operators[:_NAMED]) + (", ..." if len(self.operators) > _NAMED else "")
        still = "still fail" if self.fails else "failed, but do not from the files"
        return f"{len(self.operators)} of {self.of} nodes {still} ({names}); see it by: {self.command}"


def check_free(folder: Path) -> None:
    """Raises InputError where something is in the place of a new folder, or of one that it is in."""
    for there in (folder, *folder.parents):
        if os.path.lexists(there):
            if not there.is_dir() or (there == folder and os.listdir(folder)):
                raise InputError(f"'{there}' is there, and is no empty folder: name a new one for the reduced model.")
            return


def write(part: Part, folder: Path, options: Sequence[str]) -> str:
    """Writes the folder, all of it or nothing; answers with the command. Raises LoweringError where it cannot be
    written."""
    check_free(folder)
    files = {name: f"{quote(name, safe='')}.npy" for name in part.feeds}
    inputs = [word for name, file in files.items() for word in ("--input", f"{name}={folder / file}")]
    command = shlex.join(["onnx-lowering", "verify", str(folder / MODEL), *inputs, *options])
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(prefix=f".{folder.name}.", dir=folder.parent) as work:
            new = Path(work) / "new"
            new.mkdir()
            if bytes_of_weights(part.model) < MOST_INSIDE:
                ir.save(with_weights_inside(part.model), new / MODEL)
            else:
                ir.save(part.model, new / MODEL, external_data=f"{MODEL}.data")
            for name, file in files.items():
                np.save(new / file, part.feeds[name])
            (new / _TEXT).write_text(
                f"Part of a larger model that onnx-lowering {VERSION} compiles wrongly or not at all.\nIts inputs are "
                f"values of that model as the reference computes them. To see it:\n\n    {command}\n"
            )
            new.rename(folder)
    except OSError as error:
        raise LoweringError(f"'{folder}' cannot be written: {error.strerror or error}.") from error
    return command


def operators(part: Part) -> tuple[str, ...]:
    """The operators of its nodes, in order."""
    return tuple(node.op_type for node in part.model.graph if node.op_type != "Constant")
