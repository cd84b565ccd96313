"""Compare machine code by another ptxas with that of the installed nvcc, which still makes the PTX.

`python -m tests.cuda.audits.second_ptxas [PTXAS]` prints where they differ. Without a path the newest that the package
index has for this nvcc is installed in a temporary folder.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from lowering.target import cubin

WHEEL = "nvidia-cuda-nvcc>=13,<14"
OURS = cubin.machine_code


def installed(folder: Path) -> Path | None:
    """Install the ptxas of the wheel in a folder, and return its path; None without access to the index."""
    command = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--target", str(folder), WHEEL]
    done = subprocess.run(command, capture_output=True, text=True)
    return next(folder.rglob("bin/ptxas"), None) if done.returncode == 0 else None


def version(ptxas: str | Path) -> str:
    said = subprocess.run([ptxas, "--version"], capture_output=True, text=True, check=True).stdout
    match = re.search(r"V([\d.]+)", said)
    assert match, said
    return match[1]


@contextmanager
def used(ptxas: Path) -> Iterator[None]:
    """Assemble kernels by this ptxas in the block."""

    def machine_code(source: str, arch: str) -> tuple[bytes, str]:
        with tempfile.TemporaryDirectory() as folder:
            os.environ["NVCC_APPEND_FLAGS"] = f"--keep --keep-dir {folder}"
            try:
                OURS(source, arch)
            finally:
                del os.environ["NVCC_APPEND_FLAGS"]
            (ptx,) = Path(folder).glob("*.ptx")
            code = Path(folder) / "other.cubin"
            command = [ptxas, "-warn-spills", f"-arch={arch}", "-m64", ptx, "-o", code]
            done = subprocess.run(command, capture_output=True, text=True, check=True)
            return code.read_bytes(), done.stderr

    cubin.machine_code = machine_code
    try:
        yield
    finally:
        cubin.machine_code = OURS


def main() -> None:
    from tests.cuda.audits.machine_code import HEAD_DIMS, MachineCode, machine_code, prefill, problem
    from tests.cuda.matmul.test_matmul_on_gpus import AUDITED, first_variant

    def figures(code: MachineCode) -> dict[str, Any]:
        names = ("HMMA", "HGMMA", "LDSM", "MUFU", "WARPGROUP")
        counts = {name: code.whole[name] for name in names}
        return {
            "registers": code.registers,
            "stack": code.stack,
            "spills": code.spills,
            **counts,
            "instructions": sum(code.whole.values()),
            "said": code.said,
        }

    kernels = {
        f"prefill, {arch}, {dim}{', causal' * causal}": (prefill(problem(dim, causal), arch)[0], arch)
        for arch in ("sm_80", "sm_86", "sm_90a")
        for dim in HEAD_DIMS
        for causal in (False, True)
    }
    for name, case in AUDITED.items():
        arch = name.split(",")[0]
        kernels[f"matmul, {name}"] = (first_variant(case, arch).make(), arch)
    with tempfile.TemporaryDirectory() as folder:
        ptxas = Path(sys.argv[1]) if len(sys.argv) > 1 else installed(Path(folder))
        assert ptxas, "the package index is not reached"
        print(f"ptxas {version('ptxas')} -> {version(ptxas)}")
        for name, (func, arch) in kernels.items():
            old = figures(machine_code(func, arch))
            with used(ptxas):
                new = figures(machine_code(func, arch))
            print(f"{name}:", "; ".join(f"{k} {old[k]} -> {new[k]}" for k in old if old[k] != new[k]) or "the same")


if __name__ == "__main__":
    main()
