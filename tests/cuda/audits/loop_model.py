"""A bound on the speed of a kernel's main loop, from its machine code: the cycles that each pipe of an SM needs.

A pipe has a fixed throughput per cycle (a roofline of many roofs). The model ignores latencies, stalls on registers,
bank conflicts, clocks that fall under load, and the code before and after the loop.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from schedules.cuda.primitives.cost_model import EXPONENTIALS, LANES, SHARED_BANDWIDTH
from schedules.cuda.primitives.device import DEVICES, Device
from tests.cuda.audits.sass import Instruction

SCHEDULERS = 4  # of an SM, an instruction of a warp each in a cycle
_WARP = 32
_ALU_LANES = 64  # of integers, comparisons, selections and conversions (CUDA C++ Programming Guide, arithmetic)
_FP32 = {"FADD", "FMUL", "FFMA", "HADD2", "HMUL2", "HFMA2", "IMAD", "IMUL"}  # integers are multiplied there
_ALU = {
    *(
        "IADD",
        "IADD3",
        "VIADD",
        "IABS",
        "LEA",
        "LOP3",
        "PLOP3",
        "SHF",
        "PRMT",
        "SEL",
        "MOV",
        "ISETP",
        "VIMNMX",
        "IMNMX",
    ),
    *("FSETP", "FSEL", "FMNMX", "FMNMX3", "F2FP", "HSETP2", "HMNMX2", "VOTE", "P2R", "R2P"),
}


@dataclass(frozen=True)
class Gpu:
    """A card, with the figures that its maker publishes."""

    name: str
    device: Device
    """Its `tensor_cores` are those of this card."""
    clock: float
    """Cycles of a second: that of the published peak."""

    @property
    def peak(self) -> float:
        """TFLOP/s of matmuls in half precision with accumulators in float32."""
        return self.device.tensor_cores * self.device.sm_count * self.clock / 1e12


GPUS = {
    "sm_80": Gpu("A100", DEVICES["sm_80"], 1.41e9),
    "sm_89": Gpu("RTX 4090", DEVICES["sm_89"], 2.52e9),
    "sm_90a": Gpu("H100 SXM", DEVICES["sm_90a"], 1.83e9),
    "sm_120": Gpu("RTX 5090", DEVICES["sm_120"], 2.407e9),
}


@dataclass(frozen=True)
class Step:
    """The instructions of a warp up to an event, and the event."""

    instructions: int
    exponentials: int
    """Instructions of the unit for them (MUFU)."""
    fp32: int
    alu: int
    shared: int
    """Bytes that the warp reads or writes in shared memory, but for copies from outside."""
    event: str = ""
    """HMMA, a matmul that the next one waits for; HGMMA, which overlaps the instructions after it; HGMMA., the last
    one of a group; `wait n` for all but n groups; nothing, at the end of the loop."""
    operations: int = 0
    """Operations of the matmul, this warp's share."""
    operands: int = 0
    """Bytes that the matmul reads in shared memory itself, this warp's share."""


@dataclass(frozen=True)
class Kernel:
    """A kernel's loop, and the facts that the machine code does not show."""

    name: str
    arch: str
    tiles: str
    steps: tuple[Step, ...]
    warps: int
    """Warps that run the loop at a time on an SM, of all blocks there."""
    work: int
    """Operations of matmuls for one tile of keys, or step along k, of a block."""
    brought: int
    """Bytes of operands that arrive in a block's shared memory for that ..."""
    read: int
    """... and those that the second-level cache gives for them: fewer where blocks of a cluster share what arrives."""

    @property
    def operations(self) -> int:
        """Operations of all warps in one iteration."""
        return self.warps * sum(step.operations for step in self.steps)


@dataclass(frozen=True)
class Bound:
    """Cycles of one iteration, for all warps of an SM."""

    pipes: dict[str, float]
    """Cycles of each pipe by itself."""
    order: float
    """Cycles of one warp of each scheduler with all pipes to itself: no overlap between warps can hide them."""
    in_step: float
    """Cycles if all warps are always at the same instruction: only the order of the machine code overlaps work."""
    kernel: Kernel
    gpu: Gpu

    @property
    def cycles(self) -> float:
        """Return the lower bound: all pipes overlap as far as the order of a warp allows."""
        return max(self.order, *self.pipes.values())

    @property
    def binding(self) -> str:
        """Return the pipe that takes longest, or `order`, the order of a warp's own work."""
        name = max(self.pipes, key=lambda name: self.pipes[name])
        return name if self.pipes[name] >= self.order else "order"

    @property
    def inside(self) -> float:
        """Return the share of tensor cores of the busiest pipe of the SM, without the cache."""
        return self.pipes["tensor"] / max(self.order, *(n for name, n in self.pipes.items() if name != "L2"))

    @property
    def share(self) -> float:
        """Return the same share, with the cache."""
        return self.pipes["tensor"] / self.cycles

    def tflops(self, cycles: float) -> float:
        """Return the TFLOP/s of the GPU if an iteration takes so many cycles."""
        return self.kernel.operations / cycles * self.gpu.device.sm_count * self.gpu.clock / 1e12


def bound(kernel: Kernel, gpu: Gpu) -> Bound:
    """Return the bounds of a kernel on a GPU of its architecture."""
    device, steps, warps = gpu.device, kernel.steps, kernel.warps
    tiles = kernel.operations / kernel.work
    pipes = _pipes(steps, warps, device)
    read = sum(step.operands for step in steps) * warps
    pipes = {
        "tensor": kernel.operations / device.tensor_cores,
        **pipes,
        "shared": pipes["shared"] + (read + tiles * kernel.brought) / SHARED_BANDWIDTH,
        "L2": tiles * kernel.read / device.cache,
    }
    order, in_step = (_in_step(steps, n, device) for n in (min(SCHEDULERS, warps), warps))
    return Bound(pipes, order, max(in_step, *pipes.values()), kernel, gpu)


def _pipes(steps: Iterable[Step], warps: int, device: Device) -> dict[str, float]:
    """Return the cycles of the pipes that warps use themselves."""
    total: Counter[str] = Counter()
    for step in steps:
        total.update({name: getattr(step, name) for name in ("instructions", "exponentials", "fp32", "alu", "shared")})
    lanes = LANES // 2 if device.generation == 80 else LANES
    return {
        "issue": warps * total["instructions"] / min(SCHEDULERS, warps),
        "MUFU": warps * _WARP * total["exponentials"] / EXPONENTIALS,
        "FP32": warps * _WARP * total["fp32"] / lanes,
        "ALU": warps * _WARP * total["alu"] / _ALU_LANES,
        "shared": warps * total["shared"] / SHARED_BANDWIDTH,
    }


def _in_step(steps: tuple[Step, ...], warps: int, device: Device) -> float:
    """Return the cycles of an iteration in the long run, where matmuls queue and all warps wait for them together.
    Tiles have always arrived."""
    now = matmuls = 0.0  # when the warps are at the last event they waited for; when the last matmul is done
    since: list[Step] = []
    groups: list[float] = []
    ends = []
    for step in steps * 4:
        since.append(step)
        reached = now + max(_pipes(since, warps, device).values())
        taken = warps * max(step.operations / device.tensor_cores, step.operands / SHARED_BANDWIDTH)
        if step.event == "HMMA":
            now, since = max(reached, matmuls), []
            matmuls = now + taken
        elif step.event.startswith("HGMMA"):
            issued = now + _pipes(since, warps, device)["issue"]
            matmuls = max(issued, matmuls) + taken
            if step.event.endswith("."):
                groups.append(matmuls)
        elif step.event:
            unfinished = int(step.event.removeprefix("wait "))
            now, since = max(reached, *groups[: len(groups) - unfinished][-1:], 0.0), []
        else:
            now, since = reached, []
            ends.append(now)
    return ends[-1] - ends[-2]


def count_overlapped_exponentials(steps: Sequence[Step]) -> int:
    """Count the exponentials between the wait for all groups of matmuls but one and the wait for the last group.

    They overlap the matmuls of P V."""
    count, open_since = 0, False
    for step in steps:
        count += step.exponentials if open_since else 0
        if step.event.startswith("wait"):
            open_since = step.event == "wait 1"
    return count


def steps(loop: Sequence[Instruction]) -> tuple[Step, ...]:
    """Return the steps of a path through a loop."""
    complete_steps = []
    counts: Counter[str] = Counter()
    for instruction in loop:
        opcode = instruction.opcode
        counts["instructions"] += 1
        counts["exponentials"] += opcode == "MUFU"
        counts["fp32"] += opcode in _FP32
        counts["alu"] += opcode in _ALU
        counts["shared"] += _shared(instruction)
        if event := _event(instruction):
            operations, operands = instruction.operations, _operands(instruction)
            complete_steps.append(_step(counts, event, operations, operands))
            counts.clear()
    return (*complete_steps, _step(counts))


def _step(counts: Counter[str], event: str = "", operations: int = 0, operands: int = 0) -> Step:
    c = counts
    return Step(c["instructions"], c["exponentials"], c["fp32"], c["alu"], c["shared"], event, operations, operands)


def _event(instruction: Instruction) -> str:
    if instruction.opcode == "HGMMA":
        return "HGMMA." if "gsb0" in instruction.operands else "HGMMA"
    if instruction.opcode == "WARPGROUP" and instruction.modifiers[:1] == ("DEPBAR",):
        return f"wait {int(instruction.operands.split(', ')[1], 16)}"
    return "HMMA" if instruction.opcode == "HMMA" else ""


def _shared(instruction: Instruction) -> int:
    """Return the bytes, as whole cycles: an access of a warp takes one or more, however narrow."""
    if instruction.opcode in ("LDSM", "STSM"):
        return 128 * int(instruction.modifiers[-1] if instruction.modifiers[-1] in ("2", "4") else 1)
    if instruction.opcode in ("LDS", "STS"):
        return 512 if "128" in instruction.modifiers else 256 if "64" in instruction.modifiers else 128
    return 0


def _operands(instruction: Instruction) -> int:
    """Return a quarter of the bytes that wgmma reads in shared memory, 16 bits each.

    It reads B, and A where A is not in registers."""
    if instruction.opcode != "HGMMA":
        return 0
    m, n, k = map(int, instruction.modifiers[0].split("x"))
    in_registers = instruction.operands.split(", ")[1].startswith("R")
    return 2 * k * (n + (0 if in_registers else m)) // 4
