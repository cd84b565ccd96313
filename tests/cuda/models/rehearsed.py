"""Write a tiny bundle of all jobs of measure.py: python rehearsed.py FOLDER, where the emulation is a GPU."""

from __future__ import annotations

import sys
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

import numpy as np
import onnx
import tvm
from tvm import tirx
from tvm.script.ir_builder import IRBuilder
from tvm.script.ir_builder import tirx as T

import lowering
from benchmarks.gpu.bundling import bundle, decoders, experts, flexes, llama, weights
from benchmarks.gpu.bundling.matmuls import matmul_of
from benchmarks.gpu.bundling.problems import attention_kernel, attention_problem, cache_bytes, matmul_kernel
from benchmarks.gpu.bundling.reading import Read
from benchmarks.gpu.plan import LIMITS, Case, Kernel, Plan, Program, Sizes
from lowering.compiling.build import build
from lowering.compiling.objects import KernelCompiler
from lowering.demo.decoder import DecoderConfig
from lowering.target import resolve
from lowering.tensorir.scatter import CacheUpdate

TARGET = "cuda:sm_90a"
DECODER = DecoderConfig(1, hidden=128, heads=4, kv_heads=2, head_dim=32, mlp=256, vocabulary=500, positions=16)
EXPORT = {"vocab_size": 64, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 1,
          "num_attention_heads": 2, "num_key_value_heads": 1}  # fmt: skip
EXPERTS = {"experts": 8, "chosen": 2, "width": 64, "inner": 48}
FAULTS = {"hanging": ("sleep", 1000), "dying": ("abort",)}
"""Functions of the C library that such a kernel calls in place of a launch."""


def kernels_and_cases() -> tuple[dict[str, Kernel], dict[str, Case]]:
    """Return a case of each operation, one of them with tiles other than the default and with faulty kernels."""
    p = attention_problem("f16", 64, q_heads=4, kv_heads=2)
    tiles = {"tiles": {"keys": 16, "warps": 2, "stages": 2, "split": 64, "per_sm": 1}}
    decode = attention_kernel("decode", "decode", p, ((1, 1, 77),))
    other = attention_kernel("decode", "k16w2s2p64m1", p, ((1, 1, 77),), variant="decode", tiles=tiles)
    update = CacheUpdate("float16", (None, 2, None, 16), None, 2)
    names = ("cache", "update", "write_indices")
    updating = Kernel(
        "update", "update", "update", update.to_json(), names, "cache", 0.0, (Sizes(2, 3, 7, (-1, 5)),), "update"
    )
    matmul = matmul_kernel("matmul", "mma", matmul_of("float16", 64, 64, transposed=True, epilogue="bias"))
    matmul = replace(matmul, checks=(Sizes(1, 3, 1),))
    read = Read(64)
    reading = Kernel(
        "read", "read", "read", read.to_json(), read.parameters, "found", 0.0,
        (Sizes(1, 1, 5), Sizes(1, 1, 5003)), "read", {"tiles": {"blocks": 4, "ahead": 2}},
    )  # fmt: skip
    kernels = {k.name: k for k in (decode, other, updating, matmul, reading)}
    sizes, faults = Sizes(1, 1, 256), tuple(FAULTS)
    contenders = (decode.name, other.name, "wrong", *faults)
    cases = [
        Case("read", LIMITS, (reading.name,), (), Sizes(1, 1, 4096), 65536.0, "read"),
        Case("decode", "tiles", contenders, ("math", "cudnn", "flashinfer"), sizes, cache_bytes(p, sizes), "read"),
        Case("matmul", "matmul", (matmul.name,), ("cublas",), Sizes(1, 8, 1), 2.0 * 8 * 64 * 64, "FLOP"),
        Case("update", "update", (updating.name,), ("index",), Sizes(2, 2, 16, (3, 9)), 512.0, "copy"),
        Case("last", "prefill", (decode.name,), ("math",), sizes, 1e6, "FLOP"),
    ]
    return kernels, {case.name: case for case in cases}


def faulty(folder: Path, like: Kernel) -> dict[str, Kernel]:
    """Return kernels that never end, or end their process; and one that is checked against another problem."""
    target = resolve(TARGET)[0]
    problem = like.problem.replace("0.125", "0.5")
    kernels = {"wrong": replace(like, name="wrong", contender="wrong", problem=problem)}
    for name, (function, *arguments) in FAULTS.items():
        with IRBuilder() as builder, T.prim_func():
            for parameter in like.parameters:
                sizes = [tirx.Var(f"{parameter}_{axis}", "int64") for axis in range(4)]
                T.arg(parameter, T.Buffer(sizes, "float16"))
            T.evaluate(tirx.call_extern("int32", function, *arguments))
        func = builder.get().with_attr("global_symbol", "kernel")
        library = folder / "libraries" / f"{name}.so"
        library.write_bytes(build(tvm.IRModule({"kernel": func}), target, KernelCompiler(target)))
        kernels[name] = replace(like, name=name, contender=name, library=f"libraries/{name}.so")
    return kernels


def small_model(folder: Path) -> Program:
    """Compile y = Exp(x), and record a call."""
    text = '<ir_version: 10, opset_import: ["" : 20]> m (float16[n] x) => (float16[n] y) { y = Exp (x) }'
    model_folder = folder / "models" / "exp"
    lowering.compile(onnx.parser.parse_model(text), TARGET).save(model_folder / "artifact")
    x = np.linspace(-1, 1, 37).astype(np.float16)
    np.savez(model_folder / "call-0.npz", **{"in.x": x, "out.y": np.exp(x.astype(np.float64))})
    return Program("exp", "model", "models/exp", {"tolerance": 2e-3})


def write(folder: Path) -> Plan:
    kernels, cases = kernels_and_cases()
    with ThreadPoolExecutor(1) as pool:
        plan = bundle.libraries(folder, kernels, cases, pool)
    programs = [
        small_model(folder),
        *llama.write(folder, TARGET, DECODER),
        *weights.write(folder, TARGET, size=128, layers=2, rows=(1, 9), widths=(16, 4)),
        *experts.write(folder, TARGET, sizes={"8 experts": EXPERTS}, tokens=(1, 9)),
        *flexes.write(folder, TARGET, names=("documents",), shape=(1, 2, 200, 64)),
        *decoders.write(folder, TARGET, sizes=EXPORT, names=("static cache, float16", "Batcher, float32")),
    ]
    plan = replace(
        plan,
        kernels={**plan.kernels, **faulty(folder, plan.kernels["decode decode"])},
        programs={program.name: program for program in programs},
        sanitized=("update",),
        missing={"flashinfer": "not part of a tiny bundle"},
    )
    plan.write(folder)
    return plan


if __name__ == "__main__":
    write(Path(sys.argv[1]))
