"""The command that looks into an artifact: inspect. It loads no code, so that artifacts for other machines do too."""

from __future__ import annotations

import argparse
import dataclasses
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..errors import InputError
from .options import sizes
from .printed import add_json, print_json
from .written import written

if TYPE_CHECKING:
    from ..manifest import Manifest
    from ..runtime.files import ArtifactFiles

_NODES = 60  # characters of the nodes of a kernel


def add(add_parser: Callable[..., Any]) -> None:
    """Its options."""
    i = add_parser(
        "inspect",
        help="what an artifact takes and gives, what it was made of and by; needs no compiler",
        description="Reads an artifact's manifest, and loads none of its code: inputs, outputs, legal sizes, versions, "
        "notes, and its kernels with the ONNX nodes that they compute. --html writes all there is to see as a page.",
        example="inspect out/ --calls\ninspect out/ --html report.html --dump dump/ --bench bench.json",
    )
    i.add_argument("artifact", type=Path, help="the artifact folder")
    i.add_argument("--calls", action="store_true", help="every call of a kernel in order, with its ONNX nodes")
    add_json(i)
    i.add_argument("--html", type=Path, metavar="FILE", help="write everything as one HTML page; needs the compiler")
    i.add_argument("--dump", type=Path, metavar="DIR", help="for --html: what `compile --dump-dir DIR` wrote")
    i.add_argument("--bench", type=Path, metavar="FILE", help="for --html: what `bench --json > FILE` printed")
    i.add_argument("--dim", action="append", default=[], metavar="NAME=SIZE", help="for --html: a size to show it for")
    i.set_defaults(run=_inspect)


def _inspect(arguments: argparse.Namespace) -> int:
    from ..runtime.checks import read_manifest
    from ..runtime.files import ArtifactFiles

    files = ArtifactFiles(arguments.artifact)
    manifest = read_manifest(files)
    if arguments.html is not None:
        return _html(arguments, files, manifest)
    if arguments.dump or arguments.bench or arguments.dim:
        raise InputError("--dump, --bench and --dim are for the page that --html FILE writes.")
    if arguments.json:
        found = dataclasses.asdict(manifest)
        names = [name for name in manifest.hashes if name in files]
        print_json({**found, "files": {name: files.size(name) for name in names}})
        return 0
    print("\n".join([*_about(files, manifest), "", *(_calls(manifest) if arguments.calls else _kernels(manifest))]))
    return 0


def _html(arguments: argparse.Namespace, files: ArtifactFiles, manifest: Manifest) -> int:
    from ..reporting.page import page

    text = page(files, manifest, arguments.dump, arguments.bench, sizes(arguments.dim))
    with written(arguments.html) as path:
        path.write_text(text, encoding="utf-8")
    print(f"wrote {arguments.html}")
    return 0


def _about(files: ArtifactFiles, manifest: Manifest) -> Iterator[str]:
    from ..about import about

    yield from (f"{title}: {text}" for title, text in about(files, manifest))
    listed = [("Inputs", manifest.inputs), ("Outputs", manifest.outputs)]
    if manifest.setup is not None:
        listed += [("Inputs of the setup", manifest.setup.inputs), ("Outputs of the setup", manifest.setup.outputs)]
    lists = {"Inputs": manifest.input_lists, "Outputs": manifest.output_lists}
    for title, tensors in listed:
        yield f"{title}:"
        yield from (f"  {spec}" for spec in lists.get(title, ()))
        for tensor in tensors:
            donated = manifest.donated.get(tensor.name) if title == "Inputs" else None
            yield f"  {tensor}" + (f", donated to {donated}" if donated else "")
    for note in manifest.notes:
        yield f"note: {note}"


def _kernels(manifest: Manifest) -> Iterator[str]:
    """A line for each kernel."""
    from ..about import most_called
    from ..profiling.report import aligned

    rows: list[tuple[str, ...]] = [("calls", "kernel", "computes", "schedule", "tiles", "ONNX nodes")]
    for kernel, count, nodes in most_called(manifest):
        named = ", ".join(nodes) or "-"
        short = named if len(named) <= _NODES else f"{named[: _NODES - 3]}..."
        rows.append((str(count), kernel.name, kernel.kind, kernel.schedule, kernel.source or "default", short))
    yield f"{len(manifest.calls)} calls of {len(manifest.kernels)} kernels"
    yield from aligned(rows)


def _calls(manifest: Manifest) -> Iterator[str]:
    from ..profiling.report import aligned

    rows: list[tuple[str, ...]] = [("call", "kernel", "ONNX nodes")]
    rows += [(str(n), call.kernel, ", ".join(call.nodes) or "-") for n, call in enumerate(manifest.calls)]
    yield from aligned(rows)
