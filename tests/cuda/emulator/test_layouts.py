"""Descriptors, swizzles and fragments of the kernels for Hopper, as they are emitted, against NVIDIA's CuTe.

The kernels and the emulator may share a wrong assumption. These headers do not.
"""

from __future__ import annotations

import importlib.util
import re
import shutil
import subprocess
from pathlib import Path

import pytest

from tests.cuda.audits.machine_code import emitted, prefill, problem
from tests.cuda.matmul.test_matmul_on_gpus import Case, first_variant

pytestmark = pytest.mark.no_gpu

SOURCE = Path(__file__).with_name("layouts") / "layouts.cpp"
_DESCRIPTOR = re.compile(r"ptx_wgmma_encode_matrix_descriptor\(\(&\(\w+\[0\]\)\), .*?, (\d+), (\d+), (\d+)\);")
_MATMUL = re.compile(r"ptx_wgmma_f16_(ss|rs)_mma_async\w*_m64n(\d+)k16_f32_f16_f16((?:_\d)+)\((.*)\);")


def descriptors(source: str) -> list[tuple[int, int]]:
    """Return leading and stride offsets of each descriptor of the code, in units of 16 bytes."""
    fields = [tuple(map(int, numbers)) for numbers in _DESCRIPTOR.findall(source)]
    assert fields and all(swizzle == 3 for *_, swizzle in fields)  # 128 bytes
    return [(leading, stride) for leading, stride, _ in fields]


def steps(source: str, kind: str, operand: int) -> list[int]:
    """Return how far from the start of its tile each matmul of a kind reads an operand, for one loop of them."""
    offsets = []
    for which, _, _, arguments in _MATMUL.findall(source):
        if which != kind:
            continue
        # After registers come one or two descriptors, and whether the matmul adds.
        argument = _split(arguments)[-3 + operand if kind == "ss" else -2]
        moved = re.search(r"\+ \(uint64_t\)(\d+)ULL\)$", argument)
        offsets.append(int(moved[1]) if moved else 0)
    first = offsets.index(0, 1) if offsets.count(0) > 1 else len(offsets)
    return offsets[:first]


def _split(arguments: str) -> list[str]:
    operands, depth, start = [], 0, 0
    for at, c in enumerate(arguments):
        depth += (c in "([") - (c in ")]")
        if c == "," and depth == 0:
            operands.append(arguments[start:at].strip())
            start = at + 1
    return [*operands, arguments[start:].strip()]


def lines() -> list[str]:
    """Return a call for each tile of attention at three head sizes, and of matmuls with B in either order."""
    calls = []
    for dim in (64, 128, 256):
        func, tiles = prefill(problem(dim, False), "sm_90a")
        source = emitted(func, "sm_90a")
        q, k, v = descriptors(source)
        for name, rows, (leading, stride), at in (
            ("Q", 64, q, steps(source, "ss", 0)),
            ("K", tiles.kv, k, steps(source, "ss", 1)),
        ):
            calls.append(_line("k_major", rows, dim, f"{name} of {dim}", leading, stride, at))
        calls.append(_line("mn_major", tiles.kv, dim, f"V of {dim}", *v, steps(source, "rs", 0)))
    for transposed in (False, True):
        variant = first_variant(Case(n=4096, k=4096, b_transposed=transposed, tiles=None), "sm_90a")
        source = emitted(variant.make(), "sm_90a")
        every = descriptors(source)
        kernels = [variant.tiles[name] for name in ("low", "tiles", "narrow") if name in variant.tiles]
        for tiles, a, b in zip(kernels, every[::2], every[1::2], strict=True):
            calls.append(_line("k_major", tiles.m, tiles.k, "A", *a, steps(source, "ss", 0)))
            sizes = ("k_major", tiles.n, tiles.k) if transposed else ("mn_major", tiles.k, tiles.n)
            calls.append(_line(*sizes, f"B, transposed {transposed}", *b, steps(source, "ss", 1)))
    return calls


def _line(kind: str, rows: int, columns: int, what: str, leading: int, stride: int, at: list[int]) -> str:
    return f'  {kind}<{rows}, {columns}>("{what}", {leading}, {stride}, {{{", ".join(map(str, at))}}});\n'


def differences(folder: Path, text: str) -> str:
    """Return the output of the program about tiles."""
    (folder / "emitted.h").write_text(text)
    package = importlib.util.find_spec("cutlass_library")
    assert package is not None and package.submodule_search_locations, "pip install '.[test]' brings it"
    includes = [Path(package.submodule_search_locations[0]) / "source" / "include", *cuda_headers(), folder]
    command = ["g++", "-std=c++17", "-w", "-O0", *(f"-I{path}" for path in includes), str(SOURCE), "-o", "layouts"]
    subprocess.run(command, check=True, cwd=folder)
    return subprocess.run([folder / "layouts"], capture_output=True, text=True).stdout


def cuda_headers() -> list[Path]:
    """Return the headers of the toolkit, or of its wheels."""
    nvcc = shutil.which("nvcc") or shutil.which("nvcc", path="/usr/local/cuda/bin")
    wheel = importlib.util.find_spec("nvidia.cu13")
    folders = [Path(nvcc).resolve().parents[1]] if nvcc else []
    folders += [Path(path) for path in (wheel.submodule_search_locations or [] if wheel else [])]
    return [path for folder in folders for path in (folder / "include", folder / "include" / "cccl") if path.exists()]


def test_layouts_are_those_of_cute(tmp_path: Path) -> None:
    text = lines()
    assert len(text) == 19 and all("{}" not in line for line in text)
    assert differences(tmp_path, "".join(text)).endswith("0 differences\n")


@pytest.mark.slow
def test_differences_are_noticed(tmp_path: Path) -> None:
    wrong = [re.sub(r"\{0, (\d+)", lambda m: f"{{0, {int(m[1]) + 1}", line) for line in lines()]
    assert not differences(tmp_path, "".join(wrong)).endswith("\n0 differences\n")
