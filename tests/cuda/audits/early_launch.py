"""Audit of kernels that are launched early (schedules/cuda/dependent_launch.py), by their machine code.

`python -m tests.cuda.audits.early_launch FOLDER [--arch ARCH ...] [--nvrtc] [--ptxas PATH]` audits the exports in a
folder (`python -m tests.exports.export --narrow` makes them) in float16 and bfloat16, compiled by nvcc, by NVRTC, or
with another ptxas. Needs the `test` extra; no GPU.
"""

from __future__ import annotations

import argparse
import re
import sys
import tempfile
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from unittest import mock

import schedules as schedules  # before the folder of tests, which has one of that name
from lowering.target import cubin
from tests.cuda.audits import sass
from tests.cuda.audits.machine_code import tool

ARCHITECTURES = ("sm_90a", "sm_100", "sm_120")
BEGIN, WAIT = "PREEXIT", "ACQBULK"  # griddepcontrol.launch_dependents and .wait

MEMORY = {"LDG", "STG", "RED", "ATOM", "ATOMG", "LDGSTS", "UTMALDG", "UTMASTG", "UBLKCP", "LD", "ST", "LDGDEPBAR"}
"""Opcodes that read or write the device's memory, or wait for such a read."""
PREFETCH = {"LDGSTS", "LDGDEPBAR"}
"""Opcodes that may stand before the wait: asynchronous copies of weights, which no kernel writes."""


def before_the_wait(function: sass.Function) -> set[int]:
    """Return the instructions that some path reaches without a wait on the way."""
    reached: set[int] = set()
    waiting = [0]
    while waiting:
        n = waiting.pop()
        if n in reached:
            continue
        reached.add(n)
        instruction = function.instructions[n]
        if instruction.opcode != WAIT or instruction.guarded:
            waiting += sass.successors(function, n)
    return reached


def faults(function: sass.Function) -> list[str]:
    """Return the undefined accesses of a kernel while the kernel before it runs. A kernel without a wait has none.

    Loads by the read-only path are undefined in all of it, except for tables that belong to the code. What they read
    may have been written while the kernel was there. Other accesses are undefined where a path leads to them without
    a wait.
    """
    if not any(instruction.opcode == WAIT for instruction in function.instructions):
        return []
    messages = []
    for n, instruction in enumerate(function.instructions):
        is_read_only = instruction.opcode in ("LDG", "LD") and "CONSTANT" in instruction.modifiers
        if is_read_only and not _reads_a_table(function, n):
            messages.append(f"{function.name}: {instruction.opcode} by the read-only path: {instruction.operands}")
    may_prefetch = "matmul" in function.name or "conv" in function.name
    allowed = PREFETCH if may_prefetch else set()
    for n in sorted(before_the_wait(function)):
        opcode = function.instructions[n].opcode
        if opcode in MEMORY - allowed:
            messages.append(f"{function.name}: {opcode} before the wait, instruction {n}")
    return messages


def _reads_a_table(function: sass.Function, n: int) -> bool:
    """Return whether the address of a load comes from a symbol of the code, which lies in bank 4 of constants.

    Sine and cosine reduce large arguments by such a table, the digits of 2 / pi."""
    needed = set(re.findall(r"U?R\d+", function.instructions[n].operands.partition(",")[2]))
    for instruction in reversed(function.instructions[max(n - 60, 0) : n]):
        result, _, sources = instruction.operands.partition(",")
        if not (defined := re.match(r"(U?R)(\d+)", result)):
            continue
        pair = {defined[0], f"{defined[1]}{int(defined[2]) + 1}"}
        if pair & needed:
            if "c[0x4]" in sources:
                return True
            needed |= set(re.findall(r"U?R\d+", sources))
    return False


def prefetches(function: sass.Function) -> bool:
    """Return whether a kernel asks for weights before the wait."""
    return bool(PREFETCH & {function.instructions[n].opcode for n in before_the_wait(function)})


def disassemble(code: bytes) -> list[sass.Function]:
    """Return the kernels of machine code."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "kernels.cubin"
        path.write_bytes(code)
        return sass.read(tool("nvdisasm", "-c", path))


@contextmanager
def by_nvrtc() -> Iterator[None]:
    """Compile by NVRTC meanwhile, though nvcc is there."""
    with mock.patch.object(cubin, "find_nvcc", lambda: None):
        yield


def main() -> None:
    from tests.cuda.audits.matmul_code import machine_code_of
    from tests.cuda.audits.second_ptxas import used

    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--arch", nargs="*", default=ARCHITECTURES)
    parser.add_argument("--nvrtc", action="store_true")
    parser.add_argument("--ptxas", type=Path)
    options = parser.parse_args()
    kernels, messages = 0, []
    with ExitStack() as stack:
        if options.nvrtc:
            stack.enter_context(by_nvrtc())
        if options.ptxas:
            stack.enter_context(used(options.ptxas))
        for path in sorted(options.folder.glob("*/model.onnx")):
            for precision in ("float16", "bfloat16"):
                for arch in options.arch:
                    _, functions = machine_code_of(path, arch, precision)
                    early = [f for f in functions if any(i.opcode == WAIT for i in f.instructions)]
                    wrong = [fault for function in early for fault in faults(function)]
                    print(
                        f"{path.parent.name} {precision} {arch}: kernels: {len(early)} faults: {len(wrong)}", flush=True
                    )
                    kernels += len(early)
                    messages += wrong
    print(f"kernels: {kernels} faults: {len(messages)}", *messages, sep="\n")
    sys.exit(bool(messages))


if __name__ == "__main__":
    main()
