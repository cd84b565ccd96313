"""A function that captures a GPU's work as a CUDA graph, and launches that graph from then on."""

from __future__ import annotations

import tvm
from tvm import relax

_RUN_OR_CAPTURE = "vm.builtin.cuda_graph.run_or_capture"


def add_replay(mod: tvm.IRModule) -> tvm.IRModule:
    """Add `replay(step) -> object`; a virtual machine may pass it one step only: a function without arguments.

    The first call calls the step twice, to run it and to capture the work that it enqueues, and returns its second
    result. All other calls launch the graph on the current stream and return the same object. RewriteCUDAGraph, TVM's
    pass, would capture those parts of `main` that read neither inputs nor memory of symbolic sizes: a decoder has none.
    """
    builder = relax.BlockBuilder(mod)
    step = relax.Var("step", relax.ObjectType())
    with builder.function("replay", params=[step]):
        arguments = relax.Tuple([step, relax.Tuple([]), relax.prim_value(0)])
        call = relax.op.call_builtin_with_ctx(_RUN_OR_CAPTURE, arguments, ty_args=[relax.ObjectType()])
        builder.emit_func_output(builder.emit(call))
    return builder.get()
