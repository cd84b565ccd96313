"""A function by which the host has a GPU's work captured as a CUDA graph, and launches that graph from then on."""

from __future__ import annotations

import tvm
from tvm import relax

_RUN_OR_CAPTURE = "vm.builtin.cuda_graph.run_or_capture"


def add_replay(mod: tvm.IRModule) -> tvm.IRModule:
    """Adds `replay(step) -> object`, which a virtual machine may be given one step for: a function without arguments.

    The first call calls the step twice, to run it and to capture what it enqueues then, and returns its second result;
    all others launch the graph on the current stream and return the same object. RewriteCUDAGraph, TVM's pass, would
    capture parts of `main` that read neither inputs nor memory of symbolic sizes: of a decoder nothing is left.
    """
    builder = relax.BlockBuilder(mod)
    step = relax.Var("step", relax.ObjectType())
    with builder.function("replay", params=[step]):
        arguments = relax.Tuple([step, relax.Tuple([]), relax.prim_value(0)])
        call = relax.op.call_builtin_with_ctx(_RUN_OR_CAPTURE, arguments, ty_args=[relax.ObjectType()])
        builder.emit_func_output(builder.emit(call))
    return builder.get()
