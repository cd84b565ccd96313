"""The folder that a GPU host needs: libraries of machine code, the runtime, the measuring sources, and what to do.

No GPU is needed to build it, and no package index to use it.
"""

from __future__ import annotations

import hashlib
import importlib.util
import multiprocessing
import re
import shutil
import subprocess
import sys
from concurrent.futures import Executor, ProcessPoolExecutor
from dataclasses import replace
from importlib import metadata
from pathlib import Path

import tvm

from lowering.compiling.build import build
from lowering.compiling.objects import KernelCompiler
from lowering.machine import CUDART, find_cudart
from lowering.target import resolve

from ..plan import Case, Kernel, Plan
from . import cases, decoders, experts, flashinfer, flexes, kernels, llama, models, weights

TARGET = "cuda:sm_90a"

PROCESSES = 2
"""How many processes build at a time."""

PROGRAMS = (llama.write, decoders.write, weights.write, experts.write, flexes.write, models.write)
"""The functions that write artifacts, slowest first."""

_ROOT = Path(__file__).parents[3]
_RUNTIMES = ("libtvm_runtime.so", "libtvm_runtime_cuda.so")
_WHEELS = ("apache-tvm-ffi", "ml_dtypes", "typing_extensions")
_SOURCES = (
    *(
        f"lowering/{name}.py"
        for name in ("__init__", "errors", "machine", "manifest", "notebook", "records", "version")
    ),
    "lowering/runtime",
    "lowering/serving",
    *("benchmarks/__init__.py", "benchmarks/bars.py"),
    *(f"benchmarks/gpu/{name}.py" for name in ("__init__", "plan", "report", "results")),
    "benchmarks/gpu/host",
)

_START = '''\
"""Checks and times this folder's kernels on the GPU that is here: python measure.py --out DIR; --help says more."""

import os
import sys
from pathlib import Path

FOLDER, PYTHON = Path(__file__).resolve().parent, "@PYTHON@"
HERE = ".".join(map(str, sys.version_info[:2]))
if HERE != PYTHON:
    sys.exit(f"This bundle is for Python {PYTHON}, and this is {HERE}. Run it with python{PYTHON}, or write it for this"
             f" host: python -m benchmarks cuda --bundle FOLDER --python {HERE}")
# torch's own DLPack exchange will do, and compiling another takes a minute.
os.environ.setdefault("TVM_FFI_DISABLE_TORCH_C_DLPACK", "1")
sys.path[:0] = [str(FOLDER / "source"), str(FOLDER / "site")]
sys.path.append(str(FOLDER / "cuda"))  # last: PyTorch's CUDA runtime comes before

if __name__ == "__main__":
    from benchmarks.gpu.host.measure import main

    main(FOLDER, sys.argv[1:])
'''


def write(folder: Path, python: str) -> Plan:
    """Writes the bundle for hosts whose Python is of that version ("3.12").

    Libraries that are there already, made of the same code, stay. Raises TargetError when a compiler is missing.
    """
    (folder / "libraries").mkdir(parents=True, exist_ok=True)
    kernels, chosen = cases.plan()
    context = multiprocessing.get_context("forkserver")
    with ProcessPoolExecutor(PROCESSES, mp_context=context) as pool:
        peer = pool.submit(flashinfer.build_decode, folder / "libraries", TARGET.removeprefix("cuda:"))
        whole = [pool.submit(write_programs, folder, TARGET) for write_programs in PROGRAMS]
        plan = libraries(folder, kernels, chosen, pool)
        programs = {program.name: program for future in whole for program in future.result()}
        decode, why = peer.result()
    missing = {"flashinfer": why} if why else {}
    if not any(program.kind == "decoder" for program in programs.values()):
        missing["decoders"] = f"the bundle was written without one of {', '.join(decoders.NEEDED)}"
    plan = replace(
        plan, programs=programs, sanitized=cases.sanitized(plan.kernels),
        peers={} if why else {"flashinfer": f"libraries/{decode}"}, missing=missing,
    )  # fmt: skip
    copy_sources(folder / "source")
    _copy_runtime(folder, python)
    (folder / "measure.py").write_text(_START.replace("@PYTHON@", python))
    plan.write(folder)
    return plan


def libraries(folder: Path, kernels: dict[str, Kernel], chosen: dict[str, Case], pool: Executor) -> Plan:
    """Build a library for each kernel into `folder`, and remove other files."""
    target = folder / "libraries"
    target.mkdir(parents=True, exist_ok=True)
    started = {name: pool.submit(library, target, kernel) for name, kernel in kernels.items()}
    built = {}
    for number, (name, future) in enumerate(started.items(), 1):
        built[name] = replace(kernels[name], library=f"libraries/{future.result()}")
        print(f"[{number}/{len(kernels)}] {name}", file=sys.stderr, flush=True)
    current = {folder / kernel.library for kernel in built.values()}
    for path in set(target.iterdir()) - current:
        if not path.name.startswith(flashinfer.PREFIX):
            path.unlink()
    digest = hashlib.sha256("".join(sorted(path.name for path in current)).encode()).hexdigest()[:12]
    return Plan(digest, built, chosen)


def library(libraries_folder: Path, kernel: Kernel) -> str:
    """Build the kernel's library into a folder, unless it is there, and return its name."""
    target = resolve(TARGET)[0]
    function = kernels.function(kernel, target)
    digest = hashlib.sha256(f"{target.name} {function.script(show_meta=True)}".encode()).hexdigest()[:12]
    path = libraries_folder / f"{re.sub('[ /]+', '-', kernel.name)}-{digest}.so"
    if not path.exists():
        partial = path.with_suffix(".partial")
        partial.write_bytes(build(tvm.IRModule({"kernel": function}), target, KernelCompiler(target)))
        partial.rename(path)
    return path.name


def copy_sources(target_folder: Path) -> None:
    """Copy the modules of this repository that measure.py imports."""
    shutil.rmtree(target_folder, ignore_errors=True)
    for name in _SOURCES:
        source, target = _ROOT / name, target_folder / name
        target.parent.mkdir(parents=True, exist_ok=True)
        if source.is_dir():
            shutil.copytree(source, target, ignore=shutil.ignore_patterns("__pycache__"))
        else:
            shutil.copy(source, target)


def _copy_runtime(folder: Path, python: str) -> None:
    """Copy TVM's runtime next to measure.py, packages of its Python side to `site`, and CUDA's runtime to `cuda`."""
    package = importlib.util.find_spec("tvm")
    assert package is not None and package.origin is not None
    for name in _RUNTIMES:
        shutil.copy(Path(package.origin).parent / "lib" / name, folder)
    cudart = find_cudart()
    if cudart is not None:
        cuda_libraries = folder / "cuda" / "nvidia" / "cu13" / "lib"
        cuda_libraries.mkdir(parents=True, exist_ok=True)
        shutil.copy(cudart, cuda_libraries / CUDART)
    shutil.rmtree(folder / "site", ignore_errors=True)
    requirements = [f"{name}=={metadata.version(name)}" for name in _WHEELS]
    options = ["--quiet", "--no-deps", "--no-compile", "--only-binary=:all:", "--python-version", python]
    options += [f"--platform=manylinux_2_{n}_x86_64" for n in (28, 27, 24, 17)]
    subprocess.run(
        [sys.executable, "-m", "pip", "install", *options, "--target", folder / "site", *requirements], check=True
    )


def size(folder: Path) -> int:
    """Bytes of all files."""
    return sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())
