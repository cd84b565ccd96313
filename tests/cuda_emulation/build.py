"""Build with g++ the emulated libcuda.so.1 and libcudart.so.13, and the "cubins" that they load.

Everything is cached in a folder under a digest of its sources, the flags in this file, the compiler, the C library and
the CPU.
"""

import fcntl
import hashlib
import os
import subprocess
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from functools import lru_cache
from pathlib import Path

from .translate import translate

_HERE = Path(__file__).parent
_RUNTIME, _INCLUDE = _HERE / "runtime", _HERE / "include"
_COMMON = ["g++", "-std=c++17", "-march=native", "-fno-strict-aliasing", "-fPIC", "-w"]
# -fsanitize=thread makes the compiler announce every load and store (runtime/instrumentation.cpp)
_SANITIZER = ["-fsanitize=thread", "--param=tsan-instrument-func-entry-exit=0", "--param=tsan-distinguish-volatile=1"]
# most kernels run a few times: compiling them takes longer; instructions know their lines
_KERNEL = [*_COMMON, "-O0", "-g1", *_SANITIZER]


def cache_folder() -> Path:
    """Return the folder of built files: $CUDA_EMULATION_CACHE, or a folder of the user's cache."""
    folder = os.environ.get("CUDA_EMULATION_CACHE") or Path.home() / ".cache" / "onnx-lowering" / "cuda_emulation"
    Path(folder).mkdir(parents=True, exist_ok=True)
    return Path(folder)


@lru_cache
def _digest_of_sources(*folders: Path) -> str:
    digest = hashlib.sha256(f"{_cpu()}\0{_compiler()}\0{os.confstr('CS_GNU_LIBC_VERSION')}".encode())
    digest.update(Path(__file__).read_bytes())
    for folder in folders:
        for path in sorted(folder.iterdir()):
            if path.is_file():
                digest.update(path.name.encode() + path.read_bytes())
    return digest.hexdigest()[:20]


def _cpu() -> str:
    """Return the CPU features that -march=native depends on."""
    lines = Path("/proc/cpuinfo").read_text().splitlines()
    return "".join(line for line in lines[:40] if line.startswith(("model name", "flags")))


@lru_cache
def _compiler() -> str:
    """Return the version and the configuration of g++, as the compiler states them."""
    return subprocess.run(["g++", "-v"], capture_output=True, text=True, check=True).stderr


def _run(*command: str | Path) -> None:
    done = subprocess.run([str(argument) for argument in command], capture_output=True, text=True)
    if done.returncode:
        raise RuntimeError(f"{command[0]} failed:\n{done.stderr[:4000]}")


@contextmanager
def _alone() -> Iterator[None]:
    """Lock the cache: one process at a time builds shared files."""
    with (cache_folder() / "lock").open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


def libraries() -> tuple[Path, Path]:
    """Build libcuda.so.1 and libcudart.so.13 of the emulation on the first use, and return their paths."""
    folder = cache_folder() / f"libraries-{_digest_of_sources(_RUNTIME, _INCLUDE)}"
    driver, runtime = folder / "libcuda.so.1", folder / "libcudart.so.13"
    with _alone(), tempfile.TemporaryDirectory(dir=cache_folder()) as scratch:
        if not runtime.exists():
            built = Path(scratch)
            flags = [*_COMMON, "-O2"]
            sources = [path for path in _RUNTIME.glob("*.cpp") if path.name != "runtime.cpp"]
            half = len(sources) // 2  # two compilers side by side
            jobs = [subprocess.Popen([*flags, "-c", *group], cwd=scratch) for group in (sources[:half], sources[half:])]
            statuses = [job.wait() for job in jobs]
            if any(statuses):
                raise RuntimeError("the emulated driver does not compile")
            _run(*_COMMON, "-shared", "-Wl,-soname,libcuda.so.1", "-o", built / driver.name, *built.glob("*.o"), "-ldl")
            names = f"-Wl,-soname,libcudart.so.13,--version-script,{_RUNTIME / 'libcudart.map'}"
            _run(*flags, "-shared", names, "-o", built / runtime.name, _RUNTIME / "runtime.cpp", built / driver.name)
            folder.mkdir(exist_ok=True)
            os.replace(built / driver.name, driver)
            os.replace(built / runtime.name, runtime)
    return driver, runtime


def _precompiled_header() -> Path:
    """Build emulation.h.gch, and return its folder."""
    folder = cache_folder() / f"header-{_digest_of_sources(_INCLUDE)}"
    with _alone(), tempfile.TemporaryDirectory(dir=cache_folder()) as scratch:
        if not (folder / "emulation.h.gch").exists():
            built = Path(scratch) / "emulation.h.gch"
            _run(*_KERNEL, "-x", "c++-header", _INCLUDE / "emulation.h", "-o", built)
            folder.mkdir(exist_ok=True)
            os.replace(built, folder / built.name)
    return folder


def compile_for_emulation(source: str) -> bytes:
    """Compile the "cubin" of a CUDA source, with all of its kernels: an ELF library for the emulated driver.

    Raises ptx.UnknownInstruction for PTX that the emulator does not know, RuntimeError with the message of g++.
    """
    digest = hashlib.sha256(source.encode() + _digest_of_sources(_HERE, _INCLUDE).encode()).hexdigest()[:32]
    path = cache_folder() / f"kernel-{digest}.so"
    if not path.exists():
        code = translate(source)
        with tempfile.TemporaryDirectory(dir=cache_folder()) as scratch:
            kernel, built = Path(scratch) / "kernel.cpp", Path(scratch) / "kernel.so"
            kernel.write_text(code)
            header = ["-I", _precompiled_header(), "-I", _INCLUDE, "-include", "emulation.h"]
            file = f'-DEMU_FILE="{path.with_suffix(".cpp")}"'
            _run(*_KERNEL, *header, file, "-c", "-o", built.with_suffix(".o"), kernel)
            _run("g++", "-shared", "-o", built, built.with_suffix(".o"))
            os.replace(kernel, path.with_suffix(".cpp"))
            os.replace(built, path)
    return path.read_bytes()
