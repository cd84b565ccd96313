"""The folder that a GPU host needs: libraries of machine code, the runtime, the measuring sources, and what to do.

No GPU is needed to build it, and no package index to use it.
"""

from __future__ import annotations

import hashlib
import importlib.util
import shutil
import subprocess
import sys
from dataclasses import replace
from importlib import metadata
from pathlib import Path

import tvm

from lowering.compiling.build import build
from lowering.compiling.objects import Kernels
from lowering.machine import CUDART, find_cudart
from lowering.target import Target, resolve

from . import kernels, llama, models
from .cases import plan as all_parts
from ..plan import Case, Kernel, Plan

TARGET = "cuda:sm_90a"

_ROOT = Path(__file__).parents[3]
_RUNTIMES = ("libtvm_runtime.so", "libtvm_runtime_cuda.so")
_WHEELS = ("apache-tvm-ffi", "ml_dtypes", "typing_extensions")
_SOURCES = (
    *(
        f"lowering/{name}.py"
        for name in ("__init__", "errors", "machine", "manifest", "notebook", "records", "version")
    ),
    "lowering/runtime",
    *("benchmarks/__init__.py", "benchmarks/bars.py"),
    *(f"benchmarks/gpu/{name}.py" for name in ("__init__", "plan", "report", "results")),
    "benchmarks/gpu/host",
)

_START = '''\
"""Checks and times this folder's kernels on the GPU that is here: python measure.py --out DIR; --help says more."""

import os
import sys
from pathlib import Path

FOLDER = Path(__file__).resolve().parent
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
    folder.mkdir(parents=True, exist_ok=True)
    made, cases = all_parts()
    plan = libraries(folder, made, cases, resolve(TARGET)[0])
    plan = replace(plan, models=models.write(folder, TARGET), steps=llama.write(folder / "steps", TARGET))
    copy_sources(folder / "source")
    _copy_runtime(folder, python)
    (folder / "measure.py").write_text(_START)
    plan.write(folder)
    return plan


def libraries(folder: Path, made: dict[str, Kernel], cases: dict[str, Case], target: Target) -> Plan:
    """Builds a library for each kernel into `folder`."""
    place = folder / "libraries"
    place.mkdir(exist_ok=True)
    found = {}
    for number, (name, kernel) in enumerate(made.items(), 1):
        function = kernels.function(kernel, target)
        digest = hashlib.sha256(f"{target.name} {function.script(show_meta=True)}".encode()).hexdigest()[:12]
        library = place / f"{kernel.name.replace(' ', '-').replace('/', '-')}-{digest}.so"
        if not library.exists():
            print(f"[{number}/{len(made)}] {kernel.name}", file=sys.stderr, flush=True)
            partial = library.with_suffix(".partial")
            partial.write_bytes(build(tvm.IRModule({"kernel": function}), target, Kernels(target)))
            partial.rename(library)
        found[name] = replace(kernel, library=str(library.relative_to(folder)))
    kept = {folder / kernel.library for kernel in found.values()}
    for path in set(place.iterdir()) - kept:
        path.unlink()
    digest = hashlib.sha256("".join(sorted(path.name for path in kept)).encode()).hexdigest()[:12]
    return Plan(digest, found, cases)


def copy_sources(place: Path) -> None:
    """What measure.py imports of this repository."""
    shutil.rmtree(place, ignore_errors=True)
    for name in _SOURCES:
        source, target = _ROOT / name, place / name
        target.parent.mkdir(parents=True, exist_ok=True)
        if source.is_dir():
            shutil.copytree(source, target, ignore=shutil.ignore_patterns("__pycache__"))
        else:
            shutil.copy(source, target)


def _copy_runtime(folder: Path, python: str) -> None:
    """TVM's runtime beside measure.py, what its Python side needs in `site`, and CUDA's runtime in `cuda`."""
    package = importlib.util.find_spec("tvm")
    assert package is not None and package.origin is not None
    for name in _RUNTIMES:
        shutil.copy(Path(package.origin).parent / "lib" / name, folder)
    cudart = find_cudart()
    if cudart is not None:
        place = folder / "cuda" / "nvidia" / "cu13" / "lib"
        place.mkdir(parents=True, exist_ok=True)
        shutil.copy(cudart, place / CUDART)
    shutil.rmtree(folder / "site", ignore_errors=True)
    wanted = [f"{name}=={metadata.version(name)}" for name in _WHEELS]
    options = ["--quiet", "--no-deps", "--no-compile", "--only-binary=:all:", "--python-version", python]
    options += [f"--platform=manylinux_2_{n}_x86_64" for n in (28, 27, 24, 17)]
    subprocess.run([sys.executable, "-m", "pip", "install", *options, "--target", folder / "site", *wanted], check=True)


def size(folder: Path) -> int:
    """Bytes of all files."""
    return sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())
