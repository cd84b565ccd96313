"""Code of each kernel: its loops before and after scheduling, and its machine code."""

from __future__ import annotations

from collections.abc import Iterator

from ..errors import InputError
from ..manifest import KernelSpec, Manifest
from ..runtime.artifact.files import ArtifactFiles
from .attention import read_choice, render_tiles
from .disassembly import disassemble_device, disassemble_host
from .dump import CompilationDump
from .elements import E, Node, make_code, make_details, make_note
from .script import ModuleScript

_MAX_LINES = 1500  # lines of a listing that are shown


def render_kernel_code(files: ArtifactFiles, manifest: Manifest, dump: CompilationDump | None) -> Iterator[Node]:
    before, after = (None, None) if dump is None else (dump.read_script("donate"), dump.read_script("fuse_launches"))
    name = list(manifest.code().values())[-1]
    host: dict[str, str] = {}
    device: dict[str, str] = {}
    try:
        library = files.read(name)
        host = disassemble_host(library)
        device = disassemble_device(library) if manifest.architectures else {}
    except InputError as error:
        yield make_note(f"Not all machine code is shown: {error}.")
    for kernel in manifest.kernels:
        listings: list[Node] = []
        if before is not None and after is not None:
            listings += render_tiles(read_choice(after, kernel.name).get("chosen"))
            listings += _render_script("TensorIR before scheduling", before, kernel)
            listings += _render_script("TensorIR as it is compiled", after, kernel)
        for launch, text in device.items():
            if launch.rpartition("_kernel")[0] == kernel.name:
                listings.append(_render_listing(f"GPU code of {launch}", text, f"nvdisasm of the code in {name}"))
        if kernel.name in host:
            source = f"objdump -d {files.folder / name}"
            title = "Host code, which launches" if manifest.architectures else "Machine code"
            listings.append(_render_listing(title, host[kernel.name], source))
        summary = E("span", E("code", kernel.name), f" ({kernel.kind}, by rule '{kernel.schedule}')")
        if listings:
            yield make_details(summary, listings)


def _render_script(title: str, script: ModuleScript, kernel: KernelSpec) -> Iterator[Node]:
    text = script.functions.get(kernel.name)
    if text is not None:
        yield _render_listing(title, text, f"{script.path} from line {script.lines[kernel.name]} on")


def _render_listing(title: str, text: str, source: str) -> Node:
    lines = text.splitlines()
    omitted = len(lines) - _MAX_LINES
    remark = make_note(f"{omitted} more lines: {source}") if omitted > 0 else None
    return make_details(f"{title}: {len(lines)} lines", make_code("\n".join(lines[:_MAX_LINES])), remark)
