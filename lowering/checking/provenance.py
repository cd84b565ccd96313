"""Whether an artifact was made of a model, as far as the inputs and outputs of both tell."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator

import onnx_ir as ir

from ..errors import ArtifactError
from ..fusion.matching import dims, numbers
from ..graph.joint_caches import halves, joint_caches
from ..graph.model import dtype_name
from ..graph.served_states import carries_state, past_state
from ..manifest import SOURCE_TABLE, ListSpec, Manifest, ServedCache, TensorSpec

_HALVES = ("float16", "bfloat16")  # of caches, for a precision


def check_provenance(manifest: Manifest, model: ir.Model) -> None:
    """Raises ArtifactError for an artifact of another model."""
    found = _differences(manifest, model) if manifest.served is None else _of_served(manifest, manifest.served, model)
    differs = next(found, None)
    if differs is not None:
        raise ArtifactError(f"the artifact was not made of this model: {differs}.")


def _differences(manifest: Manifest, model: ir.Model) -> Iterator[str]:
    decodes = manifest.slots is not None  # and leaves out what is the same in every call
    computed = set() if manifest.slots is None else {manifest.slots.length}
    parts = manifest.parts()
    if manifest.setup is not None:
        computed |= {spec.name for spec in manifest.setup.outputs}
    ours = {spec.name: spec for part in parts for spec in part.inputs if spec.name not in computed}
    theirs = _inputs(model, has_halves=decodes)
    outputs = {name for part in parts for name in (*_names(part.outputs), *_names(part.output_lists))}
    yield from (f"it takes '{name}', which the model does not" for name in ours if name not in theirs)
    unread = {name for name, value in theirs.items() if not value.uses()} if manifest.slots is not None else set()
    yield from (f"the model takes '{name}', which it does not" for name in theirs if name not in {*ours, *unread})
    for value in model.graph.outputs[:1] if decodes else model.graph.outputs:
        if value.name not in outputs:
            yield f"the model gives '{value.name}', which it does not"
    for name, spec in ours.items():
        dtype, shape = dtype_name(theirs[name].dtype), theirs[name].shape
        halved = manifest.precision is not None and spec.dtype in _HALVES and dtype == "float32"
        if not (dtype == spec.dtype or halved) or not _fits(spec, shape):
            yield f"it takes {spec}, and the model {dtype}{'' if shape is None else shape}"


def _names(specs: Iterable[TensorSpec | ListSpec]) -> list[str]:
    return [spec.name for spec in specs]


def _inputs(model: ir.Model, has_halves: bool) -> dict[str | None, ir.Value]:
    """The inputs by name, with two in the place of each that is a cache of keys and values in one."""
    joint = joint_caches(model) if has_halves else {}
    values = [value for value in model.graph.inputs if value.name not in model.graph.initializers]
    parts = [part for value in values for part in (halves(value) if value.name in joint else (value,))]
    return {part.name: part for part in parts}


def _of_served(manifest: Manifest, served: ServedCache, model: ir.Model) -> Iterator[str]:
    """What is left of the model's inputs are its ids; its caches and states are those of the layers in the pools."""
    theirs = _inputs(model, has_halves=True)
    if served.ids not in theirs:
        yield f"it takes '{served.ids}', which the model does not"
    output, first = manifest.outputs[0].name, model.graph.outputs[0].name
    if output != first:
        yield f"its output is '{output}', and the model's first one '{first}'"
    states = {past_state(node): None for node in model.graph if carries_state(node)}
    setup = () if manifest.setup is None else manifest.setup.inputs
    pools = () if served.sources is None else served.sources.pools
    computed = {SOURCE_TABLE, *(name for pool in pools for name in (pool.name, pool.scale))}
    sources = {spec.name: spec for spec in setup if spec.name not in computed}
    yield from (f"its setup takes '{name}', which the model does not" for name in sources if name not in theirs)
    for name in sources.keys() & theirs.keys():
        if not _fits(sources[name], theirs[name].shape):
            yield f"its setup takes {sources[name]}, and the model {theirs[name].shape}"
    unread = {value.name for value in model.graph.inputs if not value.uses()}
    kept = [value for name, value in theirs.items() if value not in states and name not in {*sources, *unread}]
    pasts = [value.shape for value in kept if value.shape is not None and len(value.shape) == 4]
    shapes = {(pool.kv_heads, pool.head_dim) for pool in served.pools}
    for shape in pasts:
        if not any(shape[1] == heads and _is_at_most(shape[3], size) for heads, size in shapes):
            caches = " or ".join(f"[batch,{heads},length,{size}]" for heads, size in sorted(shapes))
            yield f"it was made for pasts {caches}, and the model has one of {shape}"
    layers = sum(pool.layers for pool in served.pools)
    if len(pasts) != 2 * layers:
        yield f"it keeps keys and values of {layers} layers, and the model has {len(pasts)} inputs of a past"
    yield from _of_states(served, states)


def _of_states(served: ServedCache, states: Iterable[ir.Value]) -> Iterator[str]:
    """A pool has the axes of a convolution's states the other way round."""
    ours: Counter[tuple[int, ...]] = Counter()
    for pool in served.states:
        ours[tuple(sorted(pool.shape))] += pool.layers
    given = Counter(tuple(sorted(numbers(dims(state)[1:]) or ())) for state in states)
    for sizes in sorted(ours.keys() | given.keys()):
        if ours[sizes] != given[sizes]:
            text = " x ".join(map(str, sizes))
            yield f"it keeps {ours[sizes]} states of {text} elements, and the model has {given[sizes]}"


def _is_at_most(size: object, limit: int) -> bool:
    """Values may be shorter than keys, with which they share a pool."""
    return isinstance(size, int) and size <= limit


def _fits(spec: TensorSpec, shape: ir.Shape | None) -> bool:
    """Sizes of the artifact may be fixed where the model's are symbolic."""
    if shape is None:
        return True
    same = [not isinstance(theirs, int) or ours == theirs for ours, theirs in zip(spec.dims, shape)]
    return len(spec.dims) == len(shape) and all(same)
