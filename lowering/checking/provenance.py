"""Check whether an artifact was compiled from a model, as far as inputs and outputs tell."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator

import onnx_ir as ir

from ..errors import ArtifactError
from ..graph.caches.joint_kv_caches import create_half_caches, find_joint_caches
from ..graph.loading.model import dtype_name
from ..graph.paged.served_states import is_state_operator, past_state
from ..graph.rewriting.matching import dims, read_static_sizes
from ..manifest import SOURCE_TABLE, ListSpec, Manifest, ServedCache, TensorSpec

_HALVES = ("float16", "bfloat16")  # types of caches that `precision` halves


def check_provenance(manifest: Manifest, model: ir.Model) -> None:
    """Raise ArtifactError if an artifact was compiled from another model."""
    differences = (
        _find_differences(manifest, model)
        if manifest.served is None
        else _find_served_differences(manifest, manifest.served, model)
    )
    difference = next(differences, None)
    if difference is not None:
        raise ArtifactError("verify.artifact_mismatch", f"the artifact was not compiled from this model: {difference}.")


def _find_differences(manifest: Manifest, model: ir.Model) -> Iterator[str]:
    decodes = manifest.slots is not None  # does not take the inputs that are computed from others
    computed = set() if manifest.slots is None else {manifest.slots.length}
    programs = manifest.parts()
    if manifest.setup is not None:
        computed |= {spec.name for spec in manifest.setup.outputs}
    artifact_specs = {spec.name: spec for program in programs for spec in program.inputs if spec.name not in computed}
    model_inputs = _list_inputs(model, has_halves=decodes)
    outputs = {
        name for program in programs for name in (*_list_names(program.outputs), *_list_names(program.output_lists))
    }
    yield from (f"it takes '{name}', which the model does not" for name in artifact_specs if name not in model_inputs)
    unread = {name for name, value in model_inputs.items() if not value.uses()} if manifest.slots is not None else set()
    yield from (
        f"the model takes '{name}', which it does not"
        for name in model_inputs
        if name not in {*artifact_specs, *unread}
    )
    for value in model.graph.outputs[:1] if decodes else model.graph.outputs:
        if value.name not in outputs:
            yield f"the model gives '{value.name}', which it does not"
    for name, spec in artifact_specs.items():
        dtype, shape = dtype_name(model_inputs[name].dtype), model_inputs[name].shape
        halved = manifest.precision is not None and spec.dtype in _HALVES and dtype == "float32"
        if not (dtype == spec.dtype or halved) or not _matches_shape(spec, shape):
            yield f"it takes {spec}, and the model {dtype}{'' if shape is None else shape}"


def _list_names(specs: Iterable[TensorSpec | ListSpec]) -> list[str]:
    return [spec.name for spec in specs]


def _list_inputs(model: ir.Model, has_halves: bool) -> dict[str | None, ir.Value]:
    """Return the inputs by name; a joint cache of keys and values counts as two."""
    joint = find_joint_caches(model) if has_halves else {}
    values = [value for value in model.graph.inputs if value.name not in model.graph.initializers]
    programs = [
        program for value in values for program in (create_half_caches(value) if value.name in joint else (value,))
    ]
    return {program.name: program for program in programs}


def _find_served_differences(manifest: Manifest, served: ServedCache, model: ir.Model) -> Iterator[str]:
    """Yield the differences between a served artifact and a model.

    The caches and states of the model are those of the layers in the pools; its ids are the remaining input.
    """
    model_inputs = _list_inputs(model, has_halves=True)
    if served.ids not in model_inputs:
        yield f"it takes '{served.ids}', which the model does not"
    output, first = manifest.outputs[0].name, model.graph.outputs[0].name
    if output != first:
        yield f"its output is '{output}', and the model's first one '{first}'"
    states = {past_state(node): None for node in model.graph if is_state_operator(node)}
    setup = () if manifest.setup is None else manifest.setup.inputs
    pools = () if served.sources is None else served.sources.pools
    computed = {SOURCE_TABLE, *(name for pool in pools for name in (pool.name, pool.scale))}
    sources = {spec.name: spec for spec in setup if spec.name not in computed}
    yield from (f"its setup takes '{name}', which the model does not" for name in sources if name not in model_inputs)
    for name in sources.keys() & model_inputs.keys():
        if not _matches_shape(sources[name], model_inputs[name].shape):
            yield f"its setup takes {sources[name]}, and the model {model_inputs[name].shape}"
    unread = {value.name for value in model.graph.inputs if not value.uses()}
    cache_inputs = [
        value for name, value in model_inputs.items() if value not in states and name not in {*sources, *unread}
    ]
    pasts = [value.shape for value in cache_inputs if value.shape is not None and len(value.shape) == 4]
    shapes = {(pool.kv_heads, pool.head_dim) for pool in served.pools}
    for shape in pasts:
        if not any(shape[1] == heads and _is_at_most(shape[3], size) for heads, size in shapes):
            caches = " or ".join(f"[batch,{heads},length,{size}]" for heads, size in sorted(shapes))
            yield f"it was made for pasts {caches}, and the model has one of {shape}"
    layers = sum(pool.layers for pool in served.pools)
    if len(pasts) != 2 * layers:
        yield f"it keeps keys and values of {layers} layers, and the model has {len(pasts)} inputs of a past"
    yield from _find_state_differences(served, states)


def _find_state_differences(served: ServedCache, states: Iterable[ir.Value]) -> Iterator[str]:
    """Yield differences in states; a pool has the axes of a convolution's states swapped."""
    artifact_specs: Counter[tuple[int, ...]] = Counter()
    for pool in served.states:
        artifact_specs[tuple(sorted(pool.shape))] += pool.layers
    model_states = Counter(tuple(sorted(read_static_sizes(dims(state)[1:]) or ())) for state in states)
    for sizes in sorted(artifact_specs.keys() | model_states.keys()):
        if artifact_specs[sizes] != model_states[sizes]:
            text = " x ".join(map(str, sizes))
            yield f"it keeps {artifact_specs[sizes]} states of {text} elements, and the model has {model_states[sizes]}"


def _is_at_most(size: object, limit: int) -> bool:
    """Return whether a size is static and at most the limit: values may be shorter than keys in a shared pool."""
    return isinstance(size, int) and size <= limit


def _matches_shape(spec: TensorSpec, shape: ir.Shape | None) -> bool:
    """Return whether a shape fits a spec; sizes of the artifact may be static where the model's are symbolic."""
    if shape is None:
        return True
    matches = [
        not isinstance(model_inputs, int) or artifact_specs == model_inputs
        for artifact_specs, model_inputs in zip(spec.dims, shape)
    ]
    return len(spec.dims) == len(shape) and all(matches)
