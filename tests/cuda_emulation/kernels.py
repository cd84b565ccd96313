"""Single kernels: TensorIR functions that are built for the emulated device and called with NumPy arrays."""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from .device import Arrivals, Order
from .worker import run


def call(
    func: Any, arrays: Sequence[Any], *, arch: str = "sm_90a", order: Order = "ascending", arrivals: Arrivals = "late"
) -> list[Any]:
    """Builds one PrimFunc, calls it with copies of the arrays, and returns the arrays as they are afterwards.

    func: with device code and launches of its own ("tirx"), or scheduled for CUDA (`s_tir=True`).
    arrays: NumPy arrays of the shapes and types of its parameters, integers for scalar ones.
    order, arrivals: see README.md; a kernel should give the same under all six.
    Raises EmulationError with what the kernel did wrong.
    """
    return module({"main": func}, arch=arch).call("main", arrays, order=order, arrivals=arrivals)


def module(funcs: Mapping[str, Any], *, arch: str = "sm_90a") -> "Module":
    """Several PrimFuncs by name, to be built together: one run of g++ for all their kernels."""
    return Module(funcs, arch)


class Module:
    """PrimFuncs of one build. The build happens at the first call and is kept."""

    def __init__(self, funcs: Mapping[str, Any], arch: str) -> None:
        import tvm

        functions = {name: func.with_attr("global_symbol", name) for name, func in funcs.items()}
        self._json = tvm.ir.save_json(tvm.IRModule(functions))
        self._arch = arch

    def call(
        self, name: str, arrays: Sequence[Any], *, order: Order = "ascending", arrivals: Arrivals = "late"
    ) -> list[Any]:
        """As `call` above, for one function of the module."""
        return run(_call, self._json, self._arch, name, list(arrays), order, arrivals)

    def source(self) -> str:
        """The CUDA C++ of all kernels."""
        return run(_source, self._json, self._arch)

    def with_source(self, source: str) -> "Module":
        """The same host code with other kernels, such as these with a barrier removed."""
        changed = object.__new__(Module)
        changed._json, changed._arch = self._json, f"{self._arch}\n{source}"
        return changed


# ---- in the worker

_built: dict[tuple[str, str], Any] = {}


def _build(json: str, arch: str) -> Any:
    import tvm
    import tvm_ffi

    from . import device
    from .build import compile_for_emulation

    device.set_arch(arch.split("\n")[0])
    if (json, arch) not in _built:
        arch_name, _, source = arch.partition("\n")
        mod = tvm.ir.load_json(json)
        scheduled = any("s_tir" in func.attrs and func.attrs["s_tir"] for func in mod.functions.values())
        target = tvm.target.Target({"kind": "cuda", "arch": arch_name}, host="llvm")
        if source:
            replace = lambda _: compile_for_emulation(source)  # noqa: E731
            tvm_ffi.register_global_func("tvm_callback_cuda_compile", replace, override=True)
        try:
            with target:
                built = tvm.compile(mod, target=target, **({} if scheduled else {"tir_pipeline": "tirx"}))
        finally:
            tvm_ffi.register_global_func("tvm_callback_cuda_compile", compile_for_emulation, override=True)
        _built[json, arch] = built
    return _built[json, arch]


def _call(json: str, arch: str, name: str, arrays: list[Any], order: Order, arrivals: Arrivals) -> list[Any]:
    import tvm

    from . import device

    function = _build(json, arch)[name]
    device.set_order(order, arrivals)
    on_device = [tvm.runtime.tensor(a, tvm.cuda(0)) if isinstance(a, np.ndarray) else a for a in arrays]
    try:
        function(*on_device)
    finally:
        device.set_order()
    return [b.numpy() if isinstance(a, np.ndarray) else a for a, b in zip(arrays, on_device)]


def _source(json: str, arch: str) -> str:
    return "\n".join(part.inspect_source() for part in _build(json, arch).mod.imports)
