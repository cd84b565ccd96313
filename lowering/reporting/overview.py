"""Overview of an artifact: inputs, outputs, target, versions, and kernels."""

from __future__ import annotations

from collections.abc import Iterator

from ..about import list_facts, rank_kernels
from ..manifest import Manifest, TensorSpec
from ..runtime.artifact.files import ArtifactFiles
from .elements import Child, E, Node, make_details, make_facts, make_note, make_table
from .sizes import ChosenSizes

_NODES = 6  # nodes of a kernel that are shown unfolded


def render_overview(files: ArtifactFiles, manifest: Manifest, sizes: ChosenSizes) -> Iterator[Node]:
    yield make_facts(list_facts(files, manifest))
    for title, tensors in (("Inputs", manifest.inputs), ("Outputs", manifest.outputs)):
        yield E("h3", title)
        yield make_table(
            ("name", "type", "shape", ""), (_format_tensor(manifest, t, title == "Inputs") for t in tensors)
        )
    if sizes.values:
        how = "as the page was told" if not sizes.picked else f"{', '.join(sorted(sizes.picked))} picked by the page"
        yield make_note(f"What depends on sizes is shown for {sizes} ({how}); --dim NAME=SIZE gives others.")
    if manifest.notes:
        yield E("h3", "Notes of the compiler")
        yield E("ul", (E("li", text) for text in manifest.notes))


def render_kernels(manifest: Manifest) -> Iterator[Node]:
    """Yield a table of the kernels, the most called first."""
    rows: list[tuple[Child, ...]] = []
    for kernel, count, nodes in rank_kernels(manifest):
        name = E("code", kernel.name)
        rows.append((str(count), name, kernel.kind, kernel.schedule, kernel.source or "-", _render_names(nodes)))
    yield E("p", f"{len(manifest.calls)} calls of {len(manifest.kernels)} kernels, those that are called most first.")
    yield make_table(("calls", "kernel", "computes", "rule", "tiles from", "ONNX nodes"), rows, numbers=[0])


def _format_tensor(manifest: Manifest, spec: TensorSpec, is_input: bool) -> tuple[Child, ...]:
    donated = manifest.donated.get(spec.name) if is_input else None
    shape = f"[{', '.join(map(str, spec.dims))}]"
    return E("code", spec.name), spec.dtype, shape, f"donated to {donated}" if donated else ""


def _render_names(names: list[str]) -> Child:
    if not names:
        return "-"
    first = ", ".join(names[:_NODES])
    return (
        first
        if len(names) <= _NODES
        else make_details(f"{first} and {len(names) - _NODES} more", ", ".join(names[_NODES:]))
    )
