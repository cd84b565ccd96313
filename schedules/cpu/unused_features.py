"""The features of a CPU for which LLVM generates the code of one kernel."""

from __future__ import annotations

import tvm
import tvm_ffi
from tvm import tirx
from tvm.target import codegen

from .primitives.vector import VNNI_256, VNNI_512

_VNNI = {"+avx512vnni", "+avxvnni"}
_INTRINSIC = tvm.ir.Op.get("tirx.call_llvm_pure_intrin")


def remove_unused_features(func: tirx.PrimFunc, target: tvm.target.Target) -> tvm.target.Target:
    """Return the target, without int8 dot products if the kernel does not use them explicitly.

    LLVM 22 combines loops into such dot products and then accumulates only some of the terms (combineVPDPBUSDPattern,
    sums of 8 to 16).
    """
    config = dict(target.export())
    if not _VNNI & set(config.get("mattr", ())) or _has_int8_dot(func):
        return target
    plain = tvm.target.Target({**config, "mattr": [feature for feature in config["mattr"] if feature not in _VNNI]})
    return plain.with_host(plain)


def _has_int8_dot(func: tirx.PrimFunc) -> bool:
    """Return whether the kernel has an instruction for int8 dot products."""
    intrinsic_ids = [codegen.llvm_lookup_intrinsic_id(name) for name in (VNNI_512, VNNI_256)]
    calls: list[tvm.ir.Call] = []

    def visit(call: tvm.ir.Call) -> None:
        if (
            call.op.same_as(_INTRINSIC)
            and isinstance(call.args[0], tirx.IntImm)
            and call.args[0].value in intrinsic_ids
        ):
            calls.append(call)

    tvm_ffi.structural_walk(func.body, (tvm.ir.Call, visit))
    return bool(calls)
