"""Where intermediate tensors lie during a call: what `passes/plan_memory.py` planned, at the page's sizes."""

from __future__ import annotations

import ast
import math
from collections.abc import Iterator
from dataclasses import dataclass

from .. import units
from ..arithmetic import size_class
from ..manifest import Manifest
from .dump import Dump
from .elements import Child, E, Node, folded, note, svg, table
from .script import Main, Sizes, Unknown, called, number
from .sizes import ChosenSizes
from .ticks import byte_ticks, ticks

_WIDTH, _HEIGHT, _LEFT, _BOTTOM = 1000.0, 320.0, 80.0, 36.0


@dataclass(frozen=True)
class Tensor:
    """A tensor that is alive from call `first` to call `last`: its bytes, its maker, and its place in a block; without
    one it has memory of its own."""

    name: str
    first: int
    last: int
    size: int
    maker: str
    block: str | None
    offset: int

    def __str__(self) -> str:
        return f"{self.name}, by {self.maker}: {units.size(self.size)}, calls {self.first} to {self.last}"


@dataclass(frozen=True)
class Plan:
    """The tensors whose sizes are known, how many have others, and the blocks, by name: their bytes, None if unknown,
    and the formula."""

    tensors: list[Tensor]
    unknown: int
    blocks: dict[str, tuple[int | None, str]]
    calls: int

    def alive(self, block: str | None) -> list[int]:
        """Bytes of the tensors in a block, or outside of blocks, that are needed during each call."""
        tensors = [t for t in self.tensors if t.block == block]
        return [sum(t.size for t in tensors if t.first <= at <= t.last) for at in range(self.calls)]


def memory(manifest: Manifest, dump: Dump, sizes: ChosenSizes) -> Iterator[Node]:
    try:
        before, after = dump.script("lower_call_tir").main, dump.script("plan_memory").main
    except Unknown:
        yield note("Not shown, as the dump's main function cannot be read.")
        return
    found = plan(before, after, sizes.of(manifest, before))
    yield E("p", _summary(found, f" at {sizes}" if sizes.values else "", manifest))
    if found.unknown:
        yield note(f"{found.unknown} tensors are not shown: their sizes depend on data.")
    rows: list[tuple[Child, ...]] = []
    for name, (size, formula) in found.blocks.items():
        asked = "" if size is None else units.size(size_class(size))
        rows.append((name, "depends on data" if size is None else units.size(size), asked, E("code", formula)))
    if rows:
        yield table(("block", "size", "asked of the allocator", "formula"), rows)
    for name, (size, _) in found.blocks.items():
        inside = [t for t in found.tensors if t.block == name]
        if size and inside:
            yield _chart(name, size, inside, found.alive(name))
    if found.tensors:
        headings = ("tensor", "made by", "size", "calls", "memory", "offset")
        lines = table(headings, map(_row, found.tensors), numbers=[2, 5])
        yield folded(f"All {len(found.tensors)} tensors", lines)


def _summary(found: Plan, at: str, manifest: Manifest) -> str:
    planned = [t for t in found.tensors if t.block is not None]
    blocks = sum(size or 0 for size, _ in found.blocks.values())
    peak = max(map(sum, zip(*map(found.alive, found.blocks))), default=0)
    outside = max(found.alive(None), default=0)
    weights = sum(weight.nbytes for weight in manifest.weights)
    apart = sum(t.size for t in planned)
    return (
        f"A call{at} needs {units.size(blocks + outside)} beside inputs and {units.size(weights)} of weights: "
        f"{units.size(blocks)} in blocks for {len(planned)} intermediate tensors, and up to {units.size(outside)} for "
        "outputs and other tensors with memory of their own. Of those in blocks at most "
        f"{units.size(peak)} are needed at once; side by side they would take {units.size(apart)}."
    )


def _row(tensor: Tensor) -> tuple[Child, ...]:
    place = (tensor.block, units.size(tensor.offset)) if tensor.block is not None else ("its own", "")
    return E("code", tensor.name), tensor.maker, units.size(tensor.size), f"{tensor.first} to {tensor.last}", *place


def plan(before: Main, after: Main, sizes: Sizes) -> Plan:
    """before says who needs which tensor when, and after where it lies. A name means the same tensor in both."""
    places, blocks = _places(after, sizes)
    owners: dict[str, set[str]] = {}  # the tensors whose memory a variable may be
    spans: dict[str, list[int]] = {}
    made: dict[str, ast.Call] = {}
    makers: dict[str, str] = {}
    call, calls = 0, len(before.calls())
    for statement in before.statements:
        used = {owner for name in _names(statement) for owner in owners.get(name, ())}
        if isinstance(statement, ast.AnnAssign) and isinstance(statement.target, ast.Name):
            name = statement.target.id
            allocation = _call_of(statement.value, "alloc_tensor")
            if allocation is None:
                owners[name] = used
                continue
            owners[name], spans[name], made[name] = {name}, [call, call], allocation
        elif (kernel := called(statement)) is not None:
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
            size = _bytes(made[name], sizes)
            block, offset = places.get(name, (None, ast.Constant(0)))
            place = 0 if block is None else number(offset, sizes)
        except Unknown:
            unknown += 1
            continue
        tensors.append(Tensor(name, first, last, size, makers.get(name, "-"), block, place))
    return Plan(tensors, unknown, blocks, calls)


def _places(after: Main, sizes: Sizes) -> tuple[dict[str, tuple[str, ast.expr]], dict[str, tuple[int | None, str]]]:
    """Of planned tensors the block and the offset, by name, and the blocks."""
    places: dict[str, tuple[str, ast.expr]] = {}
    blocks: dict[str, tuple[int | None, str]] = {}
    for statement in after.statements:
        if not isinstance(statement, ast.AnnAssign) or not isinstance(statement.target, ast.Name):
            continue
        name, value = statement.target.id, statement.value
        allocation = _call_of(value, "alloc_tensor")
        if allocation is not None and name.startswith("block"):
            (size,) = _shape_of(allocation)
            try:
                blocks[name] = number(size, sizes), ast.unparse(size)
            except Unknown:
                blocks[name] = None, ast.unparse(size)
            continue
        match value:
            case ast.Call(args=[ast.Constant(value="runtime.TVMTensorCreateView"), ast.Name(id=block), _, _, offset]):
                places[name] = block, offset
            case ast.Call(args=[ast.Constant(value="vm.builtin.ensure_zero_offset"), ast.Name(id=inside)]):
                places[name] = places[inside]
            case ast.Name(id=other) if other in places:
                places[name] = places[other]
    return places, blocks


def _chart(block: str, height: int, tensors: list[Tensor], alive: list[int]) -> Node:
    """A rectangle for each tensor: from its first call to its last, at its place; and a line: how many bytes are needed
    during each call."""
    calls = len(alive)
    across, up = (_WIDTH - _LEFT) / calls, (_HEIGHT - _BOTTOM - 10) / height
    ground = _HEIGHT - _BOTTOM
    parts: list[Node] = []
    for value in byte_ticks(height, 6):
        y = ground - value * up
        parts.append(E("line", x1=_LEFT, x2=_WIDTH, y1=f"{y:.1f}", y2=f"{y:.1f}", class_="grid"))
        parts.append(E("text", units.size(value), x=_LEFT - 6, y=f"{y + 4:.1f}", text_anchor="end"))
    for value in ticks(calls, 8):
        x = _LEFT + value * across
        parts.append(E("text", str(value), x=f"{x:.1f}", y=ground + 16, text_anchor="middle"))
    for k, t in enumerate(tensors):
        box = {"x": _LEFT + t.first * across, "y": ground - (t.offset + t.size) * up}
        box |= {"width": (t.last - t.first + 1) * across, "height": max(t.size * up, 0.5)}
        shown = {key: f"{value:.2f}" for key, value in box.items()}
        parts.append(E("rect", E("title", str(t)), **shown, class_=f"tensor hue{k % 6}"))
    steps = "".join(f"H{_LEFT + at * across:.2f}V{ground - bytes_ * up:.2f}" for at, bytes_ in enumerate(alive))
    parts.append(E("path", d=f"M{_LEFT} {ground}{steps}H{_WIDTH}", class_="roof"))
    parts.append(E("text", "call", x=_WIDTH - 2, y=ground + 30, text_anchor="end"))
    caption = f"{block}: which tensor has which bytes of it during which calls; the line is how many are needed"
    return E("figure", svg(_WIDTH, _HEIGHT, parts, label=caption), E("figcaption", caption))


def _names(statement: ast.stmt) -> Iterator[str]:
    """The variables that a statement reads."""
    value = statement.value if isinstance(statement, ast.AnnAssign) else statement
    for node in ast.walk(value) if value is not None else ():
        if isinstance(node, ast.Name):
            yield node.id


def _call_of(value: ast.expr | None, name: str) -> ast.Call | None:
    match value:
        case ast.Call(func=ast.Attribute(attr=found)) if found == name:
            return value
    return None


def _shape_of(allocation: ast.Call) -> list[ast.expr]:
    match allocation.args[0]:
        case ast.Call(args=[ast.List(elts=dims)]):
            return dims
    raise Unknown


def _bytes(allocation: ast.Call, sizes: Sizes) -> int:
    match allocation.args[1]:
        case ast.Call(args=[ast.Constant(value=str(dtype))]):
            bits = int("".join(filter(str.isdigit, dtype.partition("_")[0])) or 8)
            return math.prod(number(dim, sizes) for dim in _shape_of(allocation)) * max(1, bits // 8)
    raise Unknown
