"""Read which machine code the matmuls of a model become: that of its own artifact, by nvcc."""

from __future__ import annotations

import itertools
import re
import tempfile
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from unittest import mock

import tvm_ffi

from lowering.choices import Precision
from lowering.compiling.cache import artifact_cache
from lowering.compiling.compiler import compile_to
from lowering.graph.loading.model import ModelLike
from lowering.manifest import Manifest
from lowering.target.cubin import compile_cubin
from tests.cuda.audits import sass
from tests.cuda.audits.machine_code import tool

TENSOR_CORES = ("HGMMA", "HMMA")


@dataclass(frozen=True)
class Matmul:
    """A function that multiplies matrices: its kind and the ONNX nodes that it computes. For each of its launches, how
    many instructions of which kind multiply on tensor cores, 0 of "" where none does. With epilogues, the last launch
    may be theirs."""

    name: str
    kind: str
    nodes: tuple[str, ...]
    launches: tuple[tuple[str, int], ...]
    epilogues: bool = False

    @property
    def on_tensor_cores(self) -> bool:
        """Return whether every launch multiplies there.

        Except for launches that add k-slices after one that multiplies, and attention launches that gather keys."""
        counts = [count for _, count in self.launches]
        if self.kind == "attention":
            return any(counts)
        if self.epilogues and not counts[-1]:
            counts = counts[:-1]
        return bool(counts and counts[0]) and all(before or here for before, here in itertools.pairwise(counts))

    def __str__(self) -> str:
        return ", ".join(f"{count} {opcode}" if count else "-" for opcode, count in self.launches)


def matmuls(model: ModelLike, arch: str, precision: Precision | None) -> tuple[Manifest, list[Matmul]]:
    """Compile the model, and read the machine code of its matmuls and attentions."""
    manifest, functions = machine_code_of(model, arch, precision)
    launches = {function.name: Counter(i.opcode for i in function.instructions) for function in functions}
    nodes = {call.kernel: call.nodes for call in reversed(manifest.calls)}
    matmuls_of_model = []
    for kernel in manifest.kernels:
        if kernel.kind in ("matmul", "conv", "attention"):
            own = [name for name in launches if re.fullmatch(rf"{re.escape(kernel.name)}_kernel(_\d+)?", name)]
            counts = tuple(_multiplying(launches[name]) for name in sorted(own, key=_number))
            epilogues = kernel.schedule == "epilogue_matmul"
            matmuls_of_model.append(Matmul(kernel.name, kernel.kind, nodes[kernel.name], counts, epilogues))
    return manifest, matmuls_of_model


def machine_code_of(
    model: ModelLike, arch: str, precision: Precision | None = None, donate: Sequence[str] = ()
) -> tuple[Manifest, list[sass.Function]]:
    """Compile the model, and read the machine code of all of its kernels."""
    with tempfile.TemporaryDirectory() as folder, _write_machine_code_to(Path(folder) / "kernels.cubin") as path:
        manifest = compile_to(Path(folder) / "artifact", model, f"cuda:{arch}", precision=precision, donate=donate)
        return manifest, sass.read(tool("nvdisasm", "-c", path))


@contextmanager
def _write_machine_code_to(path: Path) -> Iterator[Path]:
    """Write the machine code of all that is compiled meanwhile to this file too, even if a cache has it."""

    def compiled(source: str) -> bytes:
        code = compile_cubin(source)
        path.write_bytes(code)
        return code

    tvm_ffi.register_global_func("tvm_callback_cuda_compile", compiled, override=True)
    try:
        with mock.patch.object(artifact_cache, "key", lambda *_: None):
            yield path
    finally:
        tvm_ffi.register_global_func("tvm_callback_cuda_compile", compile_cubin, override=True)


def _multiplying(opcodes: Counter[str]) -> tuple[str, int]:
    return next(((opcode, opcodes[opcode]) for opcode in TENSOR_CORES if opcodes[opcode]), ("", 0))


def _number(name: str) -> int:
    return int(match[1]) if (match := re.search(r"_kernel_(\d+)$", name)) else 0
