"""Check that the emulation notices missing steps. Kernels in which each synchronizing step can be left out, one by one.

All steps stay in one build: a guard that the emulator evaluates when a thread reaches the step decides.
"""

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from .device import ARRIVALS, ORDERS
from .kernels import Module
from .worker import EmulationError

_STEP = re.compile(
    r"^(?P<indent> +)(?P<call>(?P<name>\w*(?:cta_sync|warp_sync|warpgroup_sync|syncthreads|syncwarp|bar_sync|bar_arrive"
    r"|barrier|fence|wait|commit)\w*)\([^;\"]*\));",
    re.MULTILINE,
)
# copies and matmuls are work; launches follow each other in the emulation anyway
_NO_STEP = re.compile(r"async_bulk_tensor_|mma_async|griddepcontrol")
# functions that only keep the compiler from moving registers
_EMPTY = re.compile(r'__device__ void (\w+)\([^)]*\) \{(?:(?!^\}).)*?asm volatile\(\s*""', re.MULTILINE | re.DOTALL)


@dataclass(frozen=True)
class Step:
    """A statement of a kernel that synchronizes: its number, and its text."""

    number: int
    kernel: str
    call: str

    @property
    def name(self) -> str:
        """Return the name of the instruction or function."""
        return self.call.partition("(")[0].removeprefix("tvm_builtin_")

    def __str__(self) -> str:
        return f"{self.kernel}: {self.name} ({self.number})"


def steps_can_be_left_out(source: str) -> tuple[str, list[Step]]:
    """Return the source with a guard before every step in the bodies of its kernels, and the steps."""
    steps: list[Step] = []
    empty = set(_EMPTY.findall(source))

    def guard(kernel: str) -> Callable[[re.Match], str]:
        def with_guard(match: re.Match) -> str:
            if match["name"] in empty or _NO_STEP.search(match["name"]):
                return match[0]
            steps.append(Step(len(steps), kernel, match["call"]))
            return f"{match['indent']}if (emu_keeps({len(steps) - 1})) {match['call']};"

        return with_guard

    # the text between the beginnings of two kernels is the body of the first
    sections = re.split(r'(?m)(^extern "C" __global__ void[^{;]*?(\w+)\([^)]*\)\s*\{)', source)
    text = sections[0]
    for head, name, body in zip(sections[1::3], sections[2::3], sections[3::3]):
        text += head + _STEP.sub(guard(name), body)
    return text, steps


def survivors(module: Module, name: str, arrays: Sequence[Any], right: Callable[[list], bool]) -> list[Step]:
    """Return the steps that can be left out of the kernels of a function unnoticed.

    Neither the emulation nor `right`, which checks the arrays after the call, notices them under any order. Steps that
    no thread reaches in this call count as noticed.
    """
    source, steps = steps_can_be_left_out(module.source())
    mutable = module.with_source(source)
    assert right(mutable.call(name, arrays)), "the kernel is wrong with all of its steps"
    return [step for step in steps if not _noticed(mutable, name, arrays, right, step)]


def _noticed(module: Module, name: str, arrays: Sequence[Any], right: Callable, step: Step) -> bool:
    for order in ORDERS:
        for arrivals in ARRIVALS:
            try:
                results, reached = module.call_without(step.number, name, arrays, order=order, arrivals=arrivals)
            except EmulationError:
                return True
            if not right(results) or not reached:
                return True
    return False
