"""A kernel of a bundle under a tool of compute-sanitizer.

initcheck is left out: it does not know bulk stores, whose results it takes for memory that was never written.
"""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path

from .isolate import Answer

TOOLS = ("memcheck", "synccheck", "racecheck")
PROGRAM = "compute-sanitizer"

_CODE = "import sys; from benchmarks.gpu.host.check import run_small; run_small(sys.argv[1], sys.argv[2])"


def find() -> str | None:
    """Where the program is."""
    return shutil.which(PROGRAM) or shutil.which(PROGRAM, path="/usr/local/cuda/bin")


def look(tool: str, folder: Path, kernel: str, limit: float) -> Answer:
    """The kernel at small sizes, with the values that it must not read poisoned."""
    command = [find() or PROGRAM, "--tool", tool, "--error-exitcode", "9", "--report-api-errors", "no"]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(entry for entry in sys.path if entry)}
    process = subprocess.Popen(
        [*command, sys.executable, "-c", _CODE, str(folder), kernel],
        env=environment, start_new_session=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
    )  # fmt: skip
    try:
        said, _ = process.communicate(timeout=limit)
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)  # the tool's own process, and the one it watches
        said, _ = process.communicate()
        return Answer(problem=f"no answer in {limit:.0f} s: {said[-300:]}", late=True)
    if process.returncode != 0:
        return Answer(problem=f"exit status {process.returncode}: {said[-3000:]}")
    return Answer(result={"note": said.strip().splitlines()[-1]})
