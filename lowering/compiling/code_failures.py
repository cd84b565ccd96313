"""Diagnosis of failed code generation: the kernel, and the nodes that call it.

TVM's error names neither. The kernels are lowered again one by one, until one fails.
"""

from __future__ import annotations

from collections.abc import Sequence

import tvm
from tvm import tirx

from ..errors import CompilerError
from ..manifest import CallSpec
from ..target import Target
from ..target.cubin import skip_machine_code
from .build import get_tir_pipeline

_MAX_NODES = 4  # in an error


def diagnose_code_failure(module: tvm.IRModule, calls: Sequence[CallSpec], target: Target) -> CompilerError:
    """Return the error for a module whose code generation failed in TVM."""
    kernel = _find_failing_kernel(module, target)
    if kernel is None:
        where, what = "the model", "no code could be generated"
    else:
        nodes = list(dict.fromkeys(node for call in calls if call.kernel == kernel for node in call.nodes))
        names = [*(f"'{node}'" for node in nodes[:_MAX_NODES]), *(["others"] if len(nodes) > _MAX_NODES else [])]
        where = f"nodes {', '.join(names)}" if len(names) > 1 else f"node {names[0]}" if names else "the model"
        what = f"no code could be generated for the kernel '{kernel}'"
    elsewhere = " Compile for a CPU until it is repaired." if target.architecture else ""
    return CompilerError(
        "compiler.code_generation_failed",
        f"{where}: {what} on target '{target.name}': a fault of the compiler, not of the model.{elsewhere} Please "
        "report it with the model; the cause of this error has the details (-v on the command line).",
    )


def _find_failing_kernel(module: tvm.IRModule, target: Target) -> str | None:
    """Return the first kernel that fails to compile by itself."""
    for name, func in module.functions_items():
        if not isinstance(func, tirx.PrimFunc):
            continue
        try:
            with target.tvm, skip_machine_code():
                single = tvm.IRModule({name: func}, attrs=module.attrs)
                tvm.tirx.build(single, target=target.tvm, pipeline=get_tir_pipeline(target))
        except Exception:  # whatever TVM raises
            return str(name.name_hint)
    return None
