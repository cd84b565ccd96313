"""Reader of the folder that `compile --dump-dir` writes."""

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
from .script import ModuleScript

# A function of a module, up to the next line with less indentation: a decorator, or the end of the functions.
_FUNCTION = re.compile(r"^    @[RT]\..*\n    def (\w+)\(.*\n(?:(?:     .*)?\n)*", re.MULTILINE)


class CompilationDump:
    """The folder of a compilation.

    Raises:
        InputError: It is not the folder of the artifact with this manifest.
    """

    def __init__(self, folder: Path, manifest: Manifest) -> None:
        self.folder = folder
        self._scripts: dict[str, ModuleScript] = {}
        try:
            manifest_hash = json.loads((folder / FILE).read_text())["hashes"][MANIFEST]
        except FileNotFoundError as error:
            raise InputError(
                "report.dump_incomplete",
                f"'{folder}' is not a complete dump: it has no {FILE}. Write one by `compile --dump-dir {folder}`.",
            ) from error
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise InputError(
                "report.file_unreadable", f"'{folder / FILE}' cannot be read. Write it again by `compile --dump-dir`."
            ) from error
        if manifest_hash != manifest.hashes[MANIFEST]:
            raise InputError(
                "report.dump_mismatch",
                f"'{folder}' is the dump of another compilation. Compile the model again, with -o and --dump-dir.",
            )

    def read_model(self, name: str) -> ir.Model:
        """Return the model "given" or "fused"."""
        return self._read(f"{name}.onnx", lambda path: ir.load(path))

    def read_script(self, name: str) -> ModuleScript:
        """Return the module after a pass; that of the last architecture if there are several."""
        if name not in self._scripts:
            self._scripts[name] = self._parse_script(name)
        return self._scripts[name]

    def _parse_script(self, name: str) -> ModuleScript:
        candidates = sorted(self.folder.glob(f"[0-9]*_{name}.py"), key=lambda path: int(path.name.partition("_")[0]))
        path = candidates[-1] if candidates else self.folder / f"{name}.py"
        text = self._read(path.name, lambda path: path.read_text("utf-8"))
        matches = {match[1]: match for match in _FUNCTION.finditer(text)}
        lines = {name: text.count("\n", 0, match.start()) + 1 for name, match in matches.items()}
        return ModuleScript(path, {name: match[0].rstrip("\n") for name, match in matches.items()}, lines)

    def _read(self, name: str, read: Any) -> Any:
        path = self.folder / name
        try:
            return read(path)
        except Exception as error:  # readers of models raise many types for invalid files
            raise InputError(
                "report.file_unreadable", f"'{path}' cannot be read. Compile the model again, with --dump-dir."
            ) from error
