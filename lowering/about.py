"""What an artifact is and consists of, for `inspect` and for its page."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from typing import TYPE_CHECKING

from . import units
from .manifest import SIGNATURE, KernelSpec, Manifest

if TYPE_CHECKING:
    from .runtime.files import ArtifactFiles


def about(files: ArtifactFiles, manifest: Manifest) -> Iterator[tuple[str, str]]:
    """Facts, each behind what it is about."""
    needed = f", which needs {', '.join(manifest.cpu_features)}" if manifest.cpu_features else ""
    built = f", built for {', '.join(manifest.architectures)}" if manifest.architectures else ""
    yield "Target", f"{manifest.target}{built}{needed}"
    yield "Threads", str(manifest.threads or "the CPUs that a process may use")
    versions = ", ".join(f"{name} {version}" for name, version in manifest.versions.items())
    yield "Made by", f"{versions}; format {manifest.format}{'; signed' if SIGNATURE in files else ''}"
    weights = [weight for part in manifest.parts() for weight in part.weights]
    yield "Weights", f"{len(weights)}, {units.size(sum(weight.nbytes for weight in weights))}"
    code = [name for part in manifest.parts() for name in part.code().values() if name in files]
    yield "Code", units.size(sum(map(files.size, code)))
    if manifest.ranges:
        legal = manifest.ranges.items()
        texts = (f"{name}: {low}" if low == high else f"{name}: {low} to {high}" for name, (low, high) in legal)
        yield "Legal sizes", "; ".join(texts)
    if manifest.decoder is not None:
        told = "'" + (manifest.slots.length if manifest.slots is not None else manifest.decoder.starts) + "'"
        states = f", {len(manifest.decoder.states)} states" if manifest.decoder.states else ""
        caches = (
            f"{manifest.decoder.capacity} slots, of which {told} says how many are filled{_rings(manifest)}{states}"
        )
        yield "Caches", caches if manifest.donated else f"{len(manifest.decoder.states)} states"
    if manifest.setup is not None and manifest.served is None:
        names = ", ".join(f"'{spec.name}'" for spec in manifest.setup.inputs)
        yield "Once per sequence", f"{len(manifest.setup.outputs)} arrays are computed of {names}"
    if manifest.served is not None:
        of = manifest.served
        kept = [f"pages of {of.tokens_per_block} tokens, keys and values {of.dtype}"] if of.pools else []
        kept += [f"slots of {sum(pool.layers for pool in of.states)} states"] if of.states else []
        yield "Serves", f"requests of up to {of.context} tokens, in {' and '.join(kept)}"
        if of.sources is not None:
            layers = sum(pool.layers for pool in of.sources.pools)
            yield "Once per request", f"keys and values of {layers} layers are computed of '{of.sources.rows[0]}'"


def _rings(manifest: Manifest) -> str:
    """Which of the caches hold the newest tokens alone."""
    rings = {} if manifest.slots is None else manifest.slots.rings
    sizes = ", ".join(map(str, sorted({*rings.values()})))
    return f", {len(rings)} of {len(manifest.donated)} rings of {sizes}" if rings else ""


def most_called(manifest: Manifest) -> list[tuple[KernelSpec, int, list[str]]]:
    """With how often each is called, and the ONNX nodes that it computes; those that are called most come first."""
    counts = Counter(call.kernel for call in manifest.calls)
    nodes: dict[str, dict[str, None]] = {}
    for call in manifest.calls:
        nodes.setdefault(call.kernel, {}).update(dict.fromkeys(call.nodes))
    ordered = sorted(manifest.kernels, key=lambda kernel: -counts[kernel.name])
    return [(kernel, counts[kernel.name], list(nodes.get(kernel.name, ()))) for kernel in ordered]
