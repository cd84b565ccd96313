"""Memory of intermediate tensors during a call, as `passes/memory/plan_memory.py` planned it, at the sizes of the
page."""

from __future__ import annotations

import ast
import math
from collections.abc import Iterator
from dataclasses import dataclass

from .. import units
from ..arithmetic import round_to_size_class
from ..manifest import Manifest
from .dump import CompilationDump
from .elements import Child, E, Node, make_details, make_note, make_svg, make_table
from .script import MainFunction, Sizes, UnknownSizeError, evaluate_size, read_kernel_call
from .sizes import ChosenSizes
from .ticks import list_byte_ticks, list_ticks

_WIDTH, _HEIGHT, _LEFT, _BOTTOM = 1000.0, 320.0, 80.0, 36.0


@dataclass(frozen=True)
class PlannedTensor:
    """A tensor that is live from call `first` to call `last`: its bytes, the kernel that writes it, and its location.

    `offset` is the position in `block`. Without a block the tensor has an allocation of its own.
    """

    name: str
    first: int
    last: int
    size: int
    maker: str
    block: str | None
    offset: int

    def __str__(self) -> str:
        return f"{self.name}, by {self.maker}: {units.format_size(self.size)}, calls {self.first} to {self.last}"


@dataclass(frozen=True)
class MemoryPlan:
    """The tensors of provable size, the number of the others (`unknown`), and the blocks by name.

    A block has its bytes, None if they depend on data, and their formula.
    """

    tensors: list[PlannedTensor]
    unknown: int
    blocks: dict[str, tuple[int | None, str]]
    calls: int

    def list_live_bytes(self, block: str | None) -> list[int]:
        """Return for each call the bytes of live tensors in a block, or outside of blocks."""
        tensors = [t for t in self.tensors if t.block == block]
        return [sum(t.size for t in tensors if t.first <= call_number <= t.last) for call_number in range(self.calls)]


def render_memory(manifest: Manifest, dump: CompilationDump, sizes: ChosenSizes) -> Iterator[Node]:
    try:
        before, after = dump.read_script("lower_call_tir").main, dump.read_script("plan_memory").main
    except UnknownSizeError:
        yield make_note("Not shown, as the dump's main function cannot be read.")
        return
    memory_plan = read_plan(before, after, sizes.map_names(manifest, before))
    yield E("p", _summarize(memory_plan, f" at {sizes}" if sizes.values else "", manifest))
    if memory_plan.unknown:
        yield make_note(f"{memory_plan.unknown} tensors are not shown: their sizes depend on data.")
    rows: list[tuple[Child, ...]] = []
    for name, (size, formula) in memory_plan.blocks.items():
        allocated = "" if size is None else units.format_size(round_to_size_class(size))
        rows.append(
            (name, "depends on data" if size is None else units.format_size(size), allocated, E("code", formula))
        )
    if rows:
        yield make_table(("block", "size", "asked of the allocator", "formula"), rows)
    for name, (size, _) in memory_plan.blocks.items():
        block_tensors = [t for t in memory_plan.tensors if t.block == name]
        if size and block_tensors:
            yield _draw_block(name, size, block_tensors, memory_plan.list_live_bytes(name))
    if memory_plan.tensors:
        headings = ("tensor", "made by", "size", "calls", "memory", "offset")
        lines = make_table(headings, map(_format_row, memory_plan.tensors), numbers=[2, 5])
        yield make_details(f"All {len(memory_plan.tensors)} tensors", lines)


def _summarize(memory_plan: MemoryPlan, suffix: str, manifest: Manifest) -> str:
    planned = [t for t in memory_plan.tensors if t.block is not None]
    blocks = sum(size or 0 for size, _ in memory_plan.blocks.values())
    peak = max(map(sum, zip(*map(memory_plan.list_live_bytes, memory_plan.blocks))), default=0)
    outside = max(memory_plan.list_live_bytes(None), default=0)
    weights = sum(weight.nbytes for weight in manifest.weights)
    separate = sum(t.size for t in planned)
    return (
        f"A call{suffix} needs {units.format_size(blocks + outside)} beside inputs and "
        f"{units.format_size(weights)} of weights: "
        f"{units.format_size(blocks)} in blocks for {len(planned)} intermediate tensors, and up to "
        f"{units.format_size(outside)} for "
        "outputs and other tensors with memory of their own. Of those in blocks at most "
        f"{units.format_size(peak)} are needed at once; side by side they would take {units.format_size(separate)}."
    )


def _format_row(tensor: PlannedTensor) -> tuple[Child, ...]:
    location = (tensor.block, units.format_size(tensor.offset)) if tensor.block is not None else ("its own", "")
    return (
        E("code", tensor.name),
        tensor.maker,
        units.format_size(tensor.size),
        f"{tensor.first} to {tensor.last}",
        *location,
    )


def read_plan(before: MainFunction, after: MainFunction, sizes: Sizes) -> MemoryPlan:
    """Return the memory plan.

    `before` has the live ranges of tensors, and `after` their locations. A name means the same tensor in both.
    """
    placements, blocks = _read_placements(after, sizes)
    owners: dict[str, set[str]] = {}  # the tensors that a variable may alias
    spans: dict[str, list[int]] = {}
    allocations: dict[str, ast.Call] = {}
    makers: dict[str, str] = {}
    call, calls = 0, len(before.calls())
    for statement in before.statements:
        used = {owner for name in _list_names(statement) for owner in owners.get(name, ())}
        if isinstance(statement, ast.AnnAssign) and isinstance(statement.target, ast.Name):
            name = statement.target.id
            allocation = _match_call(statement.value, "alloc_tensor")
            if allocation is None:
                owners[name] = used
                continue
            owners[name], spans[name], allocations[name] = {name}, [call, call], allocation
        elif (kernel := read_kernel_call(statement)) is not None:
            for owner in used:
                makers.setdefault(owner, kernel.kernel)
                spans[owner][1] = call
            call += 1
        elif isinstance(statement, ast.Return):
            for owner in used:
                spans[owner][1] = calls - 1
    tensors, unknown = [], 0
    for name, (first, last) in spans.items():
        try:
            size = _count_bytes(allocations[name], sizes)
            block, offset = placements.get(name, (None, ast.Constant(0)))
            byte_offset = 0 if block is None else evaluate_size(offset, sizes)
        except UnknownSizeError:
            unknown += 1
            continue
        tensors.append(PlannedTensor(name, first, last, size, makers.get(name, "-"), block, byte_offset))
    return MemoryPlan(tensors, unknown, blocks, calls)


def _read_placements(
    after: MainFunction, sizes: Sizes
) -> tuple[dict[str, tuple[str, ast.expr]], dict[str, tuple[int | None, str]]]:
    """Return block and offset of planned tensors, by name, and the blocks."""
    placements: dict[str, tuple[str, ast.expr]] = {}
    blocks: dict[str, tuple[int | None, str]] = {}
    for statement in after.statements:
        if not isinstance(statement, ast.AnnAssign) or not isinstance(statement.target, ast.Name):
            continue
        name, value = statement.target.id, statement.value
        allocation = _match_call(value, "alloc_tensor")
        if allocation is not None and name.startswith("block"):
            (size,) = _read_shape(allocation)
            try:
                blocks[name] = evaluate_size(size, sizes), ast.unparse(size)
            except UnknownSizeError:
                blocks[name] = None, ast.unparse(size)
            continue
        match value:
            case ast.Call(args=[ast.Constant(value="runtime.TVMTensorCreateView"), ast.Name(id=block), _, _, offset]):
                placements[name] = block, offset
            case ast.Call(args=[ast.Constant(value="vm.builtin.ensure_zero_offset"), ast.Name(id=view)]):
                placements[name] = placements[view]
            case ast.Name(id=source) if source in placements:
                placements[name] = placements[source]
    return placements, blocks


def _draw_block(block: str, height: int, tensors: list[PlannedTensor], alive: list[int]) -> Node:
    """Return a drawing of a block: a rectangle for each tensor, and a line of the live bytes.

    A rectangle extends from the first call of a tensor to its last, at its offset.
    """
    calls = len(alive)
    across, up = (_WIDTH - _LEFT) / calls, (_HEIGHT - _BOTTOM - 10) / height
    ground = _HEIGHT - _BOTTOM
    shapes: list[Node] = []
    for value in list_byte_ticks(height, 6):
        y = ground - value * up
        shapes.append(E("line", x1=_LEFT, x2=_WIDTH, y1=f"{y:.1f}", y2=f"{y:.1f}", class_="grid"))
        shapes.append(E("text", units.format_size(value), x=_LEFT - 6, y=f"{y + 4:.1f}", text_anchor="end"))
    for value in list_ticks(calls, 8):
        x = _LEFT + value * across
        shapes.append(E("text", str(value), x=f"{x:.1f}", y=ground + 16, text_anchor="middle"))
    for k, t in enumerate(tensors):
        box = {"x": _LEFT + t.first * across, "y": ground - (t.offset + t.size) * up}
        box |= {"width": (t.last - t.first + 1) * across, "height": max(t.size * up, 0.5)}
        shown = {key: f"{value:.2f}" for key, value in box.items()}
        shapes.append(E("rect", E("title", str(t)), **shown, class_=f"tensor hue{k % 6}"))
    steps = "".join(
        f"H{_LEFT + call_number * across:.2f}V{ground - bytes_ * up:.2f}" for call_number, bytes_ in enumerate(alive)
    )
    shapes.append(E("path", d=f"M{_LEFT} {ground}{steps}H{_WIDTH}", class_="roof"))
    shapes.append(E("text", "call", x=_WIDTH - 2, y=ground + 30, text_anchor="end"))
    caption = f"{block}: which tensor has which bytes of it during which calls; the line is how many are needed"
    return E("figure", make_svg(_WIDTH, _HEIGHT, shapes, label=caption), E("figcaption", caption))


def _list_names(statement: ast.stmt) -> Iterator[str]:
    """Yield the variables that a statement reads."""
    value = statement.value if isinstance(statement, ast.AnnAssign) else statement
    for node in ast.walk(value) if value is not None else ():
        if isinstance(node, ast.Name):
            yield node.id


def _match_call(value: ast.expr | None, name: str) -> ast.Call | None:
    match value:
        case ast.Call(func=ast.Attribute(attr=attribute)) if attribute == name:
            return value
    return None


def _read_shape(allocation: ast.Call) -> list[ast.expr]:
    match allocation.args[0]:
        case ast.Call(args=[ast.List(elts=dims)]):
            return dims
    raise UnknownSizeError


def _count_bytes(allocation: ast.Call, sizes: Sizes) -> int:
    match allocation.args[1]:
        case ast.Call(args=[ast.Constant(value=str(dtype))]):
            bits = int("".join(filter(str.isdigit, dtype.partition("_")[0])) or 8)
            return math.prod(evaluate_size(dim, sizes) for dim in _read_shape(allocation)) * max(1, bits // 8)
    raise UnknownSizeError
