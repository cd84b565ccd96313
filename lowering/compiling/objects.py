"""Object code of a CPU's kernels, each compiled by itself: what was compiled before is found again (object_cache.py).

A kernel is compiled under a name that says what it computes, its symbol, so that models share it whatever they call it;
the linker is told the names of the model. What was scheduled before by the same sources need not be scheduled again to
learn its symbol.
"""

from __future__ import annotations

import functools
import hashlib
import os
import tempfile
import threading
import time
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, replace
from importlib.metadata import version
from pathlib import Path

import tvm
import tvm_ffi
from tvm import tirx
from tvm.target import codegen
from tvm.tirx import compilation_pipeline

from schedules import CODE, CONSIDERED
from schedules.cpu.vector import VNNI_256, VNNI_512

from ..manifest import SYMBOL
from ..target import Target
from . import object_cache, progress
from .fingerprints import sources


@dataclass(frozen=True)
class Object:
    """The code of kernel `name`, in which it is called `symbol`."""

    name: str
    symbol: str
    code: bytes


class Kernels:
    """The kernels of a module for a target: from the cache, or compiled and, if so wanted, kept for later."""

    def __init__(self, target: Target, kept: bool = True) -> None:
        self.target, self.made_for, self.kept = target, target.tvm.with_host(target.tvm), kept
        self.new: list[str] = []
        """What was not in the cache."""
        self._known: dict[str, Object] = {}
        """By what they are made of, in memory: others may clear the cache at any time."""
        self._codes: dict[str, Future[bytes]] = {}
        """By symbol: of equal kernels one thread compiles the first, and the others wait for its code."""
        self._guard = threading.Lock()

    def key(self, func: tirx.PrimFunc, how: str) -> str | None:
        """What stands for the code of a kernel that is still to be scheduled, in the way that `how` tells; None where
        it is not compiled by itself."""
        if not self.kept or self.target.architecture or not _stands_alone(func):
            return None
        what = (tvm_ffi.structural_hash(_anonymous(func)), how, str(self.made_for), sources())
        return "m" + hashlib.sha256(repr(what).encode()).hexdigest()[:32]

    def has(self, key: str) -> bool:
        """Whether that kernel need not be scheduled."""
        if key not in self._known:
            symbol = object_cache.get(key, object_cache.MADE_OF)
            code = None if symbol is None else object_cache.get(symbol.decode())
            if symbol is None or code is None:
                return False
            self._known[key] = Object("", symbol.decode(), code)
        return True

    def taken_out(self, module: tvm.IRModule) -> tuple[tvm.IRModule, list[Object]]:
        """The module without the kernels that call no other function, and their code, compiled on all CPUs that the
        caller may use."""
        names = {name: func for name, func in module.functions_items() if _stands_alone(func)}
        rest = tvm.IRModule({n: f for n, f in module.functions_items() if n not in names}, attrs=module.attrs)
        begin = time.perf_counter()
        pool = ThreadPoolExecutor(max_workers=len(os.sched_getaffinity(0)))
        try:
            found = []
            for each in pool.map(self.object, names.values()):
                found.append(each)
                progress.at("compiling kernels", len(found), len(names))
        finally:
            pool.shutdown(cancel_futures=True)
        new, seconds = len(self.new), time.perf_counter() - begin
        progress.LOG.info("%d kernels compiled, %d from the cache: %.2f s", new, len(found) - new, seconds)
        if new and self.kept:
            object_cache.trim_seldom()
        return rest, found

    def object(self, func: tirx.PrimFunc) -> Object:
        name, key = str(func.attrs["global_symbol"]), func.attrs.get(CODE)
        if key in self._known:
            return replace(self._known[key], name=name)
        plain = _with_needed_features(func, self.made_for)
        what = (tvm_ffi.structural_hash(_anonymous(func)), str(plain), _versions())
        symbol = "k" + hashlib.sha256(repr(what).encode()).hexdigest()[:32]
        with self._guard:
            mine = symbol not in self._codes
            code = self._codes.setdefault(symbol, Future())
        if mine:
            try:
                code.set_result(self._code(func, symbol, plain))
            except BaseException as error:
                code.set_exception(error)
        found = code.result()
        if key is not None:
            object_cache.put(key, symbol.encode(), object_cache.MADE_OF)
        return Object(name, symbol, found)

    def _code(self, func: tirx.PrimFunc, symbol: str, plain: tvm.target.Target) -> bytes:
        """Return the code of a kernel under the symbol, which says what it computes."""
        code = object_cache.get(symbol) if self.kept else None
        if code is None:
            begin = time.perf_counter()
            code = self.compiled(func.with_attr("global_symbol", symbol), plain)
            progress.LOG.debug("kernel %s: %.2f s", func.attrs["global_symbol"], time.perf_counter() - begin)
            self.new.append(symbol)
            if self.kept:
                object_cache.put(symbol, code)
        return code

    def compiled(self, func: tirx.PrimFunc, target: tvm.target.Target) -> bytes:
        run, finish, _ = compilation_pipeline.get_default_tir_pipeline(target)
        with target, tvm.transform.PassContext(disabled_pass=list(unused(self.target))):
            module = tirx.transform.BindTarget(target)(tvm.IRModule({str(func.attrs["global_symbol"]): func}))
            # A module of one function would have an entry, and so would the next one.
            lowered = {n: f.without_attr("tirx.is_entry_func") for n, f in run(module).functions_items()}
            code = tvm.get_global_func("target.build.llvm")(finish()(tvm.IRModule(lowered)), target)
        with tempfile.TemporaryDirectory() as folder:
            path = Path(folder) / "kernel.o"
            code.write_to_file(str(path), "o")
            return path.read_bytes()


def link_options(kernels: Sequence[Object], folder: str | Path) -> list[str]:
    """Options that have the C compiler link them; their files go to `folder`."""
    options = []
    for symbol, code in {kernel.symbol: kernel.code for kernel in kernels}.items():
        path = Path(folder) / f"{symbol}.o"
        path.write_bytes(code)
        options.append(str(path))
    names = [f"-Wl,--defsym={SYMBOL}{kernel.name}={SYMBOL}{kernel.symbol}" for kernel in kernels]
    return options + names


def unused(target: Target) -> tuple[str, ...]:
    """TVM's passes that do nothing for the target."""
    return () if target.architecture else _UNUSED_ON_CPUS


@functools.cache
def _versions() -> tuple[str, ...]:
    """Of what makes code of functions: TVM and this file."""
    return version("apache-tvm"), hashlib.sha256(Path(__file__).read_bytes()).hexdigest()


def _anonymous(func: tirx.PrimFunc) -> tirx.PrimFunc:
    return func.with_attr("global_symbol", "").without_attr(CODE).without_attr(CONSIDERED)


def _stands_alone(func: tvm.ir.BaseFunc) -> bool:
    """Whether it is a kernel that calls no function of the module."""
    if not isinstance(func, tirx.PrimFunc):
        return False
    found: list[tvm.ir.GlobalVar] = []
    tvm_ffi.structural_walk(func.body, (tvm.ir.GlobalVar, found.append))
    return not found


_UNUSED_ON_CPUS = (
    # Takes half the time of compiling an attention, and finds nothing: what rules make allocates what it needs.
    "s_tir.CompactBufferAllocation",
    # Find nothing in what rules make: they write no condition that does not depend on the loop around it.
    "s_tir.HoistExpression", "s_tir.InsertHoistIfThenElse",
    # Look for what only schedules of GPUs ask for.
    "s_tir.InjectPermutedLayout", "s_tir.InjectSoftwarePipeline", "s_tir.InjectVirtualThread", "s_tir.ThreadSync",
    "s_tir.InferFragment", "s_tir.LowerThreadAllreduce",
)  # fmt: skip


def _with_needed_features(func: tirx.PrimFunc, target: tvm.target.Target) -> tvm.target.Target:
    """The target without matmuls of bytes where the kernel does not ask for them: of what it finds in loops by itself,
    LLVM 22 makes such matmuls of which it adds up a part (combineVPDPBUSDPattern, sums of 8 to 16)."""
    config = dict(target.export())
    if not _VNNI & set(config.get("mattr", ())) or _multiplies_bytes(func):
        return target
    plain = tvm.target.Target({**config, "mattr": [feature for feature in config["mattr"] if feature not in _VNNI]})
    return plain.with_host(plain)


_VNNI = {"+avx512vnni", "+avxvnni"}


def _multiplies_bytes(func: tirx.PrimFunc) -> bool:
    """Whether the kernel has an instruction for matmuls of bytes."""
    numbers = [codegen.llvm_lookup_intrinsic_id(name) for name in (VNNI_512, VNNI_256)]
    found: list[tvm.ir.Call] = []

    def visit(call: tvm.ir.Call) -> None:
        if call.op.same_as(_INTRINSIC) and isinstance(call.args[0], tirx.IntImm) and call.args[0].value in numbers:
            found.append(call)

    tvm_ffi.structural_walk(func.body, (tvm.ir.Call, visit))
    return bool(found)


_INTRINSIC = tvm.ir.Op.get("tirx.call_llvm_pure_intrin")
