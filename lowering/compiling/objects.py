"""Object code of a CPU's kernels, compiled separately and cached (object_cache.py).

A kernel is compiled under a symbol derived from its computation, so that models share it under any name; the linker
maps the names of the model to symbols. A kernel that the same sources scheduled before need not be scheduled again to
determine its symbol.
"""

from __future__ import annotations

import functools
import hashlib
import os
import tempfile
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, replace
from importlib.metadata import version
from pathlib import Path
from typing import TypeAlias

import tvm
import tvm_ffi
from tvm import tirx
from tvm.tirx import compilation_pipeline

from schedules import CODE, CONSIDERED, remove_unused_features

from ..emission import kernel_signature
from ..emission.kernel_signature import PASSES_OF_PACKED_ARGUMENTS, unpack_arguments
from ..manifest import SYMBOL
from ..target import Target
from . import progress
from .cache import object_cache
from .cache.fingerprints import sources
from .scratch_records import add_scratch, write_scratch

Pass: TypeAlias = Callable[[tvm.IRModule], tvm.IRModule]


@dataclass(frozen=True)
class KernelObject:
    """The code of kernel `name`, which has the name `symbol` in the code."""

    name: str
    symbol: str
    code: bytes


class KernelCompiler:
    """The kernels of a module for a target: from the cache, or compiled and cached if use_cache is set.

    With c_signatures they take C arguments (emission/kernel_signature.py) instead of those of TVM's packed functions.
    """

    def __init__(self, target: Target, use_cache: bool = True, c_signatures: bool = False) -> None:
        self.target, self.made_for, self.use_cache = target, target.tvm.with_host(target.tvm), use_cache
        self.c_signatures = c_signatures
        self.new: list[str] = []
        """Symbols that were not in the cache."""
        self._cached: dict[str, KernelObject] = {}
        """By key of the unscheduled kernel, in memory: other processes may clear the cache at any time."""
        self._scratch: dict[str, str] = {}
        """Likewise, what their code allocates (scratch_records.py), with c_signatures."""
        self._pending: dict[str, Future[bytes]] = {}
        """By symbol: of equal kernels one thread compiles the first, and the others wait for its code."""
        self._guard = threading.Lock()

    def key(self, func: tirx.PrimFunc, how: str) -> str | None:
        """Return the key of an unscheduled kernel and its schedule `how`; None if it is not compiled separately."""
        if not self.use_cache or self.target.architecture or not _is_standalone(func):
            return None
        fingerprint = (
            tvm_ffi.structural_hash(_remove_names(func)), how, str(self.made_for), self.c_signatures, sources()
        )  # fmt: skip
        return "m" + hashlib.sha256(repr(fingerprint).encode()).hexdigest()[:32]

    def has(self, key: str) -> bool:
        """Return whether the code is cached, so that the kernel need not be scheduled."""
        if key not in self._cached:
            symbol, _, scratch = (object_cache.get(key, object_cache.MADE_OF) or b"").decode().partition("\n")
            code = object_cache.get(symbol) if symbol else None
            if code is None:
                return False
            self._cached[key], self._scratch[key] = KernelObject("", symbol, code), scratch
        return True

    def describe_scratch(self, module: tvm.IRModule) -> tvm.IRModule:
        """Return the module, in which kernels that are not scheduled say what their cached code allocates."""
        described = tvm.IRModule(dict(module.functions_items()), attrs=module.attrs)
        for name, func in module.functions_items():
            key = func.attrs.get(CODE) if isinstance(func, tirx.PrimFunc) else None
            if key in self._cached:
                described.update_func(name, add_scratch(func, self._scratch[key]))
        return described

    def compile_kernels(self, module: tvm.IRModule) -> tuple[tvm.IRModule, list[KernelObject]]:
        """Compile the kernels that call no other function; return the rest of the module, and their code.

        They are compiled on all CPUs that the caller may use.
        """
        names = {name: func for name, func in module.functions_items() if _is_standalone(func)}
        rest = tvm.IRModule({n: f for n, f in module.functions_items() if n not in names}, attrs=module.attrs)
        begin = time.perf_counter()
        pool = ThreadPoolExecutor(max_workers=len(os.sched_getaffinity(0)))
        try:
            compiled = []
            for kernel in pool.map(self.compile_kernel, names.values()):
                compiled.append(kernel)
                progress.report("compiling kernels", len(compiled), len(names))
        finally:
            pool.shutdown(cancel_futures=True)
        new, seconds = len(self.new), time.perf_counter() - begin
        progress.LOG.info("%d kernels compiled, %d from the cache: %.2f s", new, len(compiled) - new, seconds)
        if new and self.use_cache:
            object_cache.trim_seldom()
        return rest, compiled

    def compile_kernel(self, func: tirx.PrimFunc) -> KernelObject:
        name, key = str(func.attrs["global_symbol"]), func.attrs.get(CODE)
        if key in self._cached:
            return replace(self._cached[key], name=name)
        plain = remove_unused_features(func, self.made_for)
        fingerprint = (tvm_ffi.structural_hash(_remove_names(func)), str(plain), _versions())
        kind = "c" if self.c_signatures else ""
        symbol = f"k{kind}{hashlib.sha256(repr(fingerprint).encode()).hexdigest()[:32]}"
        with self._guard:
            is_first = symbol not in self._pending
            code = self._pending.setdefault(symbol, Future())
        if is_first:
            try:
                code.set_result(self._code(func, symbol, plain))
            except BaseException as error:
                code.set_exception(error)
        result = code.result()
        if key is not None:
            scratch = f"\n{write_scratch(func)}" if self.c_signatures else ""
            object_cache.put(key, (symbol + scratch).encode(), object_cache.MADE_OF)
        return KernelObject(name, symbol, result)

    def _code(self, func: tirx.PrimFunc, symbol: str, plain: tvm.target.Target) -> bytes:
        """Return the code of a kernel under its symbol, which identifies its computation."""
        code = object_cache.get(symbol) if self.use_cache else None
        if code is None:
            begin = time.perf_counter()
            code = self.compiled(func.with_attr("global_symbol", symbol), plain)
            progress.LOG.debug("kernel %s: %.2f s", func.attrs["global_symbol"], time.perf_counter() - begin)
            self.new.append(symbol)
            if self.use_cache:
                object_cache.put(symbol, code)
        return code

    def compiled(self, func: tirx.PrimFunc, target: tvm.target.Target) -> bytes:
        run, finish, _ = compilation_pipeline.get_default_tir_pipeline(target)
        unused = list_unused_passes(self.target)
        module = tvm.IRModule({str(func.attrs["global_symbol"]): func})
        with target, tvm.transform.PassContext(disabled_pass=list(unused)):
            lower = _lower_to_c if self.c_signatures else _lower_to_packed
            lowered = lower(tirx.transform.BindTarget(target)(module), run, unused)
            # A module of one function would have an entry function, and so would the next one.
            functions = {n: f.without_attr("tirx.is_entry_func") for n, f in lowered.functions_items()}
            code = tvm.get_global_func("target.build.llvm")(finish()(tvm.IRModule(functions)), target)
        with tempfile.TemporaryDirectory() as folder:
            path = Path(folder) / "kernel.o"
            code.write_to_file(str(path), "o")
            return path.read_bytes()


def _lower_to_packed(module: tvm.IRModule, run: Pass, unused: Sequence[str]) -> tvm.IRModule:
    """Return kernels after TVM's passes `run`, with the arguments of packed functions."""
    return tvm.IRModule({name: _skip_argument_checks(func) for name, func in run(module).functions_items()})


def _lower_to_c(module: tvm.IRModule, run: Pass, unused: Sequence[str]) -> tvm.IRModule:
    """Return kernels after TVM's passes `run`, with C arguments. `unused` are the passes that are left out anyway."""
    with tvm.transform.PassContext(disabled_pass=[*unused, *PASSES_OF_PACKED_ARGUMENTS]):
        lowered = run(module)
    unpacked = tvm.IRModule({name: unpack_arguments(func) for name, func in lowered.functions_items()})
    legalize = [tirx.transform.FP8StorageLegalize(), tirx.transform.BF16StorageLegalize()]
    return tvm.transform.Sequential(legalize)(unpacked)


def link_objects(kernels: Sequence[KernelObject], folder: str | Path) -> list[str]:
    """Return options that make the C compiler link the kernels; their files go to `folder`."""
    options = []
    for symbol, code in {kernel.symbol: kernel.code for kernel in kernels}.items():
        path = Path(folder) / f"{symbol}.o"
        path.write_bytes(code)
        options.append(str(path))
    names = [f"-Wl,--defsym={SYMBOL}{kernel.name}={SYMBOL}{kernel.symbol}" for kernel in kernels]
    return options + names


def list_unused_passes(target: Target) -> tuple[str, ...]:
    """Return TVM's passes without effect for the target."""
    return () if target.architecture else _UNUSED_ON_CPUS


@functools.cache
def _versions() -> tuple[str, ...]:
    """Return the versions of the code generator: of TVM, this file and the signatures."""
    files = (Path(__file__), Path(kernel_signature.__file__))
    return version("apache-tvm"), *(hashlib.sha256(path.read_bytes()).hexdigest() for path in files)


def _remove_names(func: tirx.PrimFunc) -> tirx.PrimFunc:
    return func.with_attr("global_symbol", "").without_attr(CODE).without_attr(CONSIDERED)


def _skip_argument_checks(func: tirx.PrimFunc) -> tirx.PrimFunc:
    """Return a lowered kernel without TVM's checks of its arguments, which take a third of the time to compile it.

    Only `main` calls it, with inputs that it has checked (passes/tvm_workarounds/name_shape_assertions.py),
    and with tensors that it has allocated by their sizes. A check in a statement of another kind than these stays.
    """

    def skip(stmt: tirx.Stmt) -> tirx.Stmt:
        if isinstance(stmt, tirx.AssertStmt):
            return tirx.Evaluate(0)
        if isinstance(stmt, tirx.SeqStmt):
            return tirx.SeqStmt([skip(child) for child in stmt.seq])
        if isinstance(stmt, tirx.IfThenElse) and stmt.else_case is None:  # of strides, which may be omitted
            return tirx.IfThenElse(stmt.condition, skip(stmt.then_case), None)
        if isinstance(stmt, tirx.AttrStmt) and stmt.attr_key != "compute_scope":  # that is what the kernel computes
            return tirx.AttrStmt(stmt.node, stmt.attr_key, stmt.value, skip(stmt.body))
        return stmt

    return func.with_body(skip(func.body))


def _is_standalone(func: tvm.ir.BaseFunc) -> bool:
    """Return whether the function is a kernel that calls no function of the module."""
    if not isinstance(func, tirx.PrimFunc):
        return False
    callees: list[tvm.ir.GlobalVar] = []
    tvm_ffi.structural_walk(func.body, (tvm.ir.GlobalVar, callees.append))
    return not callees


_UNUSED_ON_CPUS = (
    # Takes half the time of compiling an attention, and finds nothing: kernels of rules allocate what they need.
    "s_tir.CompactBufferAllocation",
    # Makes each `let` of a kernel a view of a shared stack slot. LLVM gets an assumption for each view, and takes a
    # third longer. It shares stack slots by itself, and kernels of rules allocate outside of serial loops.
    "tirx.StorageRewrite",
    # Find nothing in kernels of rules: they write no condition that is invariant in the loop around it.
    "s_tir.HoistExpression", "s_tir.InsertHoistIfThenElse",
    # Look for annotations of GPU schedules only.
    "s_tir.InjectPermutedLayout", "s_tir.InjectSoftwarePipeline", "s_tir.InjectVirtualThread", "s_tir.ThreadSync",
    "s_tir.InferFragment", "s_tir.LowerThreadAllreduce",
)  # fmt: skip
