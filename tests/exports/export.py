"""Exports the models of models.py with torch.onnx, and keeps what PyTorch computes in float64 beside them.

A folder of an export holds model.onnx (weights in model.onnx.data) and one npz per shape setting: inputs by name, and
outputs as `=name`. Nothing is downloaded.

`python tests/exports/export.py [names] --folder F` makes exports by name (all by default) where they are missing;
`python tests/exports/export.py --samples` rewrites tests/exports/samples: tiny ones, which are tested without PyTorch.
"""

from __future__ import annotations

import argparse
import os
import shutil
import warnings
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

os.environ["HF_HUB_OFFLINE"] = "1"

import numpy as np
import onnx
import torch
from models import MODELS, Model
from wrappers import SETTINGS, Wrapper, build

# The tracing exporter's newest.
_TRACED_OPSET = 17

_DYNAMO_OPSETS = (18, 23)  # decomposed; with Attention, RotaryEmbedding and RMSNormalization


@dataclass(frozen=True)
class Export:
    """One model as one exporter writes it."""

    model: Model
    past: bool
    opset: int
    traced: bool = False
    half: bool = False

    @property
    def name(self) -> str:
        parts = [self.model.name, "past" * self.past, f"{'traced' if self.traced else 'dynamo'}{self.opset}"]
        return "-".join(part for part in (*parts, "f16" * self.half) if part)

    @property
    def exporter(self) -> str:
        return "traced" if self.traced else "dynamo"


_TRACED = ("bert", "distilbert", "gpt2", "llama", "t5", "bart", "vit")
_HALF = ("bert", "gpt2", "llama", "qwen3", "mistral", "gemma2", "t5", "whisper", "vit")


def exports() -> list[Export]:
    """The whole table."""
    found = []
    for model in MODELS:
        for past in (False, True) if model.past else (False,):
            found += [Export(model, past, opset) for opset in _DYNAMO_OPSETS]
            if model.name in _TRACED:
                found.append(Export(model, past, _TRACED_OPSET, traced=True))
            if model.name in _HALF:
                found.append(Export(model, past, _DYNAMO_OPSETS[-1], half=True))
    return found


# What is committed for tests without PyTorch: every form of mask and every exporter, at the first sizes.
SAMPLES = (
    "distilbert-traced17", "gemma2-past-dynamo23", "llama-past-dynamo23", "mistral-past-dynamo18",
    "modernbert-dynamo23", "t5-dynamo18", "whisper-past-dynamo23-f16",
)  # fmt: skip
_SAMPLE_SETTINGS = 2


def make(export: Export, folder: Path, tiny: bool = False) -> Path:
    """The folder of the export within `folder`; made where it is missing."""
    made = folder / export.name
    if made.is_dir():
        return made
    partial = folder / f"{export.name}.partial"
    shutil.rmtree(partial, ignore_errors=True)
    partial.mkdir(parents=True)
    module = build(export.model, export.past, tiny, export.half)
    rng = np.random.default_rng(0)
    dtype = np.float16 if export.half else np.float32
    settings = SETTINGS[: _SAMPLE_SETTINGS if tiny else None]
    calls = [_rounded(module.inputs(setting, rng), dtype) for setting in settings]
    with warnings.catch_warnings(), torch.no_grad():
        warnings.simplefilter("ignore")
        _write(export, module, calls[0], partial / "model.onnx")
        names = _names(partial / "model.onnx")
        wide = module.double()
        for k, call in enumerate(calls):
            results = wide(**_map(call, lambda a: _tensor(a, wide=True)))
            kept = np.float32 if tiny else np.float64
            outputs = {f"={name}": r.numpy().astype(kept) for name, r in zip(module.results(), results, strict=True)}
            np.savez_compressed(partial / f"{k}.npz", **dict(zip(names, _leaves(call), strict=True)), **outputs)
    partial.rename(made)
    return made


def _write(export: Export, module: Wrapper, call: dict[str, Any], path: Path) -> None:
    arguments = tuple(_map(call, _tensor).values())
    dims = tuple(module.dims().values())
    shared: dict[str, Any] = {"opset_version": export.opset, "output_names": module.results(), "verbose": False}
    if not export.traced:
        torch.onnx.export(module, arguments, path, dynamo=True, dynamic_shapes=dims, **shared)
        return
    names = [f"input_{k}" for k in range(len(_leaves(call)))]
    axes = dict(zip(names, _leaves(dims), strict=True))
    torch.onnx.export(module, arguments, str(path), dynamo=False, input_names=names, dynamic_axes=axes, **shared)


def _names(path: Path) -> list[str]:
    return [value.name for value in onnx.load(path, load_external_data=False).graph.input]


def _rounded(call: dict[str, Any], dtype: Any) -> dict[str, Any]:
    return _map(call, lambda a: a.astype(dtype) if a.dtype.kind == "f" else a)


def _tensor(array: np.ndarray, wide: bool = False) -> torch.Tensor:
    tensor = torch.from_numpy(array)
    return tensor.double() if wide and tensor.is_floating_point() else tensor


def _map(call: dict[str, Any], function: Any) -> dict[str, Any]:
    return {k: [function(a) for a in v] if isinstance(v, list) else function(v) for k, v in call.items()}


def _leaves(call: Any) -> list[Any]:
    """The arguments in the order of the graph's inputs: lists are spread."""
    values = call.values() if isinstance(call, dict) else call
    return [leaf for value in values for leaf in (value if isinstance(value, list) else [value])]


def write_samples(folder: Path) -> None:
    """The tiny exports, each one file without names of nodes and what else exporters note for people to read."""
    shutil.rmtree(folder, ignore_errors=True)
    for export in exports():
        if export.name in SAMPLES:
            path = make(export, folder, tiny=True) / "model.onnx"
            model = onnx.load(path)
            del model.graph.value_info[:], model.graph.metadata_props[:], model.metadata_props[:]
            for node in model.graph.node:
                del node.metadata_props[:]
                node.name = node.doc_string = ""
            for value in (*model.graph.input, *model.graph.output, *model.graph.initializer):
                del value.metadata_props[:]
            Path(f"{path}.data").unlink(missing_ok=True)
            onnx.save(model, path)


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", help="exports, or models for all of their exports")
    parser.add_argument("--folder", type=Path)
    parser.add_argument("--samples", action="store_true")
    given = parser.parse_args(arguments)
    if given.samples:
        write_samples(Path(__file__).parent / "samples")
        return
    if given.folder is None:
        parser.error("--folder says where the exports go.")
    for export in exports():
        if not given.names or export.name in given.names or export.model.name in given.names:
            print(make(export, given.folder), flush=True)


if __name__ == "__main__":
    main()
