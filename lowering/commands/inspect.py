"""The command that shows an artifact: inspect. It loads no code, so it works for artifacts of other machines."""

from __future__ import annotations

import argparse
import dataclasses
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..errors import InputError
from .json_output import add_json, print_json
from .options import parse_sizes
from .output_files import replace_file

if TYPE_CHECKING:
    from ..manifest import Manifest
    from ..runtime.artifact.files import ArtifactFiles

_NODES = 60  # characters of the node names of a kernel


def add_command(add_parser: Callable[..., Any]) -> None:
    """Add the command and its options."""
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
    from ..runtime.artifact.checks import read_manifest
    from ..runtime.artifact.files import ArtifactFiles

    files = ArtifactFiles(arguments.artifact)
    manifest = read_manifest(files)
    if arguments.html is not None:
        return _write_html(arguments, files, manifest)
    if arguments.dump or arguments.bench or arguments.dim:
        raise InputError(
            "argument.option_requires_other",
            "--dump, --bench and --dim are only for the page that --html FILE writes. Give --html as well.",
        )
    if arguments.json:
        manifest_fields = dataclasses.asdict(manifest)
        names = [name for name in manifest.hashes if name in files]
        print_json({**manifest_fields, "files": {name: files.size(name) for name in names}})
        return 0
    print(
        "\n".join(
            [
                *_format_facts(files, manifest),
                "",
                *(_format_calls(manifest) if arguments.calls else _format_kernels(manifest)),
            ]
        )
    )
    return 0


def _write_html(arguments: argparse.Namespace, files: ArtifactFiles, manifest: Manifest) -> int:
    from ..reporting.page import render_page

    text = render_page(files, manifest, arguments.dump, arguments.bench, parse_sizes(arguments.dim))
    with replace_file(arguments.html) as path:
        path.write_text(text, encoding="utf-8")
    print(f"wrote {arguments.html}")
    return 0


def _format_facts(files: ArtifactFiles, manifest: Manifest) -> Iterator[str]:
    from ..about import list_facts

    yield from (f"{title}: {text}" for title, text in list_facts(files, manifest))
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


def _format_kernels(manifest: Manifest) -> Iterator[str]:
    """Yield a line for each kernel."""
    from ..about import rank_kernels
    from ..profiling.report import align_columns

    rows: list[tuple[str, ...]] = [("calls", "kernel", "computes", "schedule", "tiles", "ONNX nodes")]
    for kernel, count, nodes in rank_kernels(manifest):
        node_names = ", ".join(nodes) or "-"
        shortened = node_names if len(node_names) <= _NODES else f"{node_names[: _NODES - 3]}..."
        rows.append((str(count), kernel.name, kernel.kind, kernel.schedule, kernel.source or "default", shortened))
    yield f"{len(manifest.calls)} calls of {len(manifest.kernels)} kernels"
    yield from align_columns(rows)


def _format_calls(manifest: Manifest) -> Iterator[str]:
    from ..profiling.report import align_columns

    rows: list[tuple[str, ...]] = [("call", "kernel", "ONNX nodes")]
    rows += [(str(n), call.kernel, ", ".join(call.nodes) or "-") for n, call in enumerate(manifest.calls)]
    yield from align_columns(rows)
