"""A model as C code and the objects of its kernels, and the tools that link them."""

from __future__ import annotations

import subprocess
from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from tvm import tirx

from ..emission.c_code import CTensor
from ..emission.c_model import CModel
from ..emission.main_code import emit_main
from ..errors import InputError, ModelError, TargetError
from ..graph.loading.model import ModelLike
from ..manifest import WEIGHTS
from ..target import Target, resolve
from .artifact import write_weights
from .bundled_sources import C_FLAGS, FOLDER, compile_c_sources
from .compilation import LoweredModel, lower
from .options import CompileOptions
from .pipeline import Dump


@dataclass(frozen=True)
class CObjects:
    """A model as C code, and the object code of its kernels by symbol."""

    model: CModel
    kernels: dict[str, bytes]


def lower_to_c(model: ModelLike, options: CompileOptions, dump: Dump | None) -> tuple[Target, LoweredModel]:
    """Return the target of a model, and the model, lowered for C code.

    Raises:
        InputError: The options are for an artifact only, or the model has a setup.
        ModelError: It has strings.
    """
    if options.serve is not None:
        raise InputError(
            "static.serve_unsupported", "serve makes a model for `Batcher`, which runs artifacts. Compile an artifact."
        )
    targets = resolve(options.target, options.cc)
    if targets[0].architecture:
        raise InputError(
            "static.target_unsupported",
            f"target='{options.target}' is a GPU, and C code is for a CPU. Use cpu, or compile an artifact.",
        )
    lowered, *setup = lower(model, options, targets, dump=dump, native=True)
    if setup:
        raise InputError(
            "static.setup_unsupported",
            "the model has a setup, which C code does not contain. Compile encoder and decoder as two models.",
        )
    if any(tensor.dtype == "string" for tensor in (*lowered.manifest.inputs, *lowered.manifest.outputs)):
        raise ModelError(
            "static.strings_unsupported",
            "the model has inputs or outputs of strings, which C code does not encode. Compile an artifact.",
        )
    return targets[0], lowered


def write_c_weights(lowered: LoweredModel, folder: Path) -> LoweredModel:
    """Write weights.bin, if the model has weights; return the model with their offsets."""
    (specs,), _, _ = write_weights(folder / WEIGHTS, [lowered.states[0].packed_weights])
    if not specs:
        (folder / WEIGHTS).unlink()
    return replace(lowered, manifest=replace(lowered.manifest, weights=specs))


def compile_c_model(lowered: LoweredModel, counters: Collection[str] = ()) -> CObjects:
    """Compile the kernels of a model for a CPU, and emit the C code of the rest.

    Args:
        lowered: The model, whose weights have their offsets.
        counters: Further kernels, which `main` does not call.

    Raises:
        ModelError: It needs more than calls of kernels (`static.unsupported`).
    """
    state, manifest = lowered.states[0], lowered.manifest
    module = lowered.kernels[0].describe_scratch(state.module)
    _, compiled = lowered.kernels[0].compile_kernels(module)
    tensors = [
        CTensor(
            f"(void*)((const char*)call->weights + {spec.offset})",
            tuple(tirx.IntImm("int64", size) for size in spec.dims),
            spec.storage,
        )
        for spec in manifest.weights
    ]
    program, code = emit_main(module, manifest.inputs, tensors, state.assertions)
    kernels = {name: module[name] for name in dict.fromkeys((*program.kernels, *counters))}
    symbols = {kernel.name: kernel.symbol for kernel in compiled if kernel.name in kernels}
    model = CModel(manifest, program, code, kernels, symbols)
    return CObjects(model, {kernel.symbol: kernel.code for kernel in compiled if kernel.name in kernels})


def compile_objects(
    target: Target, folder: Path, objects: CObjects, files: dict[str, str], variant: Sequence[str]
) -> list[str]:
    """Compile model.c and write the objects that it needs; return the names of all object files.

    Args:
        target: The target, whose linker compiles C.
        folder: Where all files go.
        objects: The model.
        files: The content of model.c, and of other files next to it.
        variant: As for `compile_c_sources`.

    Raises:
        TargetError: The compiler is missing, or fails.
    """
    for name, text in files.items():
        (folder / name).write_text(text, "utf-8")
    names = [f"{symbol}.o" for symbol in objects.kernels]
    for name, code in zip(names, objects.kernels.values()):
        (folder / name).write_bytes(code)
    flags = [*C_FLAGS, *variant, "-I", ".", "-I", str(FOLDER)]
    run_tool(target, folder, [target.linker, *flags, "-c", "model.c", "-o", "main.o"])
    try:
        called = compile_c_sources(target.linker, folder, objects.model.program.checks, variant)
    except RuntimeError as error:
        raise fail_linking(target, target.linker, str(error)) from error
    return ["main.o", *(Path(path).name for path in called), *names]


def run_tool(target: Target, folder: Path, command: Sequence[str]) -> str:
    """Run the compiler, the linker or another tool in a folder; return what it prints.

    Raises:
        TargetError: It is missing, or fails.
    """
    try:
        done = subprocess.run(command, cwd=folder, capture_output=True, text=True)
    except OSError as error:
        raise TargetError(
            "toolchain.linker_missing",
            f"Target '{target.name}' is linked by '{command[0]}', which is not installed. "
            "Install it or name another with --cc.",
        ) from error
    if done.returncode != 0:
        raise fail_linking(target, command[0], done.stderr)
    return done.stdout


def fail_linking(target: Target, tool: str, reason: str) -> TargetError:
    return TargetError("toolchain.link_failed", f"'{tool}' could not link for target '{target.name}': {reason}")
