"""Parse machine code (SASS) from nvdisasm: instructions, control flow, and the loop that multiplies matrices."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass, field

_SECTION = re.compile(r"\.section\s+\.text\.(\S+?),")
_LABEL = re.compile(r"(\.L_x_\d+):")
_INSTRUCTION = re.compile(r"/\*[0-9a-f]{4,}\*/\s+(?:(@!?U?P\w+)\s+)*([A-Z][A-Z0-9_]*)((?:\.\w+)*)\s*(.*?)\s*;")
_TARGET = re.compile(r"`\((\.L_x_\d+)\)")


@dataclass(frozen=True)
class Instruction:
    """An instruction, as `@P0 HGMMA.64x128x16.F32 R24, gdesc[UR32], RZ`."""

    opcode: str
    """Without modifiers: HGMMA."""
    modifiers: tuple[str, ...] = ()
    operands: str = ""
    guarded: bool = False
    """Whether a predicate, which may be false, decides if it has an effect."""

    @property
    def operations(self) -> int:
        """Return the multiplications and additions of a matmul by one warp, 0 for any other instruction."""
        if self.opcode == "HGMMA":  # of a warpgroup, that is four warps
            m, n, k = map(int, self.modifiers[0].split("x"))
            return 2 * m * n * k // 4
        if self.opcode == "HMMA":
            return 2 * 16 * 8 * {"16816": 16, "1688": 8}[self.modifiers[0]]
        return 0


@dataclass(frozen=True)
class Function:
    """The instructions and labels of a kernel."""

    name: str
    instructions: list[Instruction] = field(default_factory=list)
    labels: dict[str, int] = field(default_factory=dict)
    """Where each label stands: before which instruction."""


@dataclass(frozen=True)
class Loop:
    """A natural loop, as numbers of instructions."""

    header: int
    body: frozenset[int]
    path: tuple[int, ...]
    """Once through it: of all ways from the header back there, one with the most matmuls, of these with the most
    copies into shared memory, and of these a shortest. What it leaves out is code for tiles that need a mask, and the
    last turns, which copy nothing; inner loops, which wait, are over at once."""


def read(text: str) -> list[Function]:
    """Return the kernels of a listing by `nvdisasm -c`."""
    functions: list[Function] = []
    for line in text.splitlines():
        if section := _SECTION.search(line):
            functions.append(Function(section[1]))
        elif label := _LABEL.match(line):
            functions[-1].labels[label[1]] = len(functions[-1].instructions)
        elif functions and (match := _INSTRUCTION.search(line)):
            guard, opcode, modifiers, operands = match.groups()
            functions[-1].instructions.append(
                Instruction(opcode, tuple(modifiers.split(".")[1:]), operands, guard is not None)
            )
    return functions


def main_loop(functions: list[Function]) -> list[Instruction]:
    """Return the path through the loop over tiles, or steps along k.

    It is the innermost loop with the fewest instructions for a matmul, that for tiles without mask code. The path is
    empty where no loop multiplies."""
    candidates = []
    for function in functions:
        for loop in _multiplying(function):
            cost = len(loop.path) / _operations(function, loop.path)
            candidates.append((cost, [function.instructions[n] for n in loop.path]))
    return min(candidates, key=lambda candidate: candidate[0])[1] if candidates else []


def multiplying(function: Function) -> list[frozenset[int]]:
    """Return the innermost loops with matmuls, all of their instructions by number."""
    return [loop.body for loop in _multiplying(function)]


def _multiplying(function: Function) -> list[Loop]:
    candidates = [loop for loop in loops(function) if _operations(function, loop.path)]
    return [loop for loop in candidates if not any(other.body < loop.body for other in candidates)]


def loops(function: Function) -> list[Loop]:
    """Return the natural loops of reducible control flow, which compilers emit. A header has one loop."""
    order, back = _depth_first(function)
    before: dict[int, list[int]] = {n: [] for n in order}
    for n in order:
        for successor in successors(function, n):
            before[successor].append(n)
    latches: dict[int, list[int]] = {}
    for latch, header in back:
        latches.setdefault(header, []).append(latch)
    natural_loops = []
    for header, ends in latches.items():
        body, waiting = {header}, list(ends)
        while waiting:
            if (n := waiting.pop()) not in body:
                body.add(n)
                waiting += before[n]
        path = _path(function, header, ends, [n for n in order if n in body], before, back)
        natural_loops.append(Loop(header, frozenset(body), path))
    return natural_loops


def successors(function: Function, n: int) -> list[int]:
    """Return the instructions that may follow."""
    instruction = function.instructions[n]
    following = [n + 1] if n + 1 < len(function.instructions) else []
    target = _TARGET.search(instruction.operands)
    if instruction.opcode in ("BRA", "CALL") and target:
        # Where warps leave a loop together, ptxas jumps by CALL, and nothing returns; functions have other names.
        # Before BRA's target there may be one more predicate, or a register of threads that have parted (BRA.DIV).
        always = not instruction.guarded and instruction.operands.startswith("`")
        return [function.labels[target[1]], *([] if always else following)]
    if instruction.opcode in ("EXIT", "RET", "BRX", "KILL"):
        return following if instruction.guarded else []
    if instruction.opcode == "BSYNC":
        return [_meeting(function, n)] if not instruction.guarded else [_meeting(function, n), *following]
    return following


def _meeting(function: Function, n: int) -> int:
    """Return where threads that wait at BSYNC go on together: an earlier BSSY names it for the same barrier."""
    barrier = function.instructions[n].operands
    for earlier in reversed(function.instructions[:n]):
        if earlier.opcode == "BSSY" and earlier.operands.startswith(f"{barrier},"):
            target = _TARGET.search(earlier.operands)
            assert target is not None, earlier
            return function.labels[target[1]]
    return n + 1


def _depth_first(function: Function) -> tuple[list[int], set[tuple[int, int]]]:
    """Return reachable instructions in topological order, and the jumps that close loops."""
    finished: list[int] = []
    back: set[tuple[int, int]] = set()
    under_way, seen = {0}, {0}
    stack: list[tuple[int, Iterator[int]]] = [(0, iter(successors(function, 0)))]
    while stack:
        n, rest = stack[-1]
        for successor in rest:
            if successor in under_way:
                back.add((n, successor))
            elif successor not in seen:
                seen.add(successor)
                under_way.add(successor)
                stack.append((successor, iter(successors(function, successor))))
                break
        else:
            stack.pop()
            under_way.remove(n)
            finished.append(n)
    return finished[::-1], back


def _path(
    function: Function,
    header: int,
    latches: list[int],
    order: list[int],
    before: dict[int, list[int]],
    back: set[tuple[int, int]],
) -> tuple[int, ...]:
    """Return the path from the header to a latch through instructions in `order`."""
    best: dict[int, tuple[int, int, int, int]] = {}  # operations, copies, minus instructions, the previous instruction
    for n in order:
        predecessors = [(*best[m][:3], m) for m in before[n] if m in best and (m, n) not in back]
        operations, copies, negative_length, previous = (0, 0, 0, -1) if n == header else max(predecessors)
        here = function.instructions[n]
        best[n] = (operations + here.operations, copies + (here.opcode == "LDGSTS"), negative_length - 1, previous)
    n = max(latches, key=lambda latch: best[latch][:3])
    path = [n]
    while (n := best[n][3]) >= 0:
        path.append(n)
    return tuple(path[::-1])


def _operations(function: Function, path: tuple[int, ...]) -> int:
    return sum(function.instructions[n].operations for n in path)
