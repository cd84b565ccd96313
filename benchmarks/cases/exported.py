"""Every model of docs/models.md, as tests/exports/export.py writes it."""

from __future__ import annotations

from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import Any

import numpy as np
import onnx

from .case import Arrays, Bar, Case, Work

_PAGE = Path(__file__).parents[2] / "docs" / "models.md"
_TOLERANCE = {"f32": 1e-4, "f16": 2e-2}

# The shape setting of tests/exports/wrappers.py: a decoder with a past reads one token as in decoding, others most.
_STEP, _LARGEST = 1, 2


def exports_module(name: str) -> Any:
    """Return a module of tests/exports."""
    return import_module(f"tests.exports.{name}")


@dataclass(frozen=True, kw_only=True)
class ExportCase(Case):
    """One export: model.onnx, and for each shape setting inputs with what PyTorch computes in float64.

    folder is where the exports are, one folder each.
    """

    export: str
    past: bool
    folder: Path | None = None

    @property
    def tolerance(self) -> float:
        return _TOLERANCE[self.dtype]

    @property
    def source(self) -> str:
        return self.export

    @property
    def setting(self) -> int:
        return _STEP if self.past else _LARGEST

    @property
    def exists(self) -> bool:
        """Whether the export is in the folder."""
        return ((self.folder or Path()) / self.export).is_dir()

    def path(self) -> Path:
        path = (self.folder or Path()) / self.export
        if not self.exists:
            raise FileNotFoundError(
                f"'{path}' is missing: run `python -m tests.exports.export {self.export} --folder {self.folder}`"
                f"{' with --published' if self.export.startswith('published') else ''}."
            )
        return path

    def _arrays(self) -> Arrays:
        with np.load(self.path() / f"{self.setting}.npz") as arrays:
            return dict(arrays)

    def feeds(self) -> Arrays:
        return {name: array for name, array in self._arrays().items() if not name.startswith("=")}

    def expected(self) -> Arrays:
        return {name[1:]: array for name, array in self._arrays().items() if name.startswith("=")}

    def model(self) -> onnx.ModelProto:
        return onnx.load(self.path() / "model.onnx")

    def work(self) -> Work:
        """Not counted: the models are small, and most of them far from every limit."""
        return Work(0.0, "FLOP")


class PublishedWidths(ExportCase):
    """An export at the widths of a checkpoint, which is called at the one setting that it was made for."""

    @property
    def source(self) -> str:
        return self.name

    @property
    def setting(self) -> int:
        return 0


def cases() -> list[ExportCase]:
    """Return the cases of the page's table: model, past, exporter, opset, type."""
    export_cases = []
    for line in _PAGE.read_text().splitlines():
        cells = [cell.strip() for cell in line.split("|")[1:6]]
        if len(cells) < 5 or cells[2] not in ("dynamo", "traced"):
            continue
        model, past, exporter, opset, dtype = cells
        half = dtype == "float16"
        fields = [model, "past" * bool(past), f"{exporter}{opset}", "f16" * half]
        name = "-".join(field for field in fields if field)
        export_cases.append(
            ExportCase(
                name=name, group="models", bar=Bar(ratio=1.0), dtype="f16" if half else "f32", export=name,
                past=bool(past),
            )
        )  # fmt: skip
    return export_cases
