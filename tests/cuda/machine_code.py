"""What the CUDA compiler made of a kernel: registers, spills, and the instructions of its inner loops.

`python tests/cuda/machine_code.py` writes docs/cuda_kernels.md (needs nvcc or the `cuda` extra, and the `test` extra).
"""

from __future__ import annotations

import importlib.util
import re
import shutil
import subprocess
import sys
import tempfile
from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import tvm
from tvm import tirx
from tvm.script.ir_builder import IRBuilder
from tvm.script.ir_builder import tirx as T

from lowering.attention.bound import Bound
from lowering.attention.problem import AttentionProblem, Window
from lowering.target import cubin
from schedules.cuda.attention_tiles import MmaTiles, WgmmaTiles, padded
from schedules.cuda.device import DEVICES
from schedules.cuda.prefill_mma import prefill_mma
from schedules.cuda.prefill_wgmma import prefill_wgmma

PAGE = Path(__file__).parents[2] / "docs" / "cuda_kernels.md"
HEAD_DIMS = (64, 80, 96, 128, 256)


@dataclass(frozen=True)
class MachineCode:
    """Of a kernel and its survey. Opcodes (HMMA, LDSM, ...) are counted in the `whole`, and in the `loop`: the
    innermost loops that multiply matrices."""

    registers: int
    stack: int
    spills: int  # instructions that store or load registers to or from local memory
    loop: Counter[str]
    whole: Counter[str]
    beside: int  # exponentials between the wait for S and that for O: what runs beside the products of P V
    said: str  # by ptxas, but for spills


def emitted(func: tirx.PrimFunc, arch: str) -> str:
    """The CUDA C++ of a PrimFunc's kernels."""
    target = tvm.target.Target({"kind": "cuda", "arch": arch}, host="llvm")
    with target:
        module = tvm.compile(tvm.IRModule({"main": func}), target=target, tir_pipeline="tirx").mod
    return module.imports[0].inspect_source()


def disassembled(func: tirx.PrimFunc, arch: str) -> tuple[str, str, str]:
    """The kernels of a PrimFunc, compiled as artifacts are: what they use, their instructions, and what ptxas said."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "kernel.cubin"
        code, said = cubin.machine_code(emitted(func, arch), arch)
        path.write_bytes(code)
        return _tool("cuobjdump", "-res-usage", path), _tool("nvdisasm", "-c", path), said


def global_accesses(func: tirx.PrimFunc, arch: str) -> Counter[tuple[str, int]]:
    """Loads (LDG) and stores (STG) of the device's memory in a PrimFunc's kernels, by their bits."""
    _, sass, _ = disassembled(func, arch)
    found: Counter[tuple[str, int]] = Counter()
    for kind, modifiers in re.findall(r"\b(LDG|STG)((?:\.\w+)*)", sass):
        bits = re.search(r"\.(128|64|U?S?16|U?S?8)\b", modifiers)
        found[kind, int(bits[1].strip("US")) if bits else 32] += 1
    return found


def machine_code(func: tirx.PrimFunc, arch: str) -> MachineCode:
    """The kernels of a PrimFunc. Registers are those of the largest."""
    usage, sass, said = disassembled(func, arch)
    registers, stack = (max(map(int, re.findall(rf"{what}:(\d+)", usage))) for what in ("REG", "STACK"))
    opcodes = [(number, found[1]) for number, line in enumerate(sass.splitlines()) if (found := _OPCODE.search(line))]
    spills = sum(opcode in ("STL", "LDL") for _, opcode in opcodes)
    loop, whole = _inner_loops(sass, opcodes), Counter(opcode for _, opcode in opcodes)
    said = "\n".join(line for line in said.splitlines() if "spilled" not in line)
    return MachineCode(registers, stack, spills, loop, whole, _beside(sass), said)


_OPCODE = re.compile(r"/\*[0-9a-f]{4,}\*/\s+(?:@!?U?P\d+\s+)?([A-Z][A-Z0-9_]*)")


def _inner_loops(sass: str, opcodes: list[tuple[int, str]]) -> Counter[str]:
    """What lies between a label and a jump back to it, with matrix products in it and no smaller loop of that kind."""
    labels: dict[str, int] = {}
    loops: list[tuple[int, int]] = []
    for number, line in enumerate(sass.splitlines()):
        if label := re.match(r"(\.L_x_\d+):", line):
            labels[label[1]] = number
        if (jump := re.search(r"BRA.*`\((\.L_x_\d+)\)", line)) and jump[1] in labels:
            loops.append((labels[jump[1]], number))
    products = [number for number, opcode in opcodes if opcode in ("HMMA", "HGMMA")]
    loops = [(a, b) for a, b in loops if any(a < n < b for n in products)]
    inner = [(a, b) for a, b in loops if not any((c, d) != (a, b) and a <= c and d <= b for c, d in loops)]
    return Counter(opcode for a, b in inner for number, opcode in opcodes if a < number < b)


def _beside(sass: str) -> int:
    """The fewest exponentials between a wait for all but one group of products and the wait for that one."""
    counts, open_since = [], None
    for line in sass.splitlines():
        if wait := re.search(r"WARPGROUP\.DEPBAR\.LE gsb0, 0x(\d)", line):
            if open_since is not None:
                counts.append(open_since)
            open_since = 0 if wait[1] == "1" else None
        elif open_since is not None and "MUFU.EX2" in line:
            open_since += 1
    return min(counts, default=0)


def _tool(name: str, *arguments: str | Path) -> str:
    """The output of a program of the CUDA toolkit, from the toolkit or its wheel."""
    wheel = importlib.util.find_spec("nvidia.cu13")
    folders = [Path(p) / "bin" for p in (wheel.submodule_search_locations or [] if wheel else [])]
    path = shutil.which(name) or next(str(folder / name) for folder in folders if (folder / name).exists())
    return subprocess.run([path, *map(str, arguments)], check=True, capture_output=True, text=True).stdout


# Shipped kernels.


def problem(head_dim: int, causal: bool) -> AttentionProblem:
    """Every size symbolic, float16, grouped heads."""
    sizes: dict[str, Any] = {"batch": None, "q_len": None, "kv_len": None, "q_heads": 8, "kv_heads": 2}
    types: dict[str, Any] = {"dtype": "float16", "v_dtype": "float16", "acc_dtype": "float32"}
    window = Window(right=0, offset="past") if causal else None
    dims = {"head_dim": head_dim, "v_head_dim": head_dim, "scale": head_dim**-0.5}
    return AttentionProblem(**sizes, **types, **dims, window=window)


def prefill(p: AttentionProblem, arch: str) -> tuple[tirx.PrimFunc, MmaTiles | WgmmaTiles]:
    """The prefill kernel that an architecture gets, and its tiles."""
    gpu = DEVICES[arch]
    with IRBuilder() as builder, T.prim_func():
        T.func_name("attention")
        bound = Bound(p, scope="local")
        tiles: MmaTiles | WgmmaTiles
        if gpu.generation == 90:
            tiles = WgmmaTiles.default(p, gpu)
            prefill_wgmma(bound, tiles, gpu)
        else:
            tiles = MmaTiles.default(p, gpu)
            prefill_mma(bound, tiles)
    return builder.get(), tiles


def products(p: AttentionProblem, tiles: MmaTiles | WgmmaTiles) -> int:
    """Products that a warp needs for a tile of keys, of 16 x 8 x 16, or of 64 x n x 16 by wgmma."""
    if isinstance(tiles, WgmmaTiles):
        panels = 1 if p.v_head_dim % 64 == 0 else -(-p.v_head_dim // 64)  # a product of each, where they are not whole
        return padded(p.head_dim) // 16 + tiles.kv // 16 * panels
    scores = tiles.kv // 8 * (padded(p.head_dim) // 16)
    return tiles.row_blocks * (scores + tiles.kv // 16 * (p.v_head_dim // 8))


HEADER = """# CUDA kernels

Generated by `python tests/cuda/machine_code.py`; do not edit.

## Formulas and block masks

A mask that is a formula (mask_mod of flex_attention, a block mask, masks that a model computes) is surveyed by a
launch before the prefill (`schedules/cuda/survey.py`), for each tile of query rows, and for each head where heads
differ: a lane bounds the formula over a tile of keys by interval analysis, and the warp lists the tiles that are
left, in the device's memory: those that need mask code, then those that are shown in full. Both prefill kernels run
along that list, so that tiles in a hole between two documents, or in a block that is hidden, are neither read nor
multiplied. A list takes four bytes for each tile of keys, shown or not: 4 MB for 65536 rows and keys, in tiles of 128
x 32, and as much again for each head and batch that has a mask of its own. Bounds are as good as the interval
analysis: a tile that it cannot exclude is computed, under the mask. A block mask is a table of one byte for each
block, which bounds are read from; in the tiles that are left each pair looks its block up, and asks mask_mod where
that is partial. Decoding needs no launch for that: each warp bounds the next 32 of its tiles, one by a lane, and
leaves out those that no row of its block sees. Kernels for the types that tensor cores do not take (float32, float64)
have a warp for a row, which reads all keys and evaluates the mask for each.

score_mod is evaluated for each pair of each tile that is left, in float32, on the registers that the product leaves.
What it says more than once is computed once. Functions are CUDA's accurate ones (`tanhf`, not `tanh.approx`).
Captured arrays are read from global memory where they are used. `tests/cuda/test_machine_code.py` looks at masks,
windows, sinks, caps and formulas at every head size: with default tiles no register is put into memory, but for 8 bytes
of formulas at head sizes of 64 and 96 on sm_90a.

`tests/cuda/test_skipped_tiles.py` counts the products of whole calls under emulation: exactly those of the tiles in
which something is visible, for causal masks, windows, documents, masks by head and blocks. `tests/cuda/test_flex.py`
compares results with float64.

## Machine code

What nvcc makes of the prefill kernels with their default tiles, float16, every size symbolic: registers of a thread,
bytes of stack, instructions that spill registers, and those of the loop over tiles of keys. HMMA and HGMMA multiply
matrices, LDSM reads their operands from shared memory, LDGSTS (cp.async) and UTMALDG (TMA) bring tiles there, MUFU
evaluates exponentials. On sm_90a the instructions of the whole kernel are counted, as a warpgroup of its own brings
the tiles; waits (WARPGROUP) are for products, of which several are on their way at a time, and *beside* are the
exponentials between the wait for S and that for O, which run beside the products of P V.

| target | head_dim | mask | tiles | registers | stack | spilt | *MMA | LDSM | LDGSTS, UTMALDG | MUFU | waits | beside |
|---|---|---|---|---|---|---|---|---|---|---|---|---|
"""


def page() -> str:
    """The whole page."""
    sys.path.append(str(Path(__file__).parents[1]))  # what the tests of products import
    from test_matmul_on_gpus import AUDITED

    lines = []
    for arch in ("sm_80", "sm_86", "sm_90a"):
        for dim in HEAD_DIMS:
            for causal in (False, True):
                func, tiles = prefill(problem(dim, causal), arch)
                code = machine_code(func, arch)
                n = code.whole if arch == "sm_90a" else code.loop
                counts = [
                    n["HMMA"] + n["HGMMA"],
                    n["LDSM"],
                    n["LDGSTS"] + n["UTMALDG"],
                    n["MUFU"],
                    n["WARPGROUP"],
                    code.beside,
                ]
                columns = [arch, dim, "causal" if causal else "-", f"{tiles.q} x {tiles.kv}"]
                columns += [code.registers, code.stack, code.spills, *counts]
                lines.append(f"| {' | '.join(map(str, columns))} |")
    return (
        HEADER + "\n".join(lines) + "\n" + PRODUCTS + "".join(product_row(name, case) for name, case in AUDITED.items())
    )


PRODUCTS = """
## Products of matrices

The kernels for C [M, N] = A [M, K] B with their default tiles, M symbolic unless said. *gate* is the product of two
results of one A, one of them under an activation; a residual is added before C is stored. Of a loop along k are
counted (in the whole kernel on sm_90a) products, reads of operands and copies, and all instructions of it: on sm_80 a
product of 16 x 8 x 16 takes 8 cycles of a tensor core, so that a loop whose instructions are fewer than 8 times its
products is bound by these.

| target | M, N, K | B | epilogue | tiles | registers | spills | *MMA | LDSM | LDGSTS / UTMALDG | instructions |
|---|---|---|---|---|---|---|---|---|---|---|
"""


def product_row(name: str, case: Any) -> str:
    from test_matmul_on_gpus import first_variant

    arch = name.split(",")[0]
    variant = first_variant(case, arch)
    tiles, code = variant.tiles["tiles"], machine_code(variant.make(), arch)
    n = code.whole if arch == "sm_90a" else code.loop
    counts = [n["HMMA"] + n["HGMMA"], n["LDSM"], n["LDGSTS"] + n["UTMALDG"], sum(n.values())]
    sizes, order = f"{case.m}, {case.n}, {case.k}", "[N, K]" if case.b_transposed else "[K, N]"
    shown = f"{tiles.m} x {tiles.n} x {tiles.k}, {tiles.stages} stages"
    columns = [arch, sizes, order, case.epilogue, shown, code.registers, code.spills, *counts]
    return f"| {' | '.join(map(str, columns))} |\n"


if __name__ == "__main__":
    PAGE.write_text(page())
    sys.exit()
