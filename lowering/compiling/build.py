"""Code generation and linking: a lowered module becomes the bytes of model.so."""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path

import tvm
import tvm_ffi
from tvm import relax, tirx
from tvm.script.ir_builder import IRBuilder
from tvm.script.ir_builder import tirx as T
from tvm.support import cc
from tvm.tirx import compilation_pipeline

from ..errors import TargetError
from ..target import Target
from ..target.building import make_modules_of_machine_code
from . import objects, progress
from .bundled_sources import link_options
from .early_launch import early_launch
from .own_device import ask_own_device

Pass = Callable[[tvm.IRModule], tvm.IRModule]


def build(module: tvm.IRModule, target: Target, kernels: objects.Kernels) -> bytes:
    """The shared library; kernels makes the code of a CPU's, or has it already.

    Raises TargetError when a compiler or the linker is missing or fails.
    """
    check_linker(target)
    if target.architecture:
        make_modules_of_machine_code(target.linker)
    called = _called(module)
    taken: list[objects.Object] = []
    if not target.architecture:
        module, taken = kernels.taken_out(module)
    module = _with_code(module)
    disabled = list(objects.unused(target))
    with progress.stage("generating code"), target.tvm, tvm.transform.PassContext(disabled_pass=disabled):
        executable = tvm.compile(
            module,
            target=target.tvm,
            relax_pipeline=tvm.transform.Sequential([]),
            tir_pipeline=tir_pipeline(target),
        )
    with progress.stage("linking"), tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "model.so"
        try:
            options = [*link_options(target.linker, folder, called), *objects.link_options(taken, folder)]
            executable.export_library(str(path), fcompile=_Linker(target, options))
        except (RuntimeError, OSError) as error:
            raise TargetError(f"'{target.linker}' could not link for target '{target.name}': {error}") from error
        return path.read_bytes()


def _with_code(module: tvm.IRModule) -> tvm.IRModule:
    """Add a function that does nothing to a module without kernels.

    TVM makes an empty C file of what has no code, and compiles that with headers of its own, which an installation may
    lack.
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
    """What links, as TVM calls it; it asks for the machine where no module tells."""

    def __init__(self, target: Target, options: list[str]) -> None:
        self.target, self.options = target, options

    def __call__(self, path: str, files: list[str], options: Sequence[str] = ()) -> None:
        cc.create_shared(path, files, [*self.options, *options], cc=self.target.linker)

    def get_target_triple(self) -> str:
        host = self.target.tvm.host or self.target.tvm
        return str(host.attrs["mtriple"])


def check_linker(target: Target) -> None:
    """Raises TargetError where the linker is missing."""
    if shutil.which(target.linker) is None:
        raise TargetError(
            f"Target '{target.name}' is linked by '{target.linker}', which is not installed. "
            "Install it or name another with --cc."
        )


def _called(module: tvm.IRModule) -> set[str]:
    """Names of the functions outside the module that it calls."""
    found: set[str] = set()

    for _, function in module.functions_items():
        if isinstance(function, relax.Function):
            tvm_ffi.structural_walk(function.body, (relax.ExternFunc, lambda extern: found.add(extern.global_symbol)))
    return found


def warm_up(linker: str) -> None:
    """Does what every build of this process would do first, once."""
    with tempfile.TemporaryDirectory() as folder:
        link_options(linker, folder)


_PIPELINE = "onnx_lowering"


def tir_pipeline(target: Target) -> str:
    """Return the name of TVM's pipeline from TensorIR to code."""
    return _PIPELINE if target.architecture else "default"


def _by_kind() -> tuple[Pass, Callable[[], Pass], Callable[[], Pass]]:
    """TVM's passes from TensorIR to code, for modules in which some functions are blocks to be lowered, as TVM's own
    operators are, and others are final code, in which nothing may be moved and no barrier added."""
    blocks, host, device = compilation_pipeline.get_tir_pipeline("s_tir")
    final, _, _ = compilation_pipeline.get_tir_pipeline("tirx")

    def run(mod: tvm.IRModule) -> tvm.IRModule:
        parts: dict[bool, dict] = {True: {}, False: {}}
        for name, func in mod.functions_items():
            parts[_is_final(func)][name] = func
        whole = tvm.IRModule({}, attrs=mod.attrs)
        for is_final, lowered in ((False, blocks), (True, final)):
            if parts[is_final]:
                whole.update(lowered(tvm.IRModule(parts[is_final], attrs=mod.attrs)))
        return whole

    return (
        run,
        lambda: tvm.transform.Sequential([ask_own_device, host()]),
        lambda: tvm.transform.Sequential([early_launch, device()]),
    )


def _is_final(func: tirx.PrimFunc) -> bool:
    return "s_tir" not in func.attrs


compilation_pipeline.register_tir_pipeline(_PIPELINE, _by_kind)
