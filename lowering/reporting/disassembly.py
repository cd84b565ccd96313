"""Disassembly of an artifact's kernels, by installed tools."""

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
from ..machine import describe_missing_package
from ..manifest import SYMBOL

_LABEL = re.compile(r"^([0-9a-f]+) <(.*)>:$")
_SYMBOL = re.compile(rf"^([0-9a-f]+) .* {SYMBOL}(\w+)$")
_SASS = re.compile(r"^\s*\.section\s+\.text\.([\w$]+)", re.MULTILINE)
_CUDA = 190  # e_machine
_SECONDS = 120


def disassemble_host(library: bytes) -> dict[str, str]:
    """Return the listing of each function by its name, with the code after it that belongs to it.

    Raises:
        InputError: A tool is missing, which the text names, or fails.
    """
    tool = shutil.which("llvm-objdump") or shutil.which("objdump")
    if tool is None:
        raise InputError(
            "toolchain.disassembler_missing", "neither llvm-objdump nor objdump is installed (Debian: binutils)"
        )
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "model.so"
        path.write_bytes(library)
        symbols = _run_tool(tool, "-t", str(path))
        listing = _run_tool(tool, "-d", "--no-show-raw-insn", str(path))
    names: dict[int, list[str]] = {}
    for line in symbols.splitlines():
        if match := _SYMBOL.match(line):
            names.setdefault(int(match[1], 16), []).append(match[2])
    listings: dict[str, list[str]] = {}
    current: list[str] = []
    for line in listing.splitlines():
        match = _LABEL.match(line)
        if match is not None and match[2].startswith(SYMBOL):
            current = []
            listings.update(dict.fromkeys(names.get(int(match[1], 16), []), current))
        current.append(line)
    return {name: "\n".join(lines).strip("\n") for name, lines in listings.items()}


def disassemble_device(library: bytes) -> dict[str, str]:
    """Return the listing of each launch by its name.

    Raises:
        InputError: A tool is missing, which the text names, or fails.
    """
    wheel = importlib.util.find_spec("nvidia.cu13") if importlib.util.find_spec("nvidia") else None
    folders = [Path(p) / "bin" for p in (wheel.submodule_search_locations or [] if wheel else [])]
    tool = shutil.which("nvdisasm") or next((str(f / "nvdisasm") for f in folders if (f / "nvdisasm").exists()), None)
    if tool is None:
        raise InputError("toolchain.package_missing", describe_missing_package("nvdisasm", "nvidia-cuda-nvdisasm"))
    listings = {}
    with tempfile.TemporaryDirectory() as folder:
        for number, code in enumerate(_find_cubins(library)):
            path = Path(folder) / f"{number}.cubin"
            path.write_bytes(code)
            listing = _run_tool(tool, "-c", str(path))
            starts = list(_SASS.finditer(listing))
            for match, end in zip(starts, [*(m.start() for m in starts[1:]), len(listing)]):
                listings[match[1]] = listing[match.start() : end].strip("\n")
    return listings


def _find_cubins(library: bytes) -> Iterator[bytes]:
    """Yield the ELF files for GPUs in a library, up to the end of their headers, which follow everything else."""
    offset = library.find(b"\x7fELF\x02", 1)
    while offset >= 0:
        header = library[offset : offset + 64]
        if len(header) == 64:
            (machine,) = struct.unpack_from("<H", header, 18)
            programs, sections = struct.unpack_from("<QQ", header, 32)
            size, program_size, program_count, section_size, section_count = struct.unpack_from("<HHHHH", header, 52)
            end = max(size, programs + program_size * program_count, sections + section_size * section_count)
            if machine == _CUDA and end <= len(library) - offset:
                yield library[offset : offset + end]
        offset = library.find(b"\x7fELF\x02", offset + 1)


def _run_tool(tool: str, *arguments: str) -> str:
    try:
        process = subprocess.run([tool, *arguments], capture_output=True, text=True, errors="replace", timeout=_SECONDS)
    except (OSError, subprocess.TimeoutExpired) as error:
        raise InputError("toolchain.disassembler_timeout", f"{Path(tool).name} does not answer") from error
    if process.returncode != 0:
        reason = (process.stderr.strip().splitlines() or ["no reason given"])[-1]
        raise InputError("toolchain.disassembler_failed", f"{Path(tool).name} cannot read this code: {reason}")
    return process.stdout
