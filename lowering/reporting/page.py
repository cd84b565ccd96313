"""The page: its sections, a table of contents, and a style, in one self-contained file."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path

from ..manifest import Manifest
from ..runtime.artifact.files import ArtifactFiles
from .attention import render_attentions
from .code import render_kernel_code
from .dump import CompilationDump
from .elements import E, Node, make_note, to_html
from .measured import read_profiles, render_measurements
from .memory import render_memory
from .overview import render_kernels, render_overview
from .phases import render_phases
from .sizes import choose_sizes

_POLICY = "default-src 'none'; style-src 'unsafe-inline'; img-src data:"
"""The resources that a browser may load: none, and no script may run."""

_NO_DUMP = (
    "Not shown, as an artifact does not hold it: `compile ... --dump-dir DIR` writes it, and `inspect --html --dump "
    "DIR` shows it here."
)
_NO_BENCH = (
    "Not measured: `bench ARTIFACT --json > FILE` measures, on the machine that runs the artifact, and `inspect --html "
    "--bench FILE` shows it here."
)


def render_page(
    files: ArtifactFiles,
    manifest: Manifest,
    dump: Path | None = None,
    bench: Path | None = None,
    user_sizes: Mapping[str, int] | None = None,
) -> str:
    """Return the page about an artifact.

    dump is the folder that `compile --dump-dir` wrote, bench the output of `bench --json`, and user_sizes the sizes of
    symbolic dimensions.

    Raises:
        InputError: One of them is not the artifact's.
    """
    profiles = [] if bench is None else read_profiles(bench, manifest)
    sizes = choose_sizes(manifest, user_sizes or {}, profiles[0].sizes if profiles else {})
    compilation_dump = None if dump is None else CompilationDump(dump, manifest)
    placeholder = [make_note(_NO_DUMP)]
    sections: list[tuple[str, str, Iterable[Node]]] = [
        ("overview", "Overview", render_overview(files, manifest, sizes)),
        ("kernels", "Kernels", render_kernels(manifest)),
        ("phases", "Phases", placeholder if compilation_dump is None else render_phases(compilation_dump)),
        (
            "attention",
            "Attention",
            placeholder if compilation_dump is None else render_attentions(manifest, compilation_dump, sizes),
        ),
        ("measurements", "Measurements", render_measurements(profiles) if profiles else [make_note(_NO_BENCH)]),
        (
            "memory",
            "Memory",
            placeholder if compilation_dump is None else render_memory(manifest, compilation_dump, sizes),
        ),
        ("code", "Code", render_kernel_code(files, manifest, compilation_dump)),
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
    navigation = E(
        "nav",
        E("ul", (E("li", E("a", name, href=f"#{anchor}")) for anchor, name, _ in sections)),
        aria_label="Contents",
    )
    body = (E("section", E("h2", name), nodes, id=anchor) for anchor, name, nodes in sections)
    header = E("header", E("h1", files.folder.resolve().name), navigation)
    return "<!DOCTYPE html>\n" + to_html(E("html", head, E("body", header, E("main", body)), lang="en")) + "\n"
