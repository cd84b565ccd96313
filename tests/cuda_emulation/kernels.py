"""Single kernels: TensorIR functions that are built for the emulated device and called with NumPy arrays."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from . import card
from .device import Arrivals, Order
from .worker import run


def call(
    func: Any, arrays: Sequence[Any], *, arch: str = "sm_90a", order: Order = "ascending", arrivals: Arrivals = "late"
) -> list[Any]:
    """Build one PrimFunc, call it with copies of the arrays, and return the arrays as they are afterwards.

    func: with device code and launches of its own ("tirx"), or scheduled for CUDA (`s_tir=True`).
    arrays: NumPy arrays of the shapes and types of its parameters, integers for scalar ones.
    order, arrivals: see README.md; a kernel should give the same under all six.
    Raises EmulationError with what the kernel did wrong.
    """
    return module({"main": func}, arch=arch).call("main", arrays, order=order, arrivals=arrivals)


def module(funcs: Mapping[str, Any], *, arch: str = "sm_90a") -> "Module":
    """Return a module of several PrimFuncs by name: one run of g++ for all their kernels."""
    return Module(funcs, arch)


class Module:
    """PrimFuncs of one build. The build happens at the first call and is cached."""

    def __init__(self, funcs: Mapping[str, Any], arch: str) -> None:
        import tvm

        functions = {name: func.with_attr("global_symbol", name) for name, func in funcs.items()}
        self._json = tvm.ir.save_json(tvm.IRModule(functions))
        self._code = _Code(arch)

    def call(
        self, name: str, arrays: Sequence[Any], *, order: Order = "ascending", arrivals: Arrivals = "late"
    ) -> list[Any]:
        """Call one function of the module, as `call` above."""
        return self._run(_call, name, list(arrays), order=order, arrivals=arrivals)

    def call_without(
        self, step: int, name: str, arrays: Sequence[Any], *, order: Order = "ascending", arrivals: Arrivals = "late"
    ) -> tuple[list[Any], bool]:
        """Call with a step left out (see mutations.py), and return whether a thread reached it, too."""
        return self._run(_call_without, step, name, list(arrays), order=order, arrivals=arrivals)

    def source(self) -> str:
        """Return the CUDA C++ of all kernels."""
        return self._run(_source)

    def _run(self, function: Callable, *arguments: Any, **turn: Any) -> Any:
        return run(function, self._json, self._code, *arguments, arch=self._code.arch, **turn)

    def with_source(self, source: str) -> "Module":
        """Return the same host code with other kernels, such as these with a barrier removed."""
        changed = object.__new__(Module)
        changed._json, changed._code = self._json, _Code(self._code.arch, source)
        return changed


# ---- in the worker


class _Code(NamedTuple):
    """The architecture of kernels, and their source where it differs from TVM's."""

    arch: str
    source: str | None = None


_built: dict[tuple[str, _Code], Any] = {}


def _build(json: str, code: _Code) -> Any:
    import tvm
    import tvm_ffi

    from lowering.target.cubin import compile_cubin

    from .build import compile_for_emulation

    compiler = compile_cubin if card.is_used() else compile_for_emulation
    if (json, code) not in _built:
        mod = tvm.ir.load_json(json)
        scheduled = any("s_tir" in func.attrs and func.attrs["s_tir"] for func in mod.functions.values())
        target = tvm.target.Target({"kind": "cuda", "arch": code.arch}, host="llvm")

        def compiled(written: str) -> bytes:
            return compiler(written if code.source is None else code.source)

        tvm_ffi.register_global_func("tvm_callback_cuda_compile", compiled, override=True)
        try:
            with target:
                built = tvm.compile(mod, target=target, **({} if scheduled else {"tir_pipeline": "tirx"}))
        finally:
            tvm_ffi.register_global_func("tvm_callback_cuda_compile", compiler, override=True)
        _built[json, code] = built
    return _built[json, code]


def _call(json: str, code: _Code, name: str, arrays: list[Any]) -> list[Any]:
    import tvm

    function = _build(json, code)[name]
    on_device = [tvm.runtime.tensor(a, tvm.cuda(0)) if isinstance(a, np.ndarray) else a for a in arrays]
    function(*on_device)
    return [b.numpy() if isinstance(a, np.ndarray) else a for a, b in zip(arrays, on_device)]


def _call_without(json: str, code: _Code, step: int, name: str, arrays: list[Any]) -> tuple[list[Any], bool]:
    from . import device

    device.leave_out(step)
    try:
        results = _call(json, code, name, arrays)
    finally:
        reached = device.leave_out(-1)
    return results, reached


def _source(json: str, code: _Code) -> str:
    return "\n".join(module.inspect_source() for module in _build(json, code).mod.imports)
