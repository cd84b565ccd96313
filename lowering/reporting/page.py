"""The page: its sections, a table of contents, and a style; one file that needs nothing else."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path

from ..manifest import Manifest
from ..runtime.files import ArtifactFiles
from .attention import attentions
from .code import kernel_code
from .dump import Dump
from .elements import E, Node, note, to_html
from .measured import measurements, read_profiles
from .memory import memory
from .overview import kernels, overview
from .phases import phases
from .sizes import chosen

_POLICY = "default-src 'none'; style-src 'unsafe-inline'; img-src data:"
"""What a browser may load: nothing, nor run any script."""

_NO_DUMP = (
    "Not shown, as an artifact does not hold it: `compile ... --dump-dir DIR` writes it, and `inspect --html --dump "
    "DIR` shows it here."
)
_NO_BENCH = (
    "Not measured: `bench ARTIFACT --json > FILE` measures, on the machine that runs the artifact, and `inspect --html "
    "--bench FILE` shows it here."
)


def page(
    files: ArtifactFiles,
    manifest: Manifest,
    dump: Path | None = None,
    bench: Path | None = None,
    said: Mapping[str, int] | None = None,
) -> str:
    """The page about an artifact.

    dump is the folder that `compile --dump-dir` wrote beside it, bench what `bench --json` printed, said the sizes of
    symbolic dimensions for what depends on them. Raises InputError where one of them is not the artifact's.
    """
    profiles = [] if bench is None else read_profiles(bench, manifest)
    sizes = chosen(manifest, said or {}, profiles[0].sizes if profiles else {})
    found = None if dump is None else Dump(dump, manifest)
    missing = [note(_NO_DUMP)]
    sections: list[tuple[str, str, Iterable[Node]]] = [
        ("overview", "Overview", overview(files, manifest, sizes)),
        ("kernels", "Kernels", kernels(manifest)),
        ("phases", "Phases", missing if found is None else phases(found)),
        ("attention", "Attention", missing if found is None else attentions(manifest, found, sizes)),
        ("measurements", "Measurements", measurements(profiles) if profiles else [note(_NO_BENCH)]),
        ("memory", "Memory", missing if found is None else memory(manifest, found, sizes)),
        ("code", "Code", kernel_code(files, manifest, found)),
    ]
    title = f"{files.folder.resolve().name}: a compiled model"
    head = E(
        "head",
        E("meta", charset="utf-8"),
        E("meta", name="viewport", content="width=device-width, initial-scale=1"),
        E("meta", http_equiv="Content-Security-Policy", content=_POLICY),
        E("link", rel="icon", href="data:,"),
        E("title", title),
        E("style", Path(__file__).with_name("page.css").read_text()),
    )
    contents = E(
        "nav", E("ul", (E("li", E("a", name, href=f"#{at}")) for at, name, _ in sections)), aria_label="Contents"
    )
    body = (E("section", E("h2", name), nodes, id=at) for at, name, nodes in sections)
    header = E("header", E("h1", files.folder.resolve().name), contents)
    return "<!DOCTYPE html>\n" + to_html(E("html", head, E("body", header, E("main", body)), lang="en")) + "\n"
