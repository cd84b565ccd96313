"""What became of each kernel: its loops before and after scheduling, and its machine code."""

from __future__ import annotations

from collections.abc import Iterator

from ..errors import InputError
from ..manifest import KernelSpec, Manifest
from ..runtime.files import ArtifactFiles
from .attention import choice_of, tiles_table
from .disassembly import device_code, host_code
from .dump import Dump
from .elements import E, Node, code, folded, note
from .script import Script

_MOST = 1500  # lines of a listing


def kernel_code(files: ArtifactFiles, manifest: Manifest, dump: Dump | None) -> Iterator[Node]:
    before, after = (None, None) if dump is None else (dump.script("donate"), dump.script("fuse_launches"))
    name = list(manifest.code().values())[-1]
    host: dict[str, str] = {}
    device: dict[str, str] = {}
    try:
        library = files.read(name)
        host = host_code(library)
        device = device_code(library) if manifest.architectures else {}
    except InputError as error:
        yield note(f"Not all machine code is shown: {error}.")
    for kernel in manifest.kernels:
        parts: list[Node] = []
        if before is not None and after is not None:
            parts += tiles_table(choice_of(after, kernel.name).get("chosen"))
            parts += _script("TensorIR before scheduling", before, kernel)
            parts += _script("TensorIR as it is compiled", after, kernel)
        for launch, text in device.items():
            if launch.rpartition("_kernel")[0] == kernel.name:
                parts.append(_listing(f"GPU code of {launch}", text, f"nvdisasm of the code in {name}"))
        if kernel.name in host:
            where = f"objdump -d {files.folder / name}"
            title = "Host code, which launches" if manifest.architectures else "Machine code"
            parts.append(_listing(title, host[kernel.name], where))
        summary = E("span", E("code", kernel.name), f" ({kernel.kind}, by rule '{kernel.schedule}')")
        if parts:
            yield folded(summary, parts)


def _script(title: str, script: Script, kernel: KernelSpec) -> Iterator[Node]:
    text = script.functions.get(kernel.name)
    if text is not None:
        yield _listing(title, text, f"{script.path} from line {script.lines[kernel.name]} on")


def _listing(title: str, text: str, where: str) -> Node:
    lines = text.splitlines()
    rest = len(lines) - _MOST
    more = note(f"{rest} more lines: {where}") if rest > 0 else None
    return folded(f"{title}: {len(lines)} lines", code("\n".join(lines[:_MOST])), more)
