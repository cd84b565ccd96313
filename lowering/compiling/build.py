"""Code generation and linking: a lowered module becomes the bytes of model.so."""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import tvm
import tvm_ffi
from tvm import relax, tirx
from tvm.script.ir_builder import IRBuilder
from tvm.script.ir_builder import tirx as T
from tvm.support import cc
from tvm.tirx import compilation_pipeline

from schedules import early_launch

from ..errors import TargetError
from ..target import Target, resolve
from ..target.building import load_cuda_runtime
from . import objects, progress
from .bundled_sources import compile_bundled_sources
from .own_device import ask_own_device

Pass = Callable[[tvm.IRModule], tvm.IRModule]


def build(module: tvm.IRModule, target: Target, kernels: objects.KernelCompiler) -> bytes:
    """Return the shared library; `kernels` compiles the kernels of a CPU, or has their code cached.

    Raise TargetError if a compiler or the linker is missing or fails.
    """
    check_linker(target)
    if target.architecture:
        load_cuda_runtime(target.linker)
    external_calls = _find_external_calls(module)
    objects_to_link: list[objects.KernelObject] = []
    if not target.architecture:
        module, objects_to_link = kernels.compile_kernels(module)
    module = _add_empty_kernel(module)
    disabled = list(objects.list_unused_passes(target))
    with progress.stage("generating code"), target.tvm, tvm.transform.PassContext(disabled_pass=disabled):
        executable = tvm.compile(
            module,
            target=target.tvm,
            relax_pipeline=tvm.transform.Sequential([]),
            tir_pipeline=get_tir_pipeline(target),
        )
    with progress.stage("linking"), _link_in_folder(target) as folder:
        path = folder / "model.so"
        options = [
            *compile_bundled_sources(target.linker, folder, external_calls),
            *objects.link_objects(objects_to_link, folder),
        ]
        executable.export_library(str(path), fcompile=_Linker(target, options))
        return path.read_bytes()


def load_bundled_functions(names: Collection[str]) -> tvm_ffi.Module:
    """Return a module of the C functions of these names, which compiled models call, for this machine.

    Raises:
        TargetError: the linker is missing, or fails.
    """
    (target,) = resolve("cpu")
    check_linker(target)
    with _link_in_folder(target) as folder:
        options = compile_bundled_sources(target.linker, folder, names)
        cc.create_shared(str(folder / "functions.so"), [], options, cc=target.linker)
        return tvm_ffi.load_module(str(folder / "functions.so"))


@contextmanager
def _link_in_folder(target: Target) -> Iterator[Path]:
    """Provide a temporary folder to link in, and report that the linker fails."""
    with tempfile.TemporaryDirectory() as folder:
        try:
            yield Path(folder)
        except (RuntimeError, OSError) as error:
            raise TargetError(
                "toolchain.link_failed", f"'{target.linker}' could not link for target '{target.name}': {error}"
            ) from error


def _add_empty_kernel(module: tvm.IRModule) -> tvm.IRModule:
    """Add a function that does nothing to a module without kernels.

    TVM writes an empty C file for a module without code, and compiles it with its own headers, which an installation
    may lack.
    """
    if any(isinstance(function, tirx.PrimFunc) for function in module.functions.values()):
        return module
    with IRBuilder() as builder, T.prim_func(s_tir=True):
        T.func_name("onnx_lowering_no_kernel")
        T.evaluate(0)
    added = tvm.IRModule(dict(module.functions_items()), attrs=module.attrs)
    added["onnx_lowering_no_kernel"] = builder.get().with_attr("global_symbol", "onnx_lowering_no_kernel")
    return added


class _Linker:
    """The linker, as TVM calls it; TVM asks it for the target triple if no module has one."""

    def __init__(self, target: Target, options: list[str]) -> None:
        self.target, self.options = target, options

    def __call__(self, path: str, files: list[str], options: Sequence[str] = ()) -> None:
        cc.create_shared(path, files, [*self.options, *options], cc=self.target.linker)

    def get_target_triple(self) -> str:
        host = self.target.tvm.host or self.target.tvm
        return str(host.attrs["mtriple"])


def check_linker(target: Target) -> None:
    """Raise TargetError if the linker is missing."""
    if shutil.which(target.linker) is None:
        raise TargetError(
            "toolchain.linker_missing",
            f"Target '{target.name}' is linked by '{target.linker}', which is not installed. "
            "Install it or name another with --cc.",
        )


def _find_external_calls(module: tvm.IRModule) -> set[str]:
    """Return the names of the external functions that the module calls."""
    names: set[str] = set()

    for _, function in module.functions_items():
        if isinstance(function, relax.Function):
            tvm_ffi.structural_walk(function.body, (relax.ExternFunc, lambda extern: names.add(extern.global_symbol)))
    return names


def warm_up(linker: str) -> None:
    """Do the setup that every build of this process needs, once."""
    with tempfile.TemporaryDirectory() as folder:
        compile_bundled_sources(linker, folder)


_PIPELINE = "onnx_lowering"


def get_tir_pipeline(target: Target) -> str:
    """Return the name of TVM's pipeline from TensorIR to code."""
    return _PIPELINE if target.architecture else "default"


def _build_pipeline() -> tuple[Pass, Callable[[], Pass], Callable[[], Pass]]:
    """Return TVM's passes from TensorIR to code, for modules of two kinds of functions.

    Functions of blocks are lowered, as TVM's own operators are. The others are final code, in which no statement may be
    moved and no barrier added.
    """
    blocks, host, device = compilation_pipeline.get_tir_pipeline("s_tir")
    final, _, _ = compilation_pipeline.get_tir_pipeline("tirx")

    def run(mod: tvm.IRModule) -> tvm.IRModule:
        functions: dict[bool, dict] = {True: {}, False: {}}
        for name, func in mod.functions_items():
            functions[_is_final(func)][name] = func
        merged = tvm.IRModule({}, attrs=mod.attrs)
        for is_final, lowered in ((False, blocks), (True, final)):
            if functions[is_final]:
                merged.update(lowered(tvm.IRModule(functions[is_final], attrs=mod.attrs)))
        return merged

    return (
        run,
        lambda: tvm.transform.Sequential([ask_own_device, host()]),
        lambda: tvm.transform.Sequential([early_launch, device()]),
    )


def _is_final(func: tirx.PrimFunc) -> bool:
    return "s_tir" not in func.attrs


compilation_pipeline.register_tir_pipeline(_PIPELINE, _build_pipeline)
