"""Consistency rules of manifests. Types are checked before (lowering/records.py)."""

from __future__ import annotations

import dataclasses
import math
import re
from collections.abc import Iterator, Mapping, Sequence

from ...manifest import (  # fmt: skip
    BLOCK_TABLE,
    MAX_THREADS,
    MODEL,
    PAST_LENGTHS,
    ROW_STARTS,
    SETUP,
    SOURCE_LENGTHS,
    SOURCE_TABLE,
    STATE_SLOTS,
    WEIGHTS,
    CachePool,
    DecoderSpec,
    ListSpec,
    Manifest,
    ServedCache,
    SlotCaches,
    SourceCache,
    TensorSpec,
    WeightSpec,
)
from ..arrays.elements import STORAGE_TYPES, itemsize

_MAX_SIZE = 2**63 - 1
_PoolArray = tuple[str, str, tuple[int, ...]]  # name, dtype, and all sizes after the first


def find_contradictions(manifest: Manifest) -> Iterator[str]:
    """Yield each contradiction as a clause that completes "the manifest says that"."""
    for role, specs in (("input", manifest.inputs), ("output", manifest.outputs)):
        if len({t.name for t in specs}) < len(specs):
            yield f"two {role}s have one name"
        for spec in specs:
            yield from _check_tensor(role, spec)
    if not manifest.outputs and not manifest.output_lists:
        yield "it gives nothing"
    yield from _check_lists("input", manifest.inputs, manifest.input_lists)
    yield from _check_lists("output", manifest.outputs, manifest.output_lists)
    yield from _check_donated(manifest)
    for weight in manifest.weights:
        yield from _check_weight(weight)
    for name, (low, high) in manifest.ranges.items():
        if not 0 <= low <= high:
            yield f"dimension '{name}' goes from {low} to {high}"
    if manifest.threads is not None and not 1 <= manifest.threads <= MAX_THREADS:
        yield f"calls take {manifest.threads} threads"
    yield from (f"'{a}' is an architecture" for a in manifest.architectures if not re.fullmatch(r"sm_\d{2,3}a?", a))
    for model in manifest.parts():
        files = [*model.code().values(), *([WEIGHTS] if model.weights else [])]
        yield from (f"there is no digest of {name}" for name in files if name not in manifest.hashes)
    if manifest.slots is not None:
        yield from _check_slots(manifest, manifest.slots)
    if manifest.decoder is not None:
        yield from _check_decoder(manifest, manifest.decoder)
    if manifest.served is not None:
        yield from _check_served(manifest, manifest.served)
    if manifest.setup is not None:
        yield from _check_setup(manifest, manifest.setup)


def _check_tensor(role: str, spec: TensorSpec) -> Iterator[str]:
    if STORAGE_TYPES.get(spec.dtype) != spec.storage:
        yield f"{role} '{spec.name}' holds {spec.dtype} as {spec.storage}"
    if not _are_sizes([d for d in spec.dims if isinstance(d, int)]) or "" in spec.dims:
        yield f"{role} '{spec.name}' has the dimensions {list(spec.dims)}"


def _check_lists(role: str, tensors: Sequence[TensorSpec], lists: Sequence[ListSpec]) -> Iterator[str]:
    end, names = 0, {t.name for t in tensors}
    for spec in lists:
        count = spec.count or 0
        if not end <= spec.first <= spec.first + count <= len(tensors) or count < 0:
            yield f"{role} '{spec.name}' is {spec.count} of {len(tensors)} tensors from number {spec.first} on"
        if spec.name in names:
            yield f"two {role}s have one name"
        end = spec.first + max(count, 0)
        names.add(spec.name)


def _check_donated(manifest: Manifest) -> Iterator[str]:
    inputs, outputs = ({t.name for t in specs} for specs in (manifest.inputs, manifest.outputs))
    for name, output in manifest.donated.items():
        if name not in inputs or output not in outputs:
            yield f"input '{name}' becomes output '{output}'"
    if len(set(manifest.donated.values())) < len(manifest.donated):
        yield "two inputs become one output"


def _check_weight(weight: WeightSpec) -> Iterator[str]:
    if weight.storage not in STORAGE_TYPES.values() or not _are_sizes(weight.dims):
        yield f"weight '{weight.name}' is {weight.storage}{list(weight.dims)}"
    elif weight.nbytes != math.prod(weight.dims) * itemsize(weight.storage):
        yield f"weight '{weight.name}', {weight.storage}{list(weight.dims)}, takes {weight.nbytes} bytes"
    elif not 0 <= weight.offset <= _MAX_SIZE or weight.offset % 64:
        yield f"weight '{weight.name}' begins at byte {weight.offset}"


def _check_slots(manifest: Manifest, slots: SlotCaches) -> Iterator[str]:
    inputs = {t.name: t for t in manifest.inputs}
    length = inputs.get(slots.length)
    if length is None or length.dtype != "int64" or length.dims:
        yield f"'{slots.length}' is an input that holds a length"
    if not 0 < slots.capacity <= _MAX_SIZE:
        yield f"caches have {slots.capacity} slots"
    for name, count in slots.rings.items():
        if name not in inputs or count not in inputs[name].dims:
            yield f"input '{name}' is a ring of {count} slots"
    if slots.rows is not None and not 0 < slots.rows <= _MAX_SIZE:
        yield f"a call adds {slots.rows} rows"
    if slots.tokens is not None:
        name, axis = slots.tokens
        if name not in inputs or not 0 <= axis < len(inputs[name].dims):
            yield f"input '{name}' has tokens along axis {axis}"


def _check_decoder(manifest: Manifest, spec: DecoderSpec) -> Iterator[str]:
    inputs, outputs = ({t.name for t in specs} for specs in (manifest.inputs, manifest.outputs))
    for name in (spec.ids, spec.mask, spec.positions, *spec.per_token, spec.starts, spec.ends, *spec.states):
        if name and name not in inputs:
            yield f"a decoder fills input '{name}'"
    for name in spec.states.values():
        if name not in outputs:
            yield f"a decoder keeps output '{name}'"
    if not 0 < spec.capacity <= _MAX_SIZE:
        yield f"a decoder keeps {spec.capacity} tokens"


def _check_served(manifest: Manifest, served: ServedCache) -> Iterator[str]:
    inputs = {t.name: t for t in manifest.inputs}
    if not 0 < served.context <= _MAX_SIZE or served.tokens_per_block < 1:
        yield f"requests have {served.context} tokens, and blocks {served.tokens_per_block}"
    pools = [(states.name, states.dtype, (states.layers, *states.shape)) for states in served.states]
    pools += [array for pool in served.pools for array in _list_pool_arrays(served, pool)]
    if not pools:
        yield "a served decoder keeps nothing"
    yield from _check_pools(manifest, pools, are_written=True)
    if served.sources is not None:
        pools = [array for pool in served.sources.pools for array in _list_pool_arrays(served, pool)]
        yield from _check_pools(manifest, pools, are_written=False)
        yield from _check_sources(manifest.setup, served.sources, pools)
    tables = {ROW_STARTS: 1, PAST_LENGTHS: 1, **({BLOCK_TABLE: 2} if served.pools else {})}
    tables |= {STATE_SLOTS: 1} if served.states else {}
    tables |= {SOURCE_LENGTHS: 1, SOURCE_TABLE: 2} if served.sources is not None else {}
    yield from _check_tables(inputs, tables)
    for name in (served.ids, *served.per_token):
        if name not in inputs or len(inputs[name].dims) not in (2, 3):
            yield f"input '{name}' holds the tokens of requests"
    for name in served.fixed:
        if name not in inputs:
            yield f"all requests share input '{name}'"


def _list_pool_arrays(served: ServedCache, pool: CachePool) -> Iterator[_PoolArray]:
    """Yield the arrays of a pool of keys and values."""
    leading_dims = (pool.layers, 2, pool.kv_heads, served.tokens_per_block)
    yield pool.name, served.dtype, (*leading_dims, pool.head_dim)
    if pool.scale or served.scales:
        yield pool.scale, "float32", (*leading_dims, served.scales)


def _check_pools(manifest: Manifest, arrays: Sequence[_PoolArray], are_written: bool) -> Iterator[str]:
    inputs = {t.name: t for t in manifest.inputs}
    for name, dtype, dims in arrays:
        spec = inputs.get(name)
        fits = spec is not None and (spec.dtype, spec.dims[1:]) == (dtype, dims)
        if not fits or (name in manifest.donated) != are_written:
            yield f"input '{name}' is a pool of {dtype}{list(dims)}, {'written in place' if are_written else 'read'}"


def _check_tables(inputs: Mapping[str, TensorSpec], ranks: Mapping[str, int]) -> Iterator[str]:
    for name, rank in ranks.items():
        if name not in inputs or (inputs[name].dtype, len(inputs[name].dims)) != ("int64", rank):
            yield f"input '{name}' tells of requests"


def _check_sources(setup: Manifest | None, sources: SourceCache, arrays: Sequence[_PoolArray]) -> Iterator[str]:
    if setup is None or not sources.pools:
        yield "no setup writes the pools of sources"
        return
    inputs, (name, axis) = {t.name: t for t in setup.inputs}, sources.rows
    yield from _check_pools(setup, arrays, are_written=True)
    yield from _check_tables(inputs, {SOURCE_TABLE: 2})
    if name not in inputs or not 0 <= axis < len(inputs[name].dims):
        yield f"input '{name}' of the setup has rows along axis {axis}"


def _check_setup(manifest: Manifest, setup: Manifest) -> Iterator[str]:
    sources = None if manifest.served is None else manifest.served.sources
    pools = set() if sources is None else {name for pool in sources.pools for name in (pool.name, pool.scale) if name}
    if (manifest.part, setup.part, setup.setup) != (MODEL, SETUP, None) or setup.donated.keys() != pools:
        yield f"the part '{setup.part}' is a setup of the part '{manifest.part}'"
    if setup.format != manifest.format:
        yield f"the setup has format {setup.format}"
    inputs = {t.name: t for t in manifest.inputs}
    for spec in (*setup.inputs, *setup.outputs):
        if spec.name in inputs and not _are_alike(spec, inputs[spec.name]):
            yield f"'{spec}' of the setup is the input '{inputs[spec.name]}'"
    if setup.architectures != manifest.architectures:
        yield "the setup is for other GPUs"
    if sources is None and not {t.name for t in setup.outputs} & inputs.keys():
        yield "no output of the setup is an input"
    hashes = dict.fromkeys([*setup.code().values(), WEIGHTS], "")  # digests are checked for the whole manifest
    for contradiction in find_contradictions(dataclasses.replace(setup, hashes=hashes, setup=None)):
        yield f"in the setup, {contradiction}"


def _are_alike(a: TensorSpec, b: TensorSpec) -> bool:
    """Return whether an array can be both. A symbolic size may have another name in each model."""
    has_same_form = (a.dtype, a.storage, len(a.dims)) == (b.dtype, b.storage, len(b.dims))
    return has_same_form and all(isinstance(x, str) or isinstance(y, str) or x == y for x, y in zip(a.dims, b.dims))


def _are_sizes(dims: Sequence[int]) -> bool:
    return all(d >= 0 for d in dims) and math.prod(dims) <= _MAX_SIZE
