"""What a manifest may say: the parts of it fit together. Types are checked before (lowering/records.py)."""

from __future__ import annotations

import dataclasses
import math
import re
from collections.abc import Iterator, Sequence

from ..manifest import (
    BLOCK_TABLE,
    MODEL,
    MOST_THREADS,
    PAST_LENGTHS,
    ROW_STARTS,
    SETUP,
    STATE_SLOTS,
    WEIGHTS,
    DecoderSpec,
    Manifest,
    ServedCache,
    SlotCaches,
    TensorSpec,
    WeightSpec,
)  # fmt: skip
from .elements import STORAGE, itemsize

_LARGEST = 2**63 - 1


def contradictions(manifest: Manifest) -> Iterator[str]:
    """What cannot be, each as the words that complete "the manifest says that"."""
    for role, specs in (("input", manifest.inputs), ("output", manifest.outputs)):
        if len({t.name for t in specs}) < len(specs):
            yield f"two {role}s have one name"
        for spec in specs:
            yield from _tensor(role, spec)
    yield from _donated(manifest)
    for weight in manifest.weights:
        yield from _weight(weight)
    for name, (low, high) in manifest.ranges.items():
        if not 0 <= low <= high:
            yield f"dimension '{name}' goes from {low} to {high}"
    if manifest.threads is not None and not 1 <= manifest.threads <= MOST_THREADS:
        yield f"calls take {manifest.threads} threads"
    yield from (f"'{a}' is an architecture" for a in manifest.architectures if not re.fullmatch(r"sm_\d{2,3}a?", a))
    for part in manifest.parts():
        files = [*part.code().values(), *([WEIGHTS] if part.weights else [])]
        yield from (f"there is no digest of {name}" for name in files if name not in manifest.hashes)
    if manifest.slots is not None:
        yield from _slots(manifest, manifest.slots)
    if manifest.decoder is not None:
        yield from _decoder(manifest, manifest.decoder)
    if manifest.served is not None:
        yield from _served(manifest, manifest.served)
    if manifest.setup is not None:
        yield from _setup(manifest, manifest.setup)


def _tensor(role: str, spec: TensorSpec) -> Iterator[str]:
    if STORAGE.get(spec.dtype) != spec.storage:
        yield f"{role} '{spec.name}' holds {spec.dtype} as {spec.storage}"
    if not _are_sizes([d for d in spec.dims if isinstance(d, int)]) or "" in spec.dims:
        yield f"{role} '{spec.name}' has the dimensions {list(spec.dims)}"


def _donated(manifest: Manifest) -> Iterator[str]:
    inputs, outputs = ({t.name for t in specs} for specs in (manifest.inputs, manifest.outputs))
    for name, output in manifest.donated.items():
        if name not in inputs or output not in outputs:
            yield f"input '{name}' becomes output '{output}'"
    if len(set(manifest.donated.values())) < len(manifest.donated):
        yield "two inputs become one output"


def _weight(weight: WeightSpec) -> Iterator[str]:
    if weight.storage not in STORAGE.values() or not _are_sizes(weight.dims):
        yield f"weight '{weight.name}' is {weight.storage}{list(weight.dims)}"
    elif weight.nbytes != math.prod(weight.dims) * itemsize(weight.storage):
        yield f"weight '{weight.name}', {weight.storage}{list(weight.dims)}, takes {weight.nbytes} bytes"
    elif not 0 <= weight.offset <= _LARGEST or weight.offset % 64:
        yield f"weight '{weight.name}' begins at byte {weight.offset}"


def _slots(manifest: Manifest, slots: SlotCaches) -> Iterator[str]:
    inputs = {t.name: t for t in manifest.inputs}
    length = inputs.get(slots.length)
    if length is None or length.dtype != "int64" or length.dims:
        yield f"'{slots.length}' is an input that holds a length"
    if not 0 < slots.capacity <= _LARGEST:
        yield f"caches have {slots.capacity} slots"
    for name, count in slots.rings.items():
        if name not in inputs or count not in inputs[name].dims:
            yield f"input '{name}' is a ring of {count} slots"
    if slots.rows is not None and not 0 < slots.rows <= _LARGEST:
        yield f"a call adds {slots.rows} rows"
    if slots.tokens is not None:
        name, axis = slots.tokens
        if name not in inputs or not 0 <= axis < len(inputs[name].dims):
            yield f"input '{name}' has tokens along axis {axis}"


def _decoder(manifest: Manifest, spec: DecoderSpec) -> Iterator[str]:
    inputs, outputs = ({t.name for t in specs} for specs in (manifest.inputs, manifest.outputs))
    for name in (spec.ids, spec.mask, spec.positions, spec.starts, spec.ends, *spec.states):
        if name and name not in inputs:
            yield f"a decoder fills input '{name}'"
    for name in spec.states.values():
        if name not in outputs:
            yield f"a decoder keeps output '{name}'"
    if not 0 < spec.capacity <= _LARGEST:
        yield f"a decoder keeps {spec.capacity} tokens"


def _served(manifest: Manifest, served: ServedCache) -> Iterator[str]:
    inputs = {t.name: t for t in manifest.inputs}
    if not 0 < served.context <= _LARGEST or served.tokens_per_block < 1:
        yield f"requests have {served.context} tokens, and blocks {served.tokens_per_block}"
    pools = [(states.name, states.dtype, (states.layers, *states.shape)) for states in served.states]
    for pool in served.pools:
        front = (pool.layers, 2, pool.kv_heads, served.tokens_per_block)
        pools.append((pool.name, served.dtype, (*front, pool.head_dim)))
        if pool.scale or served.scales:
            pools.append((pool.scale, "float32", (*front, served.scales)))
    if not pools:
        yield "a served decoder keeps nothing"
    for name, dtype, dims in pools:
        spec = inputs.get(name)
        if spec is None or name not in manifest.donated or (spec.dtype, spec.dims[1:]) != (dtype, dims):
            yield f"input '{name}' is a pool of {dtype}{list(dims)}, written in place"
    tables = {ROW_STARTS: 1, PAST_LENGTHS: 1, **({BLOCK_TABLE: 2} if served.pools else {})}
    for name, rank in (tables | ({STATE_SLOTS: 1} if served.states else {})).items():
        if name not in inputs or (inputs[name].dtype, len(inputs[name].dims)) != ("int64", rank):
            yield f"input '{name}' tells of requests"
    if served.ids not in inputs or len(inputs[served.ids].dims) != 2:
        yield f"input '{served.ids}' holds the tokens of requests"


def _setup(manifest: Manifest, setup: Manifest) -> Iterator[str]:
    if (manifest.part, setup.part, setup.setup) != (MODEL, SETUP, None) or setup.donated:
        yield f"the part '{setup.part}' is a setup of the part '{manifest.part}'"
    if setup.format != manifest.format:
        yield f"the setup has format {setup.format}"
    inputs = {t.name: t for t in manifest.inputs}
    for spec in (*setup.inputs, *setup.outputs):
        if spec.name in inputs and not _are_alike(spec, inputs[spec.name]):
            yield f"'{spec}' of the setup is the input '{inputs[spec.name]}'"
    if setup.architectures != manifest.architectures:
        yield "the setup is for other GPUs"
    if not {t.name for t in setup.outputs} & {t.name for t in manifest.inputs}:
        yield "no output of the setup is an input"
    hashes = dict.fromkeys([*setup.code().values(), WEIGHTS], "")  # which are looked for in the whole
    for words in contradictions(dataclasses.replace(setup, hashes=hashes, setup=None)):
        yield f"in the setup, {words}"


def _are_alike(one: TensorSpec, other: TensorSpec) -> bool:
    """Whether an array can be both; a size may have another name in each part."""
    same = (one.dtype, one.storage, len(one.dims)) == (other.dtype, other.storage, len(other.dims))
    return same and all(isinstance(a, str) or isinstance(b, str) or a == b for a, b in zip(one.dims, other.dims))


def _are_sizes(dims: Sequence[int]) -> bool:
    return all(d >= 0 for d in dims) and math.prod(dims) <= _LARGEST
