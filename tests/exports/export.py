"""Export the models of models.py with torch.onnx, and save the float64 outputs of PyTorch next to them.

A folder of an export contains model.onnx (weights in model.onnx.data) and one npz per shape setting: inputs by name,
and outputs as `=name`. Narrow ones have half.json too: how far PyTorch itself is from that in half precision, by type,
relative to the range of the output. Nothing is downloaded.

`python -m tests.exports.export [names] --folder F` makes exports by name (all by default) where they are missing, with
`--published` those at the widths of published models (sizes.py), in every form (forms.py);
`python -m tests.exports.export --samples` adds what tests/exports/samples lacks: tiny ones, tested without PyTorch.
"""

from __future__ import annotations

import argparse
import copy
import json
import os
import shutil
import warnings
from collections.abc import Callable, Sequence
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

os.environ["HF_HUB_OFFLINE"] = "1"

import numpy as np
import onnx
import torch

from tests.exports.forms import DYNAMO_OPSETS, FORMS, PARTIAL, TRACED_OPSET, Export, published, published_half
from tests.exports.models import BY_NAME, MODELS
from tests.exports.sizes import PUBLISHED, Size, Width
from tests.exports.wrappers import Wrapper, build

HALF = ("float16", "bfloat16")
HALF_ERRORS = "half.json"

_WEIGHTS = "model.onnx.data"  # as the exporter calls it

_TRACED = ("bert", "distilbert", "gpt2", "llama", "t5", "bart", "vit")
_HALF = ("bert", "gpt2", "llama", "qwen3", "mistral", "gemma2", "t5", "whisper", "vit")


def exports() -> list[Export]:
    """Return the exports of docs/models.md."""
    result = []
    for model in MODELS:
        for past in (False, True) if model.past else (False,):
            result += [Export(model.name, past, opset) for opset in DYNAMO_OPSETS]
            if model.name in _TRACED:
                result.append(Export(model.name, past, TRACED_OPSET, traced=True))
            if model.name in _HALF:
                result.append(Export(model.name, past, DYNAMO_OPSETS[-1], half=True))
    return result


# Exports that are committed for tests without PyTorch: every form of mask and every exporter, at the first sizes, ...
_EVERY_MASK = (
    "distilbert-traced17", "gemma2-past-dynamo23", "llama-past-dynamo23", "mistral-past-dynamo18",
    "modernbert-dynamo23", "t5-dynamo18", "whisper-past-dynamo23-f16",
)  # fmt: skip

# ... every gated decoder with a static batch of 1, as servers of one user export it: sizes are folded there, and nodes
# come in another order; and forms of which exporters leave out nodes that the others have.
_FORMS = (
    "bloom-dynamo18-fixed", "flan-t5-dynamo23-batch1", "flan-t5-past-dynamo18-batch1", "gemma2-dynamo18-batch1",
    "gemma3-dynamo23-batch1", "gemma3-past-dynamo18-batch1", "llama-dynamo18-batch1", "llama-dynamo18-fixed",
    "llama-past-dynamo23-batch1", "llama-past-dynamo23-fixed", "mistral-dynamo23-batch1", "phi3-dynamo18-batch1",
    "qwen2-dynamo23-batch1", "qwen2-past-dynamo18-fixed", "qwen3-dynamo18-batch1",
)  # fmt: skip


def samples() -> list[Export]:
    """Return the exports of tests/exports/samples."""
    formed = [
        Export(model, past, opset, form=form)
        for model in BY_NAME
        for past in (False, True)
        for opset in DYNAMO_OPSETS
        for form in FORMS[1:]
    ]
    return [export for export in (*exports(), *formed) if export.name in (*_EVERY_MASK, *_FORMS)]


def make(export: Export, folder: Path, width: Width = "whole") -> Path:
    """Return the folder of the export within `folder`; export it where it is missing."""
    target = folder / export.name
    if target.is_dir():
        return target
    partial = folder / f"{export.name}{PARTIAL}"
    shutil.rmtree(partial, ignore_errors=True)
    partial.mkdir(parents=True)
    module = build(BY_NAME[export.model], export.past, _size(export, width), export.half)
    rng = np.random.default_rng(0)
    dtype = np.float16 if export.half else np.float32
    example = _rounded(module.inputs(export.seen(), rng), dtype)
    calls = [_rounded(module.inputs(setting, rng), dtype) for setting in export.settings(width)]
    with warnings.catch_warnings(), torch.no_grad():
        warnings.simplefilter("ignore")
        _write(export, module, example, partial / "model.onnx")
        names = _names(partial / "model.onnx")
        narrow = {name: copy.deepcopy(module).to(getattr(torch, name)) for name in HALF} if width == "narrow" else {}
        wide, errors = module.double(), dict.fromkeys(narrow, 0.0)
        for k, call in enumerate(calls):
            results = wide(**_map(call, _tensor(torch.float64)))
            for name, half in narrow.items():
                pairs = zip(half(**_map(call, _tensor(getattr(torch, name)))), results, strict=True)
                errors[name] = max(errors[name], *(float((a - b).abs().max() / (b.max() - b.min())) for a, b in pairs))
            output_type = np.float32 if width == "tiny" or export.published else np.float64
            outputs = {
                f"={name}": r.numpy().astype(output_type) for name, r in zip(module.results(), results, strict=True)
            }
            save = np.savez if export.published else np.savez_compressed
            save(partial / f"{k}.npz", **dict(zip(names, _leaves(call), strict=True)), **outputs)
    if errors:
        (partial / HALF_ERRORS).write_text(json.dumps(errors))
    partial.rename(target)
    return target


def _size(export: Export, width: Width) -> Size:
    size = PUBLISHED[export.model].size if export.published else BY_NAME[export.model].size
    return size.of_width(width)


def _write(export: Export, module: Wrapper, call: dict[str, Any], path: Path) -> None:
    arguments = tuple(_map(call, _tensor()).values())
    dims = _dims(module, export)
    shared: dict[str, Any] = {"opset_version": export.opset, "output_names": module.results(), "verbose": False}
    if not export.traced:
        torch.onnx.export(module, arguments, path, dynamo=True, dynamic_shapes=dims, **shared)
        return
    names = [f"input_{k}" for k in range(len(_leaves(call)))]
    axes = dict(zip(names, _leaves(dims), strict=True))
    torch.onnx.export(module, arguments, str(path), dynamo=False, input_names=names, dynamic_axes=axes, **shared)


def _dims(module: Wrapper, export: Export) -> Any:
    """Return the symbolic axes of each argument that the form leaves, None where it leaves none at all."""
    if export.form == "fixed":
        return None
    hidden = {"batch"} if export.form == "batch1" else set()
    return tuple(_map(module.dims(), lambda axes: {k: name for k, name in axes.items() if name not in hidden}).values())


def _names(path: Path) -> list[str]:
    return [value.name for value in onnx.load(path, load_external_data=False).graph.input]


def _rounded(call: dict[str, Any], dtype: Any) -> dict[str, Any]:
    return _map(call, lambda a: a.astype(dtype) if a.dtype.kind == "f" else a)


def _tensor(dtype: torch.dtype | None = None) -> Callable[[np.ndarray], torch.Tensor]:
    """Return a function from arrays to tensors, with floats of that type."""

    def tensor(array: np.ndarray) -> torch.Tensor:
        values = torch.from_numpy(array)
        return values.to(dtype) if values.is_floating_point() else values

    return tensor


def _map(call: dict[str, Any], function: Any) -> dict[str, Any]:
    return {k: [function(a) for a in v] if isinstance(v, list) else function(v) for k, v in call.items()}


def _leaves(call: Any) -> list[Any]:
    """Return the arguments in the order of the graph's inputs, with lists flattened."""
    values = call.values() if isinstance(call, dict) else call
    return [leaf for value in values for leaf in (value if isinstance(value, list) else [value])]


def write_samples(folder: Path) -> None:
    """Write the tiny exports, each as one file without names of nodes and metadata for readers.

    Existing ones stay as they are: remove one to export it again.
    """
    for export in samples():
        if (folder / export.name).is_dir():
            continue
        path = make(export, folder, "tiny") / "model.onnx"
        model = onnx.load(path)
        del model.graph.value_info[:], model.graph.metadata_props[:], model.metadata_props[:]
        for node in model.graph.node:
            del node.metadata_props[:]
            node.name = node.doc_string = ""
        for value in (*model.graph.input, *model.graph.output, *model.graph.initializer):
            del value.metadata_props[:]
        path.with_name(_WEIGHTS).unlink(missing_ok=True)
        onnx.save(model, path)


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", help="exports, models for all of their exports, or patterns")
    parser.add_argument("--folder", type=Path)
    parser.add_argument("--published", action="store_true", help="at the widths of published models, in every form")
    parser.add_argument("--narrow", action="store_true", help="few heads, for emulated GPUs")
    parser.add_argument("--samples", action="store_true")
    options = parser.parse_args(arguments)
    if options.samples:
        write_samples(Path(__file__).parent / "samples")
        return
    if options.folder is None:
        parser.error("--folder says where the exports go.")
    candidates = [*published(), *published_half()] if options.published else exports()
    for name in options.names:
        if not any(_is_named(export, name) for export in candidates):
            parser.error(f"no export is called {name}; there are {', '.join(export.name for export in candidates)}.")
    for export in candidates:
        if not options.names or any(_is_named(export, name) for name in options.names):
            print(make(export, options.folder, "narrow" if options.narrow else "whole"), flush=True)


def _is_named(export: Export, name: str) -> bool:
    """Whether the name is that of the export, of its model, or a pattern that it fits."""
    return export.model == name or fnmatchcase(export.name, name)


if __name__ == "__main__":
    main()
