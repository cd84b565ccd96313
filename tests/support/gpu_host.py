"""Files and two scripts for a GPU host without network and compiler, on which to run `pytest --gpu`.

`python -m tests.support.gpu_host FOLDER [--python 3.12]` writes into FOLDER

* compiler.tar.xz.00, .01, ...: the installed packages that compile, with libraries stripped, for hosts whose Python has
  that version, in parts of at most 30 MiB;
* project.tar.xz: this checkout's tracked files, below 10 MiB;
* setup.sh DIRECTORY: joins and unpacks both there;
* run.sh DIRECTORY RESULTS MINUTES [pytest's arguments]: runs the tests, and keeps results in RESULTS.

The host itself has nvcc, gcc, numpy, onnx, ml_dtypes, rich, packaging, pytest with xdist and timeout, and hypothesis.
docs/howto/gpu_host.md shows a visit.
"""

from __future__ import annotations

import argparse
import importlib.util
import shutil
import subprocess
import sys
import tempfile
from importlib import metadata
from pathlib import Path

ROOT = Path(__file__).parents[2]
PART = 30 << 20
MOST_OF_PROJECT = 10 << 20
_WHEELS = ("apache-tvm-ffi", "onnx-ir")
_LEFT_OUT = ("include", "3rdparty", "src", "web", "__pycache__", "*.pyc")

SETUP = """\
#!/bin/sh
# Joins and unpacks what lies next to this file: sh setup.sh DIRECTORY
set -e
here=$(cd "$(dirname "$0")" && pwd)
mkdir -p "$1/site" "$1/project"
cat "$here"/compiler.tar.xz.?? | tar xJ -C "$1/site"
tar xJf "$here/project.tar.xz" -C "$1/project"
"""

RUN = """\
#!/bin/sh
# Runs the tests on the GPU: sh run.sh DIRECTORY RESULTS MINUTES [pytest's arguments]
directory=$1 results=$2 minutes=$3
shift 3
export PYTHONPATH="$directory/project:$directory/site" ONNX_LOWERING_CACHE="$directory/cache"
cd "$directory/project"
exec python3 -m pytest --gpu --results="$results" --minutes "$minutes" -p no:cacheprovider "$@"
"""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--python", default="3.12", help="version of the host's Python; default: %(default)s")
    options = parser.parse_args()
    options.folder.mkdir(parents=True, exist_ok=True)
    write(options.folder, options.python)
    for path in sorted(options.folder.iterdir()):
        print(f"{path.stat().st_size / (1 << 20):6.1f} MiB  {path.name}")


def write(folder: Path, python: str) -> None:
    """Write all files. Raises RuntimeError where the project is larger than hosts should have to take."""
    with tempfile.TemporaryDirectory() as scratch:
        site = Path(scratch) / "site"
        _copy_compiler(site)
        _install_wheels(site, python)
        archive = Path(scratch) / "compiler.tar.xz"
        _pack(archive, site, ["."])
        split(archive, folder)
    tracked = subprocess.run(["git", "ls-files"], cwd=ROOT, capture_output=True, text=True, check=True).stdout
    _pack(folder / "project.tar.xz", ROOT, tracked.splitlines())
    if (folder / "project.tar.xz").stat().st_size > MOST_OF_PROJECT:
        raise RuntimeError("the project is larger than 10 MiB")
    (folder / "setup.sh").write_text(SETUP)
    (folder / "run.sh").write_text(RUN)


def split(archive: Path, folder: Path) -> None:
    """Write a file's chunks into a folder, numbered in order, and remove those of an earlier one."""
    for path in folder.glob(f"{archive.name}.*"):
        path.unlink()
    with archive.open("rb") as file:
        for number in range(100):
            if not (chunk := file.read(PART)):
                break
            (folder / f"{archive.name}.{number:02}").write_bytes(chunk)


def _copy_compiler(site: Path) -> None:
    """Copy the package tvm, with its metadata, which contain its version."""
    package = importlib.util.find_spec("tvm")
    assert package is not None and package.origin is not None
    source = Path(package.origin).parent
    shutil.copytree(source, site / "tvm", ignore=shutil.ignore_patterns(*_LEFT_OUT))
    for library in (site / "tvm" / "lib").glob("*.so"):
        subprocess.run(["strip", "--strip-unneeded", library], check=True)
    info = Path(str(metadata.distribution("apache-tvm").locate_file(""))) / (
        f"apache_tvm-{metadata.version('apache-tvm')}.dist-info"
    )
    (site / info.name).mkdir()
    shutil.copy(info / "METADATA", site / info.name)


def _install_wheels(site: Path, python: str) -> None:
    """Install wheels that depend on the version of Python, or that hosts lack."""
    names = [f"{name}=={metadata.version(name)}" for name in _WHEELS]
    options = ["--quiet", "--no-deps", "--no-compile", "--only-binary=:all:", "--python-version", python]
    options += [f"--platform=manylinux_2_{n}_x86_64" for n in (28, 27, 24, 17)]
    subprocess.run([sys.executable, "-m", "pip", "install", *options, "--target", site, *names], check=True)


def _pack(archive: Path, folder: Path, names: list[str]) -> None:
    command = ["tar", "-I", "xz -T0 -6", "-cf", archive, "-C", folder, "--files-from=-"]
    subprocess.run(command, input="\n".join(names), text=True, check=True)


if __name__ == "__main__":
    main()
