"""The wheel onnx-lowering-runtime: it loads, runs and measures artifacts, with TVM's runtime library and no compiler.

    python -m lowering.packaging.runtime_wheel dist/ [--runtime DIR]

It has the package `lowering`, as onnx-lowering does, without the compiler. Applications use `import lowering` in either
case, and an environment has one of the two.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from ..errors import ArtifactError
from ..machine import SHIPPED, VERSION_FILE
from ..version import VERSION
from .libraries import find_libraries, read_own_license
from .wheel import Wheel

NAME = "onnx-lowering-runtime"

# Its contents, in lowering/.
_PACKAGES = ("commands", "diagnosis", "profiling", "runtime", "serving")
_MODULES = (
    "__init__.py", "__main__.py", "about.py", "arithmetic.py", "cache_folder.py", "choices.py", "deprecated.py",
    "errors.py", "machine.py", "manifest.py", "notebook.py", "py.typed", "records.py", "units.py", "version.py",
    "graph/__init__.py", "graph/paged/serve.py",  # the fields of Serve
)  # fmt: skip

_DESCRIPTION = """\
Runs what onnx-lowering compiled: `lowering.load("out/").run({...})`, `onnx-lowering run` and `bench`, without a
compiler. Do not install it beside onnx-lowering, which has all of it.
"""


def write_runtime_wheel(folder: Path, runtime: Path | None = None) -> Path:
    """Write the wheel, with the libraries of the installed apache-tvm, for machines like this one.

    Args:
        folder: The folder of the wheel.
        runtime: A folder of wheels (pip install --target) for any machine. The wheel has their libraries instead, and
            is for that machine.

    Raises:
        ArtifactError: Libraries are missing, or the folder cannot be written.
    """
    root, libraries = Path(__file__).parents[1], find_libraries(runtime)
    sources = [
        *(root / name for name in _MODULES),
        *(p for package in _PACKAGES for p in (root / package).rglob("*.py")),
    ]
    files: dict[str, bytes | Path] = {f"lowering/{path.relative_to(root)}": path for path in sorted(sources)}
    shipped_folder = f"lowering/{SHIPPED.relative_to(root)}"
    files |= {f"{shipped_folder}/{path.name}": path for path in (libraries.runtime, libraries.cuda)}
    files[f"{shipped_folder}/{VERSION_FILE}"] = libraries.versions["apache-tvm"].encode()
    info = f"onnx_lowering_runtime-{VERSION}.dist-info"
    files[f"{info}/entry_points.txt"] = b"[console_scripts]\nonnx-lowering = lowering.commands.cli:main\n"
    licenses = {"LICENSE": read_own_license(), **{n: t for n, t in libraries.licenses.items() if "-ffi-" not in n}}
    files |= {f"{info}/licenses/{name}": text for name, text in licenses.items()}
    wheel = Wheel(
        NAME,
        VERSION,
        libraries.tags,
        [
            "Summary: Runs artifacts of onnx-lowering, without a compiler",
            "License-Expression: Apache-2.0",
            *(f"License-File: {name}" for name in licenses),
            "Requires-Python: >=3.10",
            f"Requires-Dist: apache-tvm-ffi=={libraries.versions['apache-tvm-ffi']}",
            "Requires-Dist: numpy>=2.1",
            "Requires-Dist: ml_dtypes>=0.5",
            "Requires-Dist: packaging>=23",
            "Provides-Extra: completion",
            "Requires-Dist: argcomplete>=3; extra == 'completion'",
            "Provides-Extra: sign",
            "Requires-Dist: cryptography>=42; extra == 'sign'",
            "Provides-Extra: cuda",
            "Requires-Dist: nvidia-cuda-runtime>=13,<14; extra == 'cuda'",
        ],
        _DESCRIPTION,
    )
    return wheel.write(folder, files)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(prog="python -m lowering.packaging.runtime_wheel", description="Writes its wheel.")
    parser.add_argument("folder", type=Path, help="where to write it")
    parser.add_argument(
        "--runtime", type=Path, metavar="DIR", help="take libraries from wheels that pip installed with --target DIR"
    )
    arguments = parser.parse_args()
    try:
        print(write_runtime_wheel(arguments.folder, arguments.runtime))
    except ArtifactError as error:
        sys.exit(f"error[{error.code}]: {error}")
