"""Other processes that take the emulation for a GPU, and its compiler for nvcc, whatever they run.

subprocess.run(command, env={**os.environ, **environment("sm_80")})
"""

import os
import sys
from pathlib import Path

from .build import cache_folder, compile_for_emulation, libraries
from .device import properties_of

_NVCC = """\
#!{python}
import sys
sys.path[:0] = {path!r}
from tests.cuda_emulation.processes import nvcc
nvcc(sys.argv)
"""


def environment(arch: str) -> dict[str, str]:
    """Return the environment that such processes need, for a GPU of the architecture."""
    folder = cache_folder() / f"bin-{os.getpid()}"
    folder.mkdir(exist_ok=True)
    script = folder / "nvcc"
    script.write_text(_NVCC.format(python=sys.executable, path=[str(Path(__file__).parents[2])]))
    script.chmod(0o755)
    return {
        "PATH": f"{folder}{os.pathsep}{os.environ['PATH']}",
        "LD_PRELOAD": " ".join(map(str, libraries())),
        "CUDA_EMULATION_DEVICE": " ".join(map(str, properties_of(arch))),
    }


def nvcc(arguments: list[str]) -> None:
    """nvcc ... SOURCE -o CUBIN"""
    source, _, cubin = arguments[-3:]
    os.environ.pop("LD_PRELOAD", None)  # g++ needs no GPU
    Path(cubin).write_bytes(compile_for_emulation(Path(source).read_text()))
