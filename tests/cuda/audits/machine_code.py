"""Machine code that the CUDA compiler made of a kernel: registers, spills, and the instructions of its main loop.

Needs nvcc or the `cuda` extra, and the `test` extra.
"""

from __future__ import annotations

import importlib.util
import re
import shutil
import subprocess
import tempfile
from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import tvm
from tvm import tirx
from tvm.script.ir_builder import IRBuilder
from tvm.script.ir_builder import tirx as T

from lowering.attention.codegen.bound import BoundAttention
from lowering.attention.record.problem import AttentionProblem, Window
from lowering.target import cubin
from schedules.cuda.attention.attention_tiles import MmaTiles, WgmmaTiles, pad_head_dim
from schedules.cuda.attention.decode import decode
from schedules.cuda.attention.decode_tiles import DecodeTiles
from schedules.cuda.attention.prefill_mma import prefill_mma
from schedules.cuda.attention.prefill_wgmma import prefill_wgmma
from schedules.cuda.primitives.device import DEVICES
from tests.cuda.audits.loop_model import Step, steps
from tests.cuda.audits.sass import main_loop, multiplying, read

_SPILLS = ("STL", "LDL")
HEAD_DIMS = (64, 80, 96, 128, 256)


@dataclass(frozen=True)
class MachineCode:
    """The machine code of a kernel and its pre-pass. Opcodes (HMMA, LDSM, ...) are counted in the `whole`, and in the
    main `loop`, on the path of a tile that needs no mask code."""

    registers: int
    stack: int
    spills: int  # instructions that cache or load registers to or from local memory
    spills_in_loops: int  # of them those in innermost loops that multiply, with mask code or without
    loop: Counter[str]
    whole: Counter[str]
    steps: tuple[Step, ...]  # of the loop
    said: str  # by ptxas, but for spills


def emitted(func: tirx.PrimFunc, arch: str) -> str:
    """Return the CUDA C++ of a PrimFunc's kernels."""
    target = tvm.target.Target({"kind": "cuda", "arch": arch}, host="llvm")
    with target:
        module = tvm.compile(tvm.IRModule({"main": func}), target=target, tir_pipeline="tirx").mod
    return module.imports[0].inspect_source()


def disassembled(func: tirx.PrimFunc, arch: str) -> tuple[str, str, str]:
    """Compile a PrimFunc as artifacts do, and return its resource usage, its instructions, and the output of ptxas."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "kernel.cubin"
        code, said = cubin.machine_code(emitted(func, arch), arch)
        path.write_bytes(code)
        return tool("cuobjdump", "-res-usage", path), tool("nvdisasm", "-c", path), said


def global_accesses(func: tirx.PrimFunc, arch: str) -> Counter[tuple[str, int]]:
    """Count loads (LDG) and stores (STG) of device memory in a PrimFunc's kernels, by their bits."""
    counts: Counter[tuple[str, int]] = Counter()
    for function in read(disassembled(func, arch)[1]):
        for i in function.instructions:
            if i.opcode in ("LDG", "STG"):
                bits = [m.strip("US") for m in i.modifiers if m in ("128", "64", "U16", "S16", "16", "U8", "S8", "8")]
                counts[i.opcode, int(bits[0]) if bits else 32] += 1
    return counts


def machine_code(func: tirx.PrimFunc, arch: str) -> MachineCode:
    """Compile the kernels of a PrimFunc. Registers are those of the largest."""
    usage, sass, said = disassembled(func, arch)
    registers, stack = (max(map(int, re.findall(rf"{what}:(\d+)", usage))) for what in ("REG", "STACK"))
    functions = read(sass)
    path = main_loop(functions)
    whole = Counter(i.opcode for function in functions for i in function.instructions)
    said = "\n".join(line for line in said.splitlines() if "spilled" not in line)
    loop = Counter(i.opcode for i in path)
    inside = sum(f.instructions[n].opcode in _SPILLS for f in functions for body in multiplying(f) for n in body)
    return MachineCode(registers, stack, sum(whole[o] for o in _SPILLS), inside, loop, whole, steps(path), said)


def tool(name: str, *arguments: str | Path) -> str:
    """Return the output of a program of the CUDA toolkit, from the toolkit or its wheel."""
    wheel = importlib.util.find_spec("nvidia.cu13")
    folders = [Path(p) / "bin" for p in (wheel.submodule_search_locations or [] if wheel else [])]
    path = shutil.which(name) or next(str(folder / name) for folder in folders if (folder / name).exists())
    return subprocess.run([path, *map(str, arguments)], check=True, capture_output=True, text=True).stdout


# Shipped kernels.


def problem(head_dim: int, causal: bool) -> AttentionProblem:
    """Return a problem with every size symbolic, float16, grouped heads."""
    sizes: dict[str, Any] = {"batch": None, "q_len": None, "kv_len": None, "q_heads": 8, "kv_heads": 2}
    types: dict[str, Any] = {"dtype": "float16", "v_dtype": "float16", "acc_dtype": "float32"}
    window = Window(right=0, offset="past") if causal else None
    dims = {"head_dim": head_dim, "v_head_dim": head_dim, "scale": head_dim**-0.5}
    return AttentionProblem(**sizes, **types, **dims, window=window)


def prefill(p: AttentionProblem, arch: str) -> tuple[tirx.PrimFunc, MmaTiles | WgmmaTiles]:
    """Return the prefill kernel that an architecture gets, and its tiles."""
    gpu = DEVICES[arch]
    with IRBuilder() as builder, T.prim_func():
        T.func_name("attention")
        bound = BoundAttention(p, scope="local")
        tiles: MmaTiles | WgmmaTiles
        if gpu.generation == 90 and p.is_dense:
            tiles = WgmmaTiles.default(p, gpu)
            prefill_wgmma(bound, tiles, gpu)
        else:
            tiles = MmaTiles.default(p, gpu)
            prefill_mma(bound, tiles, gpu)
    return builder.get(), tiles


def decode_alone(p: AttentionProblem, arch: str) -> tirx.PrimFunc:
    """Return the small-M kernel, for any number of rows, with its default tiles."""
    gpu = DEVICES[arch]
    with IRBuilder() as builder, T.prim_func():
        T.func_name("attention")
        decode(BoundAttention(p, scope="local"), DecodeTiles.default(p, gpu), gpu)
    return builder.get()


def matmuls(p: AttentionProblem, tiles: MmaTiles | WgmmaTiles) -> int:
    """Return the matmuls of a warp for a tile of keys, of 16 x 8 x 16, or of 64 x n x 16 by wgmma."""
    if isinstance(tiles, WgmmaTiles):
        panels = 1 if p.v_head_dim % 64 == 0 else -(-p.v_head_dim // 64)  # a matmul of each, where they are not whole
        return pad_head_dim(p.head_dim) // 16 + tiles.kv // 16 * panels
    scores = tiles.kv // 8 * (pad_head_dim(p.head_dim) // 16)
    return tiles.row_blocks * (scores + tiles.kv // 16 * (p.v_head_dim // 8))
