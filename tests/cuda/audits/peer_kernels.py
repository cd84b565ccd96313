"""Compile FlashAttention-3 and CUTLASS kernels here, and record their main loops for loop_model.py.

`python -m tests.cuda.audits.peer_kernels CHECKOUT` writes peers/loops.json. It takes a checkout of FlashAttention with
its folder hopper/; CUTLASS, which both need, comes with the `test` extra. A kernel takes nvcc about a minute.
"""

from __future__ import annotations

import dataclasses
import importlib.metadata
import importlib.util
import json
import re
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path

from lowering.target.cubin import find_nvcc
from tests.cuda.audits.loop_kernels import RECORD, attention_name
from tests.cuda.audits.loop_model import Kernel, steps
from tests.cuda.audits.machine_code import tool
from tests.cuda.audits.sass import Instruction, main_loop, read

_FLAGS = ("-std=c++17", "-O3", "-DNDEBUG", "--expt-relaxed-constexpr", "--expt-extended-lambda", "-w")
_FLASH_ATTENTION = (  # as its setup.py has them
    "--use_fast_math",
    *("-DCUTE_SM90_EXTENDED_MMA_SHAPES_ENABLED", "-DCUTLASS_ENABLE_GDC_FOR_SM90", "-DCUTLASS_DEBUG_TRACE_LEVEL=0"),
)

# Head size, causal, type, tiles (tile_size_fwd_sm90 in tile_size.h), and the number of blocks that share K and V.
_ATTENTION = (
    (64, False, "half_t", (192, 192), 1),
    (64, True, "half_t", (192, 128), 1),
    (128, False, "half_t", (128, 176), 2),
    (128, False, "bfloat16_t", (128, 176), 2),
    (128, True, "half_t", (128, 128), 1),
    (256, False, "half_t", (128, 80), 2),
    (256, True, "half_t", (128, 80), 1),
)

# Tiles, owner, and warpgroups that share one: 2, or 1 with ping-pong.
_MATMULS = ((128, 256, "Cooperative"), (64, 256, "Pingpong"), (128, 128, "Pingpong"))


def flash_attention(checkout: Path) -> Iterator[Kernel]:
    """Yield the forward kernels of FlashAttention-3, at its own tiles."""
    for dim, causal, dtype, (q, kv), cluster in _ATTENTION:
        defined = (f"-DDIM={dim}", f"-DCLUSTER={cluster}", f"-DCAUSAL={str(causal).lower()}", f"-DTYPE={dtype}")
        brought = 4 * kv * dim
        yield Kernel(
            name=attention_name(dim, causal, {"half_t": "float16"}.get(dtype, "bfloat16")),
            arch="sm_90a",
            tiles=f"{q} x {kv}" + (f", clusters of {cluster}" if cluster > 1 else ""),
            steps=steps(
                _loop("flash_attention.cu", "sm_90a", (*_FLASH_ATTENTION, *defined, f"-I{checkout / 'hopper'}"))
            ),
            warps=q // 16,
            work=4 * q * kv * dim,
            brought=brought,
            read=brought // cluster,
        )


def cutlass() -> Iterator[Kernel]:
    """Yield matmuls of matrices: by mma.sync, and on Hopper in clusters of two blocks that share B."""
    yield by_warps()
    for m, n, schedule in _MATMULS:
        defined = (f"-DTILE_M={m}", f"-DTILE_N={n}", "-DCLUSTER=2", f"-DSCHEDULE={schedule}")
        yield Kernel(
            name=f"matmul, {schedule.lower()}",
            arch="sm_90a",
            tiles=f"{m} x {n} x 64, clusters of 2",
            steps=steps(_loop("cutlass_sm90.cu", "sm_90a", defined)),
            warps=8,
            work=2 * m * n * 64,
            brought=2 * (m + n) * 64,
            read=2 * (m + n // 2) * 64,
        )


def by_warps() -> Kernel:
    """Return CUTLASS's matmul by mma.sync. 230 registers leave room for two blocks of four warps."""
    brought = 2 * (128 + 128) * 32
    loop = steps(_loop("cutlass_sm80.cu", "sm_80", ()))
    return Kernel("matmul", "sm_80", "128 x 128 x 32", loop, 8, 2 * 128 * 128 * 32, brought, brought)


def _loop(source: str, arch: str, flags: Sequence[str]) -> list[Instruction]:
    nvcc = find_nvcc()
    assert nvcc is not None, "nvcc is not installed"
    package = importlib.util.find_spec("cutlass_library")
    assert package is not None and package.submodule_search_locations, "pip install '.[test]' brings it"
    headers = Path(package.submodule_search_locations[0]) / "source" / "include"
    with tempfile.TemporaryDirectory() as folder:
        cubin = Path(folder) / "kernel.cubin"
        command = [
            nvcc,
            "-cubin",
            f"-arch={arch}",
            *_FLAGS,
            *flags,
            f"-I{headers}",
            str(RECORD.parent / source),
            "-o",
            str(cubin),
        ]
        subprocess.run(command, check=True)
        return main_loop(read(tool("nvdisasm", "-c", cubin)))


def compiler() -> str:
    """Return the version of nvcc."""
    said = subprocess.run([find_nvcc() or "nvcc", "--version"], check=True, capture_output=True, text=True).stdout
    return re.findall(r"V([\d.]+)", said)[0]


def main(checkout: Path) -> None:
    commit = subprocess.run(["git", "-C", checkout, "rev-parse", "HEAD"], check=True, capture_output=True, text=True)
    version_of = {
        "nvcc": compiler(),
        "cutlass": importlib.metadata.version("nvidia-cutlass"),
        "flash_attention": commit.stdout.strip(),
    }
    kernels = {"FlashAttention-3": list(flash_attention(checkout)), "CUTLASS": list(cutlass())}
    lines = []
    for owner, loops in kernels.items():
        rows = [json.dumps({**vars(k), "steps": [dataclasses.astuple(step) for step in k.steps]}) for k in loops]
        lines.append(f"  {json.dumps(owner)}: [\n    " + ",\n    ".join(rows) + "\n  ]")
    versions = "".join(f"{json.dumps(name)}: {json.dumps(value)}, " for name, value in version_of.items())
    RECORD.write_text("{" + versions + '"kernels": {\n' + ",\n".join(lines) + "\n}}\n")


if __name__ == "__main__":
    main(Path(sys.argv[1]).resolve())
