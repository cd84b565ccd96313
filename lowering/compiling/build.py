"""Code generation and linking: a lowered module becomes the bytes of model.so."""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Callable
from pathlib import Path

import tvm
import tvm_ffi
from tvm import relax, tirx
from tvm.tirx import compilation_pipeline

from schedules.cpu.dot_int8 import INSTRUCTION

from ..errors import TargetError
from ..runtime.parallel import link_options
from ..target import Target
from ..target.building import make_modules_of_machine_code

_UNUSED_ON_CPUS = (
    # Takes half the time of compiling an attention, and finds nothing: what rules make allocates what it needs.
    "s_tir.CompactBufferAllocation",
    # Look for what only schedules of GPUs ask for.
    "s_tir.InjectPermutedLayout", "s_tir.InjectSoftwarePipeline", "s_tir.InjectVirtualThread", "s_tir.ThreadSync",
    "s_tir.InferFragment", "s_tir.LowerThreadAllreduce",
)  # fmt: skip

Pass = Callable[[tvm.IRModule], tvm.IRModule]


def build(module: tvm.IRModule, target: Target) -> bytes:
    """The shared library.

    Raises TargetError when a compiler or the linker is missing or fails.
    """
    if shutil.which(target.linker) is None:
        raise TargetError(
            f"Target '{target.name}' is linked by '{target.linker}', which is not installed. "
            "Install it or name another with --cc."
        )
    if target.architecture:
        make_modules_of_machine_code(target.linker)
    unused = () if target.architecture else _UNUSED_ON_CPUS
    called = _called(module)
    made_for = target.tvm if target.architecture else _with_needed_features(module, target.tvm)
    with made_for, tvm.transform.PassContext(disabled_pass=list(unused)):
        executable = tvm.compile(
            module,
            target=made_for,
            relax_pipeline=tvm.transform.Sequential([]),
            tir_pipeline=_PIPELINE if target.architecture else "default",
        )
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "model.so"
        try:
            executable.export_library(str(path), cc=target.linker, options=link_options(target.linker, folder, called))
        except (RuntimeError, OSError) as error:
            raise TargetError(f"'{target.linker}' could not link for target '{target.name}': {error}") from error
        return path.read_bytes()


def _with_needed_features(module: tvm.IRModule, target: tvm.target.Target) -> tvm.target.Target:
    """The target without products of bytes where no kernel asks for them: of what it finds in loops by itself, LLVM 22
    makes such products of which it adds up a part (combineVPDPBUSDPattern, sums of 8 to 16)."""
    config = dict(target.export())
    if _VNNI not in config.get("mattr", ()) or _multiplies_bytes(module):
        return target
    return tvm.target.Target({**config, "mattr": [feature for feature in config["mattr"] if feature != _VNNI]})


_VNNI = "+avx512vnni"


def _multiplies_bytes(module: tvm.IRModule) -> bool:
    """Whether a kernel has an instruction for products of bytes."""
    number = tvm.target.codegen.llvm_lookup_intrinsic_id(INSTRUCTION)
    found: list[tvm.ir.Call] = []

    def visit(call: tvm.ir.Call) -> None:
        if call.op.same_as(_INTRINSIC) and isinstance(call.args[0], tirx.IntImm) and call.args[0].value == number:
            found.append(call)

    for _, function in module.functions_items():
        if isinstance(function, tirx.PrimFunc):
            tvm_ffi.structural_walk(function.body, (tvm.ir.Call, visit))
    return bool(found)


_INTRINSIC = tvm.ir.Op.get("tirx.call_llvm_pure_intrin")


def _called(module: tvm.IRModule) -> set[str]:
    """Names of the functions outside the module that it calls."""
    found: set[str] = set()

    def visit(expr: relax.Expr) -> None:
        if isinstance(expr, relax.ExternFunc):
            found.add(expr.global_symbol)

    for _, function in module.functions_items():
        if isinstance(function, relax.Function):
            relax.analysis.post_order_visit(function, visit)
    return found


def warm_up(linker: str) -> None:
    """Does what every build of this process would do first, once."""
    with tempfile.TemporaryDirectory() as folder:
        link_options(linker, folder)


_PIPELINE = "onnx_lowering"


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

    return run, host, device


def _is_final(func: tirx.PrimFunc) -> bool:
    return "s_tir" not in func.attrs


compilation_pipeline.register_tir_pipeline(_PIPELINE, _by_kind)
