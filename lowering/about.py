"""Facts about an artifact, for `inspect` and for its page."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from typing import TYPE_CHECKING

from . import units
from .manifest import SIGNATURE, KernelSpec, Manifest

if TYPE_CHECKING:
    from .runtime.artifact.files import ArtifactFiles


def list_facts(files: ArtifactFiles, manifest: Manifest) -> Iterator[tuple[str, str]]:
    """Yield pairs of a title and a fact."""
    features = f", which needs {', '.join(manifest.cpu_features)}" if manifest.cpu_features else ""
    architectures = f", built for {', '.join(manifest.architectures)}" if manifest.architectures else ""
    yield "Target", f"{manifest.target}{architectures}{features}"
    yield "Threads", str(manifest.threads or "the CPUs that a process may use")
    versions = ", ".join(f"{name} {version}" for name, version in manifest.versions.items())
    yield "Made by", f"{versions}; format {manifest.format}{'; signed' if SIGNATURE in files else ''}"
    weights = [weight for program in manifest.parts() for weight in program.weights]
    yield "Weights", f"{len(weights)}, {units.format_size(sum(weight.nbytes for weight in weights))}"
    code = [name for program in manifest.parts() for name in program.code().values() if name in files]
    yield "Code", units.format_size(sum(map(files.size, code)))
    if manifest.ranges:
        legal = manifest.ranges.items()
        texts = (f"{name}: {low}" if low == high else f"{name}: {low} to {high}" for name, (low, high) in legal)
        yield "Legal sizes", "; ".join(texts)
    if manifest.decoder is not None:
        length = "'" + (manifest.slots.length if manifest.slots is not None else manifest.decoder.starts) + "'"
        states = f", {len(manifest.decoder.states)} states" if manifest.decoder.states else ""
        caches = (
            f"{manifest.decoder.capacity} slots, of which {length} says how many are filled"
            f"{_describe_rings(manifest)}{states}"
        )
        yield "Caches", caches if manifest.donated else f"{len(manifest.decoder.states)} states"
    if manifest.setup is not None and manifest.served is None:
        names = ", ".join(f"'{spec.name}'" for spec in manifest.setup.inputs)
        yield "Once per sequence", f"{len(manifest.setup.outputs)} arrays are computed of {names}"
    if manifest.served is not None:
        served = manifest.served
        storage = [f"pages of {served.tokens_per_block} tokens, keys and values {served.dtype}"] if served.pools else []
        storage += [f"slots of {sum(pool.layers for pool in served.states)} states"] if served.states else []
        yield "Serves", f"requests of up to {served.context} tokens, in {' and '.join(storage)}"
        if served.sources is not None:
            layers = sum(pool.layers for pool in served.sources.pools)
            yield "Once per request", f"keys and values of {layers} layers are computed of '{served.sources.rows[0]}'"


def _describe_rings(manifest: Manifest) -> str:
    """Return a text about the ring caches, which store the newest tokens only."""
    rings = {} if manifest.slots is None else manifest.slots.rings
    sizes = ", ".join(map(str, sorted({*rings.values()})))
    return f", {len(rings)} of {len(manifest.donated)} rings of {sizes}" if rings else ""


def rank_kernels(manifest: Manifest) -> list[tuple[KernelSpec, int, list[str]]]:
    """Return each kernel with its number of calls and the ONNX nodes that it computes, the most called first."""
    counts = Counter(call.kernel for call in manifest.calls)
    nodes: dict[str, dict[str, None]] = {}
    for call in manifest.calls:
        nodes.setdefault(call.kernel, {}).update(dict.fromkeys(call.nodes))
    ordered = sorted(manifest.kernels, key=lambda kernel: -counts[kernel.name])
    return [(kernel, counts[kernel.name], list(nodes.get(kernel.name, ()))) for kernel in ordered]
