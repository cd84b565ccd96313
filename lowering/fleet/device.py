"""The device's side: TVM's RPC server, with two functions of ours. It needs the runtime alone.

A client uploads a task's files into the folder of its session and asks for measurements of libraries in it. These
happen as they do locally (measuring/): in children of a helper, with limits. **Whoever reaches the server can run code
on it**, as TVM says of its servers: they belong into networks that are trusted.
"""

from __future__ import annotations

import dataclasses
import json
from importlib.util import find_spec
from pathlib import Path

import tvm_ffi
from tvm import rpc

from ..errors import ArtifactError, InputError
from ..machine import cpu_flags, install_command
from ..measuring.isolated import Failed, Helper
from ..measuring.machine import machine
from ..measuring.measure import Job
from ..measuring.trial import compared, runner, tried
from ..runtime.gpu import read_gpu_architecture

MACHINE, MEASURE = "lowering.fleet.machine", "lowering.fleet.measure"

_helper: Helper | None = None  # of the session whose process this is


def serve(tracker: tuple[str, int], key: str, host: str = "0.0.0.0", ports: tuple[int, int] = (9090, 9199)) -> None:
    """Registers at the tracker under a key, and serves until it is killed. Raises InputError where the extra `fleet` is
    not installed."""
    if find_spec("cloudpickle") is None:
        raise InputError(f"A device needs what TVM's server is made of: {install_command('fleet')}.")
    server = rpc.Server(host, *ports, tracker_addr=tracker, key=key, silent=True, server_init_callback=register)
    try:
        server.proc.join()
    finally:
        server.terminate()


def register() -> None:
    """Gives the process that serves its functions."""
    tvm_ffi.register_global_func(MACHINE, described, override=True)
    tvm_ffi.register_global_func(MEASURE, measure, override=True)


def described(gpu: bool) -> str:
    """The Machine, the features of the CPU, and the architecture of the GPU that is asked for, as JSON; or why there is
    none."""
    try:
        found = dataclasses.asdict(machine(bool(gpu)))
        own = read_gpu_architecture(0) if gpu else ""
        return json.dumps(found | {"cpu_flags": sorted(cpu_flags()), "gpu_architecture": own})
    except ArtifactError as error:
        return json.dumps({"missing": str(error)})


def measure(text: str) -> str:
    """A Job as JSON, with paths in the session's folder, and whether it is a trial or one comparison; the Measured or
    the Failed of it as JSON."""
    global _helper
    asked = json.loads(text)
    trial, here = asked.pop("trial"), Path.cwd()
    paths = {name: str(here / asked[name]) for name in ("library", "baseline", "folder")}
    if _helper is None:
        _helper = runner()
    try:
        job = Job(**asked | paths)
        found = (tried if trial else compared)(_helper, job)
    except Failed as failed:
        return json.dumps({"cause": failed.cause, "text": failed.text})
    finally:
        if asked["library"] != asked["baseline"]:  # which serves the next candidates, too
            Path(paths["library"]).unlink(missing_ok=True)
    return json.dumps(dataclasses.asdict(found))
