"""The device's side: TVM's RPC server, with two functions of onnx-lowering. It only needs the runtime.

A client uploads a task's files into the folder of its session and requests measurements of libraries in it. These run
as they do locally (measuring/): in children of a helper, with limits. **Whoever reaches the server can run code on
it**, as TVM says of its servers: run them in trusted networks only.
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
from ..measuring.isolated import CandidateFailure, Helper
from ..measuring.machine import read_tuning_machine
from ..measuring.measure import Job
from ..measuring.trial import compare_candidate, runner, try_candidate
from ..runtime.gpu import read_gpu_architecture

MACHINE, MEASURE = "lowering.fleet.machine", "lowering.fleet.measure"

_helper: Helper | None = None  # of the session that this process serves


def serve(tracker: tuple[str, int], key: str, host: str = "0.0.0.0", ports: tuple[int, int] = (9090, 9199)) -> None:
    """Register with the tracker under a key, and serve until killed.

    Raises InputError if the extra `fleet` is not installed.
    """
    if find_spec("cloudpickle") is None:
        raise InputError(
            "toolchain.package_missing",
            f"A device needs the packages of TVM's server. Install them: {install_command('fleet')}.",
        )
    server = rpc.Server(
        host, *ports, tracker_addr=tracker, key=key, silent=True, server_init_callback=register_functions
    )
    try:
        server.proc.join()
    finally:
        server.terminate()


def register_functions() -> None:
    """Register the server's functions in its process."""
    tvm_ffi.register_global_func(MACHINE, describe_machine, override=True)
    tvm_ffi.register_global_func(MEASURE, measure_json, override=True)


def describe_machine(gpu: bool) -> str:
    """Return the TuningMachine, the CPU's features, and the architecture of the requested GPU, as JSON.

    If there is no such GPU, return the reason.
    """
    try:
        properties = dataclasses.asdict(read_tuning_machine(bool(gpu)))
        gpu_architecture = read_gpu_architecture(0) if gpu else ""
        return json.dumps(properties | {"cpu_flags": sorted(cpu_flags()), "gpu_architecture": gpu_architecture})
    except ArtifactError as error:
        return json.dumps({"missing": str(error)})


def measure_json(text: str) -> str:
    """Run a Job, given as JSON with paths in the session's folder, and return the result as JSON.

    The result is a Measurement or a CandidateFailure. The job's JSON also says whether it is a trial or one comparison.
    """
    global _helper
    request = json.loads(text)
    trial, here = request.pop("trial"), Path.cwd()
    paths = {name: str(here / request[name]) for name in ("library", "baseline", "folder")}
    if _helper is None:
        _helper = runner()
    try:
        job = Job(**request | paths)
        measured = (try_candidate if trial else compare_candidate)(_helper, job)
    except CandidateFailure as failure:
        return json.dumps({"cause": failure.cause, "text": failure.text})
    finally:
        if request["library"] != request["baseline"]:  # the baseline serves the next candidates, too
            Path(paths["library"]).unlink(missing_ok=True)
    return json.dumps(dataclasses.asdict(measured))
