"""Reads what `compile --dump-dir` wrote."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import onnx_ir as ir

from ..compiling.dump_folder import FILE
from ..errors import InputError
from ..manifest import FILE as MANIFEST
from ..manifest import Manifest
from .script import Script

# A function of a module, down to the line that is further out, of the decorator of the next or of what follows them.
_FUNCTION = re.compile(r"^    @[RT]\..*\n    def (\w+)\(.*\n(?:(?:     .*)?\n)*", re.MULTILINE)


class Dump:
    """The folder of a compilation. Raises InputError where it is not that of the artifact with this manifest."""

    def __init__(self, folder: Path, manifest: Manifest) -> None:
        self.folder = folder
        self._scripts: dict[str, Script] = {}
        try:
            of = json.loads((folder / FILE).read_text())["hashes"][MANIFEST]
        except FileNotFoundError as error:
            raise InputError(
                f"'{folder}' is no complete dump: it has no {FILE}. `compile --dump-dir {folder}` writes one."
            ) from error
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise InputError(f"'{folder / FILE}' cannot be read; `compile --dump-dir` writes it.") from error
        if of != manifest.hashes[MANIFEST]:
            raise InputError(
                f"'{folder}' is the dump of another compilation: compile the model again, with -o and --dump-dir."
            )

    def model(self, name: str) -> ir.Model:
        """ "given" or "fused"."""
        return self._read(f"{name}.onnx", lambda path: ir.load(path))

    def script(self, name: str) -> Script:
        """The module behind a pass; where there are several architectures, that of the last."""
        if name not in self._scripts:
            self._scripts[name] = self._split(name)
        return self._scripts[name]

    def _split(self, name: str) -> Script:
        found = sorted(self.folder.glob(f"[0-9]*_{name}.py"), key=lambda path: int(path.name.partition("_")[0]))
        path = found[-1] if found else self.folder / f"{name}.py"
        text = self._read(path.name, lambda path: path.read_text("utf-8"))
        matches = {match[1]: match for match in _FUNCTION.finditer(text)}
        lines = {name: text.count("\n", 0, match.start()) + 1 for name, match in matches.items()}
        return Script(path, {name: match[0].rstrip("\n") for name, match in matches.items()}, lines)

    def _read(self, name: str, read: Any) -> Any:
        path = self.folder / name
        try:
            return read(path)
        except Exception as error:  # whatever readers of models think of what is no model
            raise InputError(f"'{path}' cannot be read: compile the model again, with --dump-dir.") from error
