"""One fuzz target as a process: `python -m tests.attacks.fuzz.target NAME FOLDER [libFuzzer's options] CORPUS`.

Exceptions that are not a LoweringError, or use the compiler's terms, are noted in FOLDER, one file for each location
that raised them, and fuzzing goes on. Crashes and hangs end the process; the input in hand is in FOLDER/current.
"""

from __future__ import annotations

import importlib
import random
import resource
import sys
from pathlib import Path

import atheris

from .notes import noted

# Address space of a target. What the compiler's libraries map is within.
MEMORY = 6 << 30
INSTRUMENTED = ["lowering", "onnx_ir"]


def main() -> None:
    name, folder, *options = sys.argv[1:]
    with atheris.instrument_imports(include=INSTRUMENTED):
        module = importlib.import_module(f"tests.attacks.fuzz.{name}")
    resource.setrlimit(resource.RLIMIT_AS, (MEMORY, MEMORY))
    mutate = module.mutated

    def mutator(data: bytes, limit: int, seed: int) -> bytes:
        rng = random.Random(seed)
        changed = mutate(data, rng, limit) if rng.random() < 0.9 else None
        return atheris.Mutate(data, limit) if changed is None else changed

    atheris.Setup([sys.argv[0], *options], noted(module.attempt, Path(folder)), custom_mutator=mutator)
    atheris.Fuzz()


if __name__ == "__main__":
    main()
