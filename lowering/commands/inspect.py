"""The command that looks into an artifact: inspect. It loads no code, so that artifacts for other machines do too."""

from __future__ import annotations

import argparse
import dataclasses
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..errors import InputError
from .options import sizes
from .printed import add_json, print_json
from .written import written

if TYPE_CHECKING:
    from ..manifest import Manifest
    from ..runtime.files import Files

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
    from ..runtime.files import Files

    files = Files(arguments.artifact)
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


def _html(arguments: argparse.Namespace, files: Files, manifest: Manifest) -> int:
    from ..reporting.page import page

    text = page(files, manifest, arguments.dump, arguments.bench, sizes(arguments.dim))
    with written(arguments.html) as path:
        path.write_text(text, encoding="utf-8")
    print(f"wrote {arguments.html}")
    return 0


def _about(files: Files, manifest: Manifest) -> Iterator[str]:
    from ..manifest import SIGNATURE

    needed = f", which needs {', '.join(manifest.cpu_features)}" if manifest.cpu_features else ""
    yield f"for {manifest.target}{needed}; threads: {manifest.threads or 'the CPUs that a process may use'}"
    versions = ", ".join(f"{name} {version}" for name, version in manifest.versions.items())
    yield f"made by {versions}; format {manifest.format}{'; signed' if SIGNATURE in files else ''}"
    for title, tensors in (("inputs", manifest.inputs), ("outputs", manifest.outputs)):
        yield f"{title}:"
        for tensor in tensors:
            donated = manifest.donated.get(tensor.name) if title == "inputs" else None
            yield f"  {tensor}" + (f", donated to {donated}" if donated else "")
    for name, (low, high) in manifest.ranges.items():
        yield f"{name} is {low}" if low == high else f"{name} is from {low} to {high}"
    if manifest.slots is not None:
        yield f"caches of {manifest.slots.capacity} slots, of which '{manifest.slots.length}' says how many are filled"
    if manifest.served is not None:
        of = manifest.served
        pages = f"pages of {of.tokens_per_block}, keys and values {of.dtype}"
        yield f"serves requests of up to {of.context} tokens, in {pages}"
    code = sum(files.size(name) for name in manifest.code().values() if name in files)
    size = sum(weight.nbytes for weight in manifest.weights)
    yield f"{len(manifest.weights)} weights, {size / 2**20:.1f} MiB; code, {code / 2**20:.1f} MiB"
    for note in manifest.notes:
        yield f"note: {note}"


def _kernels(manifest: Manifest) -> Iterator[str]:
    """A line for each kernel; those that are called most come first."""
    from ..profiling.report import aligned

    counts = Counter(call.kernel for call in manifest.calls)
    nodes: dict[str, str] = {}
    for call in manifest.calls:
        nodes.setdefault(call.kernel, ", ".join(call.nodes))
    rows: list[tuple[str, ...]] = [("calls", "kernel", "computes", "schedule", "tiles", "its first ONNX nodes")]
    for kernel in sorted(manifest.kernels, key=lambda kernel: -counts[kernel.name]):
        first = nodes.get(kernel.name, "")
        short = first if len(first) <= _NODES else f"{first[: _NODES - 3]}..."
        source = kernel.source or "default"
        rows.append((str(counts[kernel.name]), kernel.name, kernel.kind, kernel.schedule, source, short or "-"))
    yield f"{len(manifest.calls)} calls of {len(manifest.kernels)} kernels"
    yield from aligned(rows)


def _calls(manifest: Manifest) -> Iterator[str]:
    from ..profiling.report import aligned

    rows: list[tuple[str, ...]] = [("call", "kernel", "ONNX nodes")]
    rows += [(str(n), call.kernel, ", ".join(call.nodes) or "-") for n, call in enumerate(manifest.calls)]
    yield from aligned(rows)
