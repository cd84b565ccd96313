"""What an artifact takes and gives, what it is for and made by, and its kernels."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator

from .. import units
from ..manifest import SIGNATURE, Manifest, TensorSpec
from ..runtime.files import Files
from .elements import Child, E, Node, facts, folded, note, table
from .sizes import ChosenSizes

_NODES = 6  # of a kernel that are shown at once


def overview(files: Files, manifest: Manifest, sizes: ChosenSizes) -> Iterator[Node]:
    yield facts(_facts(files, manifest))
    for title, tensors in (("Inputs", manifest.inputs), ("Outputs", manifest.outputs)):
        yield E("h3", title)
        yield table(("name", "type", "shape", ""), (_tensor(manifest, t, title == "Inputs") for t in tensors))
    if sizes.values:
        how = "as the page was told" if not sizes.picked else f"{', '.join(sorted(sizes.picked))} picked by the page"
        yield note(f"What depends on sizes is shown for {sizes} ({how}); --dim NAME=SIZE gives others.")
    if manifest.notes:
        yield E("h3", "Notes of the compiler")
        yield E("ul", (E("li", text) for text in manifest.notes))


def kernels(manifest: Manifest) -> Iterator[Node]:
    """The kernels, those that are called most first."""
    counts = Counter(call.kernel for call in manifest.calls)
    nodes: dict[str, list[str]] = {}
    for call in manifest.calls:
        nodes.setdefault(call.kernel, []).extend(call.nodes)
    rows: list[tuple[Child, ...]] = []
    for kernel in sorted(manifest.kernels, key=lambda kernel: -counts[kernel.name]):
        name = E("code", kernel.name)
        found = list(dict.fromkeys(nodes.get(kernel.name, ())))
        rows.append((str(counts[kernel.name]), name, kernel.kind, kernel.schedule, kernel.source or "-", _list(found)))
    yield E("p", f"{len(manifest.calls)} calls of {len(manifest.kernels)} kernels, those that are called most first.")
    yield table(("calls", "kernel", "computes", "rule", "tiles from", "ONNX nodes"), rows, numbers=[0])


def _facts(files: Files, manifest: Manifest) -> Iterator[tuple[str, Child]]:
    needed = f", which needs {', '.join(manifest.cpu_features)}" if manifest.cpu_features else ""
    built = f", built for {', '.join(manifest.architectures)}" if manifest.architectures else ""
    yield "Target", f"{manifest.target}{built}{needed}"
    yield "Threads", str(manifest.threads or "the CPUs that a process may use")
    versions = ", ".join(f"{name} {version}" for name, version in manifest.versions.items())
    yield "Made by", f"{versions}; format {manifest.format}{'; signed' if SIGNATURE in files else ''}"
    weights = sum(weight.nbytes for weight in manifest.weights)
    yield "Weights", f"{len(manifest.weights)}, {units.size(weights)}"
    yield "Code", units.size(sum(files.size(name) for name in manifest.code().values() if name in files))
    if manifest.ranges:
        texts = (
            f"{name}: {low}" if low == high else f"{name}: {low} to {high}"
            for name, (low, high) in manifest.ranges.items()
        )
        yield "Legal sizes", "; ".join(texts)
    if manifest.slots is not None:
        yield "Caches", f"{manifest.slots.capacity} slots, of which '{manifest.slots.length}' says how many are filled"
    if manifest.served is not None:
        of = manifest.served
        pages = f"pages of {of.tokens_per_block} tokens, keys and values {of.dtype}"
        yield "Serves", f"requests of up to {of.context} tokens, in {pages}"


def _tensor(manifest: Manifest, spec: TensorSpec, is_input: bool) -> tuple[Child, ...]:
    donated = manifest.donated.get(spec.name) if is_input else None
    shape = f"[{', '.join(map(str, spec.dims))}]"
    return E("code", spec.name), spec.dtype, shape, f"donated to {donated}" if donated else ""


def _list(names: list[str]) -> Child:
    if not names:
        return "-"
    first = ", ".join(names[:_NODES])
    return (
        first if len(names) <= _NODES else folded(f"{first} and {len(names) - _NODES} more", ", ".join(names[_NODES:]))
    )
