"""Small compiled models for the tests of the runtime, made from Relax by hand."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from importlib.metadata import version
from pathlib import Path
from tempfile import TemporaryDirectory

import numpy as np
import tvm
from tvm import relax, tirx
from tvm.script import tirx as T

import lowering
from lowering.compiling import artifact
from lowering.compiling.bundled_sources import compile_bundled_sources
from lowering.manifest import Manifest, TensorSpec
from lowering.passes.memory.plan_memory import plan_memory
from lowering.passes.memory.release import add_release
from lowering.passes.memory.size_classes import size_classes
from lowering.passes.tvm_workarounds.alignment import assume_alignment
from lowering.target import resolve
from tests.support.pass_states import make_state

ROOT = Path(__file__).parents[2]

# From a Relax function body to outputs: (builder, inputs, weights) -> outputs.
Body = Callable[[relax.BlockBuilder, list, list], Sequence]


def run_python(code: str) -> int:
    """The exit status of a fresh process that runs `code`; tvm_ffi imports torch where it is, which takes seconds."""
    code = "import sys; sys.modules['torch'] = None\n" + code
    return subprocess.run([sys.executable, "-c", code], cwd=ROOT, timeout=120).returncode


def spec(name: str, dtype: str, *dims: int | str, storage: str | None = None) -> TensorSpec:
    return TensorSpec(name, dtype, storage or dtype, dims)


def build_library(module: tvm.IRModule, target: str, views: bool = True) -> bytes:
    """The bytes of model.so, by the passes of lowering/compiling/pipeline.py that a module without attention needs.

    views turns reshapes into views, which needs functions that have a root sblock.
    """
    t = relax.transform
    (resolved,) = resolve(target)
    passes = [t.LegalizeOps(), t.AnnotateTIROpPattern(), t.FoldConstant(), t.FuseOps(), t.FuseTIR()]
    passes += [t.DeadCodeElimination(), *([t.RewriteDataflowReshape()] if views else [])]
    lower = [t.ToNonDataflow(), t.RemovePurityChecking(), t.CallTIRRewrite(), plan_memory]
    lower += [t.LowerAllocTensor(), size_classes, t.KillAfterLastUse(), t.LowerRuntimeBuiltin(), t.ComputePrimValue()]
    lower += [t.VMShapeLower(), t.AttachGlobalSymbol()]
    with resolved.tvm, TemporaryDirectory() as folder:
        for run in passes:
            module = run(module)
        module = add_release(assume_alignment(make_state(module)).module)
        for run in lower:
            module = run(module)
        executable = tvm.compile(module, target=resolved.tvm, relax_pipeline=tvm.transform.Sequential([]))
        executable.export_library(
            f"{folder}/model.so", cc=resolved.linker, options=compile_bundled_sources(resolved.linker, folder)
        )
        return Path(folder, "model.so").read_bytes()


def build(
    folder: Path,
    inputs: Sequence[TensorSpec],
    outputs: Sequence[TensorSpec],
    body: Body,
    weights: Mapping[str, np.ndarray] | None = None,
    donated: Mapping[str, str] | None = None,
    target: str = "cpu",
    views: bool = True,
    **fields: object,
) -> Path:
    """Writes an artifact whose main computes `body`; further fields are the manifest's."""
    sizes = {d: tirx.Var(d, "int64") for t in inputs for d in t.dims if isinstance(d, str)}
    params = [
        relax.Var(f"input_{k}", relax.TensorType([sizes.get(d, d) for d in _storage_dims(t)], t.storage))
        for k, t in enumerate(inputs)
    ]
    weights = dict(weights or {})
    types = [relax.TensorType(w.shape, w.dtype.name) for w in weights.values()]
    bundle = [relax.Var("weights", relax.TupleType(types))] if weights else []
    builder = relax.BlockBuilder()
    with builder.function("main", params + bundle):
        with builder.dataflow():
            unpacked = [builder.emit(relax.TupleGetItem(bundle[0], k)) for k in range(len(weights))]
            result = builder.emit_output(relax.Tuple(list(body(builder, params, unpacked))))
        builder.emit_func_output(result)
    manifest = Manifest(
        inputs=tuple(inputs),
        outputs=tuple(outputs),
        donated=dict(donated or {}),
        weights=(),
        target=target,
        cpu_features=resolve(target)[0].cpu_features,
        versions={name: version(name) for name in ("apache-tvm", "apache-tvm-ffi")},
        **fields,  # type: ignore[arg-type]
    )
    library = build_library(builder.finalize(), target, views)
    artifact.write_artifact(folder, [artifact.ArtifactPart(manifest, (library,), dict(weights))])
    return folder


def _storage_dims(tensor: TensorSpec) -> tuple[int | str, ...]:
    return (*tensor.dims, 2) if tensor.dtype == "complex128" else tensor.dims


def dense(folder: Path, **fields: object) -> Path:
    """Build y[n, 32] = relu(x[n, 64] w + b), and its row totals s[n]."""
    rng = np.random.default_rng(0)
    w, b = rng.standard_normal((64, 32)).astype("f"), rng.standard_normal(32).astype("f")

    def body(builder: relax.BlockBuilder, inputs: list, weights: list) -> list:
        y = builder.emit(relax.op.nn.relu(relax.op.add(relax.op.matmul(inputs[0], weights[0]), weights[1])))
        return [y, builder.emit(relax.op.sum(y, axis=1))]

    outputs = [spec("y", "float32", "n", 32), spec("s", "float32", "n")]
    return build(folder, [spec("x", "float32", "n", 64)], outputs, body, {"w": w, "b": b}, **fields)


def shared(folder: Path) -> Path:
    """Build, for x[4]: x itself, the weight w = [0, 1, 2, 3], -x twice, and the constant [9, 9, 9, 9]."""

    def body(builder: relax.BlockBuilder, inputs: list, weights: list) -> list:
        y = builder.emit(relax.op.negative(inputs[0]))
        return [inputs[0], weights[0], y, y, relax.const(np.full(4, 9, "f"))]

    outputs = [spec(name, "float32", 4) for name in ("same", "w", "y", "again", "constant")]
    return build(folder, [spec("x", "float32", 4)], outputs, body, {"w": np.arange(4, dtype="f")})


def addition(folder: Path, dtype: str = "float32", shape: Sequence[int | str] = ("n", "m"), **fields: object) -> Path:
    """Build z = x + y, elementwise, through vectorized code."""
    inputs = [spec(name, dtype, *shape) for name in "xy"]
    return build(folder, inputs, [spec("z", dtype, *shape)], lambda b, i, w: [b.emit(relax.op.add(*i))], **fields)


def inside(folder: Path) -> Path:
    """Build z = x + y of sizes that must be equal, which only the code can check."""

    def body(builder: relax.BlockBuilder, inputs: list, weights: list) -> list:
        x, y = inputs
        return [builder.emit(relax.op.add(x, builder.match_cast(y, x.ty)))]

    return build(folder, [spec(n, "float32", n) for n in "xy"], [spec("z", "float32", "x")], body)


def move(folder: Path, dtype: str, storage: str, **fields: object) -> Path:
    """Build y[n, 3] = x[:, ::-1]: move elements of any type, with their bits as they are."""
    width = 2 if dtype == "complex128" else 1

    @T.prim_func(s_tir=True)
    def reverse(a: T.handle, b: T.handle) -> None:
        T.func_attr({"op_pattern": 8, "tirx.noalias": True})
        n = T.int64()
        x = T.match_buffer(a, (n, 3, width), storage)
        y = T.match_buffer(b, (n, 3, width), storage)
        for i, j, k in T.grid(n, 3, width):
            with T.sblock("reverse"):
                vi, vj, vk = T.axis.remap("SSS", [i, j, k])
                y[vi, vj, vk] = x[vi, 2 - vj, vk]

    def body(builder: relax.BlockBuilder, inputs: list, weights: list) -> list:
        n = inputs[0].ty.shape[0]
        flat = builder.emit(relax.op.reshape(inputs[0], (n, 3, width)))
        kind = relax.TensorType((n, 3, width), storage)
        y = builder.emit(relax.op.call_tir(builder.add_func(reverse, "reverse"), [flat], out_ty=kind))
        return [builder.emit(relax.op.reshape(y, inputs[0].ty.shape))]

    x, y = (spec(name, dtype, "n", 3, storage=storage) for name in "xy")
    return build(folder, [x], [y], body, **fields)


def cache(folder: Path, **fields: object) -> Path:
    """present = past, written in place: row index[b] of batch row b becomes new[b]; also their sum over all rows.

    past float32[b, c, 4] is donated to present; new float32[b, 4]; index int64[b]; total float32[b, 4].
    """

    @T.prim_func(s_tir=True)
    def scatter(a: T.handle, b: T.handle, c: T.handle) -> None:
        T.func_attr({"op_pattern": 8})
        n, capacity = T.int64(), T.int64()
        past = T.match_buffer(a, (n, capacity, 4), "float32")
        new = T.match_buffer(b, (n, 4), "float32")
        index = T.match_buffer(c, (n,), "int64")
        for i, j in T.grid(n, 4):
            with T.sblock("scatter"):
                vi, vj = T.axis.remap("SS", [i, j])
                past[vi, index[vi], vj] = new[vi, vj]

    def body(builder: relax.BlockBuilder, inputs: list, weights: list) -> list:
        past, new, index = inputs
        function = builder.add_func(scatter, "scatter")
        call = relax.op.call_tir_inplace(function, [past, new, index], [0], out_ty=past.ty)
        present = builder.emit(call)
        return [present, builder.emit(relax.op.sum(present, axis=1))]

    inputs = [spec("past", "float32", "b", "c", 4), spec("new", "float32", "b", 4), spec("index", "int64", "b")]
    outputs = [spec("present", "float32", "b", "c", 4), spec("total", "float32", "b", 4)]
    return build(folder, inputs, outputs, body, donated={"past": "present"}, **fields)


def threads(folder: Path, planned: bool = False, **fields: object) -> Path:
    """For x int32[n]: who[k], the id of the thread that computed element k in x[k] microseconds, and where[k], its CPU.

    If the loop is planned, threads take over shares of others.
    """

    @T.prim_func(s_tir=True)
    def observe(a: T.handle, b: T.handle, c: T.handle) -> None:
        T.func_attr({"op_pattern": 8})
        n = T.int64()
        x = T.match_buffer(a, (n,), "int32")
        who = T.match_buffer(b, (n,), "int32")
        where = T.match_buffer(c, (n,), "int32")
        T.evaluate(T.call_extern("int32", "lowering_plan_launch", n * T.int64(planned)))
        for i in T.parallel(n):
            with T.sblock("observe"):
                vi = T.axis.spatial(n, i)
                T.reads(x[vi])
                T.writes(who[vi], where[vi])
                T.evaluate(T.call_extern("int32", "usleep", x[vi]))
                who[vi] = T.call_extern("int32", "gettid")
                where[vi] = T.call_extern("int32", "sched_getcpu")

    def body(builder: relax.BlockBuilder, inputs: list, weights: list) -> list:
        kind = relax.TensorType(inputs[0].ty.shape, "int32")
        function = builder.add_func(observe, "observe")
        return list(builder.emit(relax.op.call_tir(function, inputs, out_ty=[kind, kind])))

    return build(folder, [spec("x", "int32", "n")], [spec(k, "int32", "n") for k in ("who", "where")], body, **fields)


def addresses(folder: Path, dtype: str = "float32", storage: str = "float32", **fields: object) -> Path:
    """at[0], the address of the memory in which the compiled code sees x[n, m]."""

    @T.prim_func(s_tir=True)
    def address(a: T.handle, b: T.handle) -> None:
        T.func_attr({"op_pattern": 8})
        n, m = T.int64(), T.int64()
        x = T.match_buffer(a, (n, m), storage)
        at = T.match_buffer(b, (1,), "int64")
        with T.sblock("address"):
            T.reads(x[0:n, 0:m])
            T.writes(at[0])
            # An address is positive, so that labs returns it as it is.
            at[0] = T.call_extern("int64", "labs", x.data)

    def body(builder: relax.BlockBuilder, inputs: list, weights: list) -> list:
        function = builder.add_func(address, "address")
        return [builder.emit(relax.op.call_tir(function, inputs, out_ty=relax.TensorType((1,), "int64")))]

    return build(folder, [spec("x", dtype, "n", "m", storage=storage)], [spec("at", "int64", 1)], body, **fields)


def translator(folder: Path) -> Path:
    """The decoder of a T5, compiled with static caches: it has a setup."""
    lowering.compile(ROOT / "tests" / "exports" / "decoders" / "t5.onnx", static_cache=48).save(folder)
    return folder


def add_in_place(size: int) -> tirx.PrimFunc:
    """a[size] += b[size]"""

    @T.prim_func(s_tir=True)
    def add(a: T.handle, b: T.handle) -> None:
        T.func_attr({"op_pattern": 8})
        x = T.match_buffer(a, (size,), "float32")
        y = T.match_buffer(b, (size,), "float32")
        for i in range(size):
            with T.sblock("add"):
                vi = T.axis.spatial(size, i)
                x[vi] = x[vi] + y[vi]

    return add
