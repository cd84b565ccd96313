"""Whether an artifact was made of a model, as far as the inputs and outputs of both tell."""

from __future__ import annotations

from collections.abc import Iterator

import onnx_ir as ir

from ..errors import ArtifactError
from ..graph.model import dtype_name
from ..manifest import Manifest, TensorSpec

_HALVES = ("float16", "bfloat16")  # of caches, for a precision


def check_made_of(manifest: Manifest, model: ir.Model) -> None:
    """Raises ArtifactError for an artifact of another model, and for one that no reference of the model can be compared
    with."""
    if manifest.served is not None:
        raise ArtifactError(
            "an artifact of compile --serve takes packed requests, for which no reference computes the model."
        )
    differs = next(_differences(manifest, model), None)
    if differs is not None:
        raise ArtifactError(f"the artifact was not made of this model: {differs}.")


def _differences(manifest: Manifest, model: ir.Model) -> Iterator[str]:
    length = None if manifest.slots is None else manifest.slots.length
    ours = {spec.name: spec for spec in manifest.inputs if spec.name != length}
    theirs = {value.name: value for value in model.graph.inputs if value.name not in model.graph.initializers}
    outputs = {spec.name for spec in manifest.outputs}
    yield from (f"it takes '{name}', which the model does not" for name in ours if name not in theirs)
    yield from (f"the model takes '{name}', which it does not" for name in theirs if name not in ours)
    for value in model.graph.outputs:
        if value.name not in outputs:
            yield f"the model gives '{value.name}', which it does not"
    for name, spec in ours.items():
        dtype, shape = dtype_name(theirs[name].dtype), theirs[name].shape
        halved = manifest.precision is not None and spec.dtype in _HALVES and dtype == "float32"
        if not (dtype == spec.dtype or halved) or not _fits(spec, shape):
            yield f"it takes {spec}, and the model {dtype}{'' if shape is None else shape}"


def _fits(spec: TensorSpec, shape: ir.Shape | None) -> bool:
    """Sizes of the artifact may be fixed where the model's are symbolic."""
    if shape is None:
        return True
    same = [not isinstance(theirs, int) or ours == theirs for ours, theirs in zip(spec.dims, shape)]
    return len(spec.dims) == len(shape) and all(same)
