"""Machine code of an artifact's kernels as text, by the tools that are at hand."""

from __future__ import annotations

import importlib.util
import re
import shutil
import struct
import subprocess
import tempfile
from collections.abc import Iterator
from pathlib import Path

from ..errors import InputError
from ..machine import not_installed
from ..manifest import SYMBOL

_LABEL = re.compile(r"^([0-9a-f]+) <(.*)>:$")
_SYMBOL = re.compile(rf"^([0-9a-f]+) .* {SYMBOL}(\w+)$")
_SASS = re.compile(r"^\s*\.section\s+\.text\.([\w$]+)", re.MULTILINE)
_CUDA = 190  # e_machine
_SECONDS = 120


def host_code(library: bytes) -> dict[str, str]:
    """The listing of each function by its name, with what it consists of behind it. Raises InputError, which says which
    tool is missing."""
    tool = shutil.which("llvm-objdump") or shutil.which("objdump")
    if tool is None:
        raise InputError("neither llvm-objdump nor objdump is installed (Debian: binutils)")
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "model.so"
        path.write_bytes(library)
        symbols = _run(tool, "-t", str(path))
        listing = _run(tool, "-d", "--no-show-raw-insn", str(path))
    names: dict[int, list[str]] = {}
    for line in symbols.splitlines():
        if match := _SYMBOL.match(line):
            names.setdefault(int(match[1], 16), []).append(match[2])
    found: dict[str, list[str]] = {}
    here: list[str] = []
    for line in listing.splitlines():
        match = _LABEL.match(line)
        if match is not None and match[2].startswith(SYMBOL):
            here = []
            found.update(dict.fromkeys(names.get(int(match[1], 16), []), here))
        here.append(line)
    return {name: "\n".join(lines).strip("\n") for name, lines in found.items()}


def device_code(library: bytes) -> dict[str, str]:
    """The listing of each launch by its name. Raises InputError, which says which tool is missing."""
    wheel = importlib.util.find_spec("nvidia.cu13") if importlib.util.find_spec("nvidia") else None
    folders = [Path(p) / "bin" for p in (wheel.submodule_search_locations or [] if wheel else [])]
    tool = shutil.which("nvdisasm") or next((str(f / "nvdisasm") for f in folders if (f / "nvdisasm").exists()), None)
    if tool is None:
        raise InputError(not_installed("nvdisasm", "nvidia-cuda-nvdisasm"))
    found = {}
    with tempfile.TemporaryDirectory() as folder:
        for number, code in enumerate(_cubins(library)):
            path = Path(folder) / f"{number}.cubin"
            path.write_bytes(code)
            listing = _run(tool, "-c", str(path))
            starts = list(_SASS.finditer(listing))
            for match, end in zip(starts, [*(m.start() for m in starts[1:]), len(listing)]):
                found[match[1]] = listing[match.start() : end].strip("\n")
    return found


def _cubins(library: bytes) -> Iterator[bytes]:
    """The ELF files for GPUs inside a library, up to the end of their headers, which stand behind everything else."""
    at = library.find(b"\x7fELF\x02", 1)
    while at >= 0:
        header = library[at : at + 64]
        if len(header) == 64:
            (machine,) = struct.unpack_from("<H", header, 18)
            programs, sections = struct.unpack_from("<QQ", header, 32)
            size, program_size, program_count, section_size, section_count = struct.unpack_from("<HHHHH", header, 52)
            end = max(size, programs + program_size * program_count, sections + section_size * section_count)
            if machine == _CUDA and end <= len(library) - at:
                yield library[at : at + end]
        at = library.find(b"\x7fELF\x02", at + 1)


def _run(tool: str, *arguments: str) -> str:
    try:
        done = subprocess.run([tool, *arguments], capture_output=True, text=True, errors="replace", timeout=_SECONDS)
    except (OSError, subprocess.TimeoutExpired) as error:
        raise InputError(f"{Path(tool).name} does not answer") from error
    if done.returncode != 0:
        reason = (done.stderr.strip().splitlines() or ["no reason given"])[-1]
        raise InputError(f"{Path(tool).name} cannot read this code: {reason}")
    return done.stdout
