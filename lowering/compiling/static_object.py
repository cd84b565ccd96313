"""Static objects: a model as one object file and a header, for programs without a loader, a runtime or an operating
system.

The folder has model.o, model.h, weights.bin and weights.S, which makes the weights a part of the program.
"""

from __future__ import annotations

import re
import subprocess
import tempfile
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from tvm import tirx

from ..emission.c_code import CTensor
from ..emission.main_code import emit_main
from ..emission.static_header import write_header
from ..emission.static_model import StaticModel, name_fields
from ..emission.static_source import write_source, write_weights_source
from ..errors import InputError, ModelError, TargetError
from ..graph.loading.model import ModelLike
from ..manifest import HEADER, OBJECT, WEIGHTS, WEIGHTS_SOURCE, Manifest
from ..runtime.artifact.folders import replace_folder
from ..target import Target, resolve
from . import progress
from .artifact import write_weights
from .bundled_sources import FOLDER, list_sources
from .compilation import LoweredModel, lower
from .interrupts import preserve_interrupts
from .objects import KernelObject
from .options import CompileOptions
from .pipeline import Dump

_TOOLS = ("objcopy", "nm")
_OF_LINKERS = {"_GLOBAL_OFFSET_TABLE_", "__tls_get_addr"}
"""Names that linkers define or, in programs, remove."""
_FLAGS = (
    "-std=c11", "-O2", "-fPIC", "-ffreestanding", "-fno-stack-protector", "-fwrapv",
    "-fno-asynchronous-unwind-tables", "-Wno-unused-function", "-DLOWERING_STATIC",
)  # fmt: skip


@preserve_interrupts()
def write_static_object(
    folder: Path, model: ModelLike, options: CompileOptions, name: str = "model", dump: Dump | None = None
) -> Manifest:
    """Compile a model into a folder with its static object; return the model's description.

    Args:
        folder: The folder, which is replaced in one step if it exists.
        model: The model.
        options: As for an artifact. With one thread, one call of the model runs at a time.
        name: The prefix of its C names.
        dump: As for `compile`.

    Raises:
        InputError: The name is not a C identifier, or the target is a GPU.
        ModelError: It has strings, or calls what is not C code (`static.unsupported`).
        TargetError: The C compiler or the linker is missing or fails.
    """
    if not re.fullmatch(r"[A-Za-z][A-Za-z0-9_]*", name):
        raise InputError(
            "static.name_invalid", f"'{name}' cannot begin C names. Use letters, digits and _, a letter first."
        )
    if options.serve is not None:
        raise InputError(
            "static.serve_unsupported", "serve makes a model for `Batcher`, which runs artifacts. Compile an artifact."
        )
    targets = resolve(options.target, options.cc)
    if targets[0].architecture:
        raise InputError(
            "static.target_unsupported",
            f"target='{options.target}' is a GPU, and a static object is for a CPU. Use cpu, or compile an artifact.",
        )
    lowered, *setup = lower(model, options, targets, dump=dump, native=True)
    if setup:
        raise InputError(
            "static.setup_unsupported",
            "the model has a setup, which a static object does not contain. Compile encoder and decoder as two models.",
        )
    if any(tensor.dtype == "string" for tensor in (*lowered.manifest.inputs, *lowered.manifest.outputs)):
        raise ModelError(
            "static.strings_unsupported",
            "the model has inputs or outputs of strings, which a static object does not encode. Compile an artifact.",
        )
    kernels = _compile_kernels(lowered)
    with replace_folder(folder) as new:
        specs, _, _ = write_weights(new / WEIGHTS, [lowered.states[0].packed_weights])
        static = _emit(
            replace(lowered, manifest=replace(lowered.manifest, weights=specs[0])), name, options.threads == 1
        )
        source = write_source(static, {kernel.name: kernel.symbol for kernel in kernels})
        with progress.stage("linking"):
            content, functions = _link(targets[0], static, source, kernels)
        (new / OBJECT).write_bytes(content)
        (new / HEADER).write_text(write_header(static, functions), "ascii")
        if specs[0]:
            (new / WEIGHTS_SOURCE).write_text(write_weights_source(name), "ascii")
        else:
            (new / WEIGHTS).unlink()
    return static.manifest


def _compile_kernels(lowered: LoweredModel) -> list[KernelObject]:
    module = lowered.states[0].module
    _, kernels = lowered.kernels[0].compile_kernels(module)
    return kernels


def _emit(lowered: LoweredModel, name: str, one_thread: bool) -> StaticModel:
    """Return the model as C code."""
    state, manifest = lowered.states[0], lowered.manifest
    weights = [
        CTensor(f"(void*)((const char*)call->weights + {spec.offset})", _to_sizes(spec.dims), spec.storage)
        for spec in manifest.weights
    ]
    program, code = emit_main(state.module, manifest.inputs, weights, state.assertions)
    kernels = {n: state.module[n] for n in dict.fromkeys(program.kernels)}
    return StaticModel(name, manifest, name_fields(manifest, code), program, code, kernels, one_thread)


def _to_sizes(dims: Sequence[int]) -> tuple[tirx.IntImm, ...]:
    return tuple(tirx.IntImm("int64", size) for size in dims)


def _link(target: Target, static: StaticModel, source: str, kernels: Sequence[KernelObject]) -> tuple[bytes, list[str]]:
    """Return the object of the C code and the kernels, and the functions that it calls.

    Its only global names are those of the header.
    """
    with tempfile.TemporaryDirectory() as folder:
        files = {HEADER: write_header(static).encode(), "model.c": source.encode()}
        needed = {kernel.symbol: kernel.code for kernel in kernels if kernel.name in static.kernels}
        files |= {f"{symbol}.o": code for symbol, code in needed.items()}
        for file, content in files.items():
            (Path(folder) / file).write_bytes(content)
        names = [f"--keep-global-symbol={static.name}_{name}" for name in ("run", "workspace_bytes")]
        objcopy, nm = (_run(target, folder, [target.linker, f"-print-prog-name={tool}"]).strip() for tool in _TOOLS)
        sources = ["model.c", *(str(FOLDER / f"{name}.c") for name in list_sources(static.program.checks))]
        objects = [f"{symbol}.o" for symbol in needed]
        for number, path in enumerate(sources):
            objects.append(f"c{number}.o")
            _run(target, folder, [target.linker, *_FLAGS, "-I", ".", "-I", str(FOLDER), "-c", path, "-o", objects[-1]])
        _run(target, folder, [target.linker, "-r", "-nostdlib", *objects, "-o", OBJECT])
        _run(target, folder, [objcopy, *names, OBJECT])
        undefined = _run(target, folder, [nm, "-u", OBJECT]).splitlines()
        functions = {line.split()[-1] for line in undefined} - _OF_LINKERS
        return (Path(folder) / OBJECT).read_bytes(), sorted(functions)


def _run(target: Target, folder: str, command: Sequence[str]) -> str:
    try:
        done = subprocess.run(command, cwd=folder, capture_output=True, text=True)
    except OSError as error:
        raise TargetError(
            "toolchain.linker_missing",
            f"Target '{target.name}' is linked by '{command[0]}', which is not installed. "
            "Install it or name another with --cc.",
        ) from error
    if done.returncode != 0:
        raise TargetError(
            "toolchain.link_failed",
            f"'{command[0]}' could not link for target '{target.name}': {done.stderr}",
        )
    return done.stdout
