"""A process that has everything imported and warm, and forks a child for each attack: `python -m ...zygote`.

Requests and answers are lines of JSON on standard input and output. A child that outlives its time is killed.
"""

from __future__ import annotations

import json
import os
import select
import signal
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import onnx
from onnx import helper

import lowering
from lowering.runtime.library import load_runtime

from . import child


def warm() -> None:
    """Compile a model, and run nothing: threads would not survive the fork."""
    kind = helper.make_tensor_value_info("x", onnx.TensorProto.FLOAT, ["n"])
    result = helper.make_tensor_value_info("y", onnx.TensorProto.FLOAT, ["n"])
    graph = helper.make_graph([helper.make_node("Add", ["x", "x"], ["y"])], "warm", [kind], [result])
    lowering.compile(helper.make_model(graph, opset_imports=[helper.make_opsetid("", 24)], ir_version=10))
    load_runtime(Path())


def _attacked(request: dict[str, Any]) -> dict[str, Any]:
    """Return the child's report, how it ended (exit code, or the negative number of the signal), and whether late."""
    reading, writing = os.pipe()
    with tempfile.TemporaryDirectory(prefix="attack-") as folder:
        process = os.fork()
        if process == 0:
            _child(request, Path(folder), reading, writing)
        os.close(writing)
        told, late = read_until(reading, time.monotonic() + request["seconds"])
        os.close(reading)
        if late:
            os.kill(process, signal.SIGKILL)
        _, status = os.waitpid(process, 0)
    return {"told": told, "ended": os.waitstatus_to_exitcode(status), "late": late}


def _child(request: dict[str, Any], folder: Path, reading: int, writing: int) -> None:
    code = 1
    try:
        os.close(reading)
        for descriptor in (0, 1):  # the zygote's own
            os.dup2(2, descriptor)
        arguments = {k: request[k] for k in ("domain", "op", "seed", "calls", "plant")}
        child.attack(**arguments, folder=folder, report=writing)
        code = 0
    except BaseException as error:
        os.write(writing, json.dumps({"failed": f"{type(error).__name__}: {error}"}).encode() + b"\n")
        raise
    finally:
        sys.stderr.flush()
        os._exit(code)


def read_until(descriptor: int, deadline: float) -> tuple[str, bool]:
    """Return what a pipe says until its end, and whether the deadline came first."""
    data = b""
    while (left := deadline - time.monotonic()) > 0:
        if not select.select([descriptor], [], [], left)[0]:
            continue
        chunk = os.read(descriptor, 1 << 16)
        if not chunk:
            return data.decode(errors="replace"), False
        data += chunk
    return data.decode(errors="replace"), True


def main() -> None:
    del os.environ["LD_PRELOAD"]  # the linker's processes need none of it
    warm()
    print("ready", flush=True)
    for line in sys.stdin:
        print(json.dumps(_attacked(json.loads(line))), flush=True)


if __name__ == "__main__":
    main()
