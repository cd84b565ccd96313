"""Whole artifacts on the GPU: each is compared with what it should give before it is timed.

A function takes the bundle's folder and a program, and gives {"error": the worst, "times": {label: timing}}. Each
raises ValueError for answers that are wrong.
"""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from ..plan import Program
from .card import card
from .packed import repeat, unpack
from .timing import Timing, repeated

Say = Callable[[str], None]


def load(folder: Path, program: Program) -> Any:
    """The program's artifact as a model, in a process that has TVM's runtime from now on."""
    import lowering

    return lowering.load(unpack(folder / program.folder / "artifact"))


def compare_calls(folder: Path, program: Program, say: Say) -> dict[str, Any]:
    """A model: its recorded calls, one after the other."""
    say("loading")
    module, errors = load(folder, program), []
    for path in sorted((folder / program.folder).glob("call-*.npz")):
        say(path.stem)
        arrays = dict(np.load(path))
        outputs = module.run({key[3:]: array for key, array in arrays.items() if key.startswith("in.")})
        for key, right in arrays.items():
            if key.startswith("out."):
                errors.append(_error(outputs[key[4:]], right))
    return {"error": right(errors, program)}


def time_weights(folder: Path, program: Program, say: Say) -> dict[str, Any]:
    """A chain of matmuls by constant matrices, for each number of rows; the time is that of one of them.

    details: rows, layers, depth, block (of scales, 0 for none), bits, tolerance.
    """
    import torch

    say("loading")
    gpu, details, module = card(), program.details, load(folder, program)
    tiles = dict(np.load(folder / program.folder / "tiles.npz"))
    errors, times = [], {}
    for rows in details["rows"]:
        say(f"{rows} rows")
        x = gpu.memory(seed=rows).normal((rows, details["depth"]), "float16")
        call = module.bind({"x": gpu.upload(x)}, graph=True)
        y = gpu.download(call()["y"]).double()
        right = x.double()
        for layer in range(details["layers"]):
            matrix = torch.from_numpy(matrix_of(tiles, details["depth"], details["block"], layer))
            right = right @ matrix.to(right.device, right.dtype)
        errors.append(float((y - right).abs().max() / (right.max() - right.min())))
        times[f"{rows} rows"] = _shared(repeated(call, gpu), details["layers"])
    return {"error": right(errors, program), "times": times}


def matrix_of(tiles: dict[str, np.ndarray], size: int, block: int, layer: int) -> np.ndarray:
    """The matrix [size, size] of a layer as floats, [k, n]: values, or integers [n, k] times scales [n, k / block]."""
    if block == 0:
        return repeat(tiles["values"], (size, size), layer)
    integers = repeat(tiles["integers"], (size, size), layer).astype(np.float32) - tiles["zero"]
    scales = repeat(tiles["scales"], (size, size // block), layer).astype(np.float32)
    return (integers.reshape(size, -1, block) * scales[..., None]).reshape(size, size).T


def time_decoder(folder: Path, program: Program, say: Say) -> dict[str, Any]:
    """A decoder with static caches: logits of a prompt and of steps, then the time of a step by the host's clock.

    details: prompt (tokens).
    """
    say("loading")
    decoder = load(folder, program).decoder()
    recorded = dict(np.load(folder / program.folder / "tokens.npz"))
    tokens, right, prompt = recorded["tokens"][0], recorded["logits"][0], program.details["prompt"]
    say("tokens")
    logits = [decoder.prefill(tokens[:prompt])[0]]
    logits += [decoder.step(tokens[k : k + 1]) for k in range(prompt, len(tokens))]
    error = _error(np.concatenate(logits), right)
    say("timing")
    times = _by_host(lambda: decoder.step(tokens[:1]), min(card().calls, decoder.capacity - decoder.length))
    return {"error": right([error], program), "times": {"step": times}}


def time_batcher(folder: Path, program: Program, say: Say) -> dict[str, Any]:
    """A served decoder: several requests, whose logits are compared, then the time of a step of all.

    details: prompt (tokens of the shortest), blocks.
    """
    import lowering

    say("loading")
    batcher = lowering.Batcher(load(folder, program), blocks=program.details["blocks"])
    recorded = dict(np.load(folder / program.folder / "tokens.npz"))
    starts = [program.details["prompt"] + number for number in range(len(recorded["tokens"]))]
    say("tokens")
    errors = []
    for number, start in enumerate(starts):
        batcher.add(number, recorded["tokens"][number, :start].tolist())
    while batcher.waiting:
        for request, logits in batcher.step().items():
            read = len(batcher.tokens(request))
            errors.append(_error(logits, recorded["logits"][request, read - 1]))
            if read < recorded["tokens"].shape[1]:
                batcher.extend(request, int(recorded["tokens"][request, read]))
    say("timing")

    def step() -> None:
        for number in range(len(starts)):
            batcher.extend(number, 5)
        batcher.step()

    room = program.details["context"] - recorded["tokens"].shape[1]
    times = _by_host(step, min(card().calls, room))
    return {"error": right(errors, program), "times": {f"step of {len(starts)}": times}}


def _by_host(call: Callable[[], object], calls: int) -> dict[str, Any]:
    times = []
    for _ in range(calls):
        start = time.perf_counter()
        call()
        times.append(time.perf_counter() - start)
    return dataclasses.asdict(Timing.over(times, graph=False))


def _shared(timing: Timing, shares: int) -> dict[str, Any]:
    """Return the timing of one of so many equal shares."""
    data = dataclasses.asdict(timing)
    return {name: value if name == "graph" else value / shares for name, value in data.items()}


def _error(actual: Any, expected: np.ndarray) -> float:
    """Return the largest difference, relative to the range of the expected values."""
    return float(np.abs(np.asarray(actual, np.float64) - expected).max() / np.ptp(expected))


def right(errors: Sequence[float], program: Program) -> float:
    """The largest error. Raises ValueError where it is beyond the program's tolerance, or one is not a number."""
    tolerance, error = program.details["tolerance"], float(np.max(errors))
    if not error <= tolerance:
        raise ValueError(f"wrong: error {error:.2g}, and {tolerance:.2g} is right")
    return error
