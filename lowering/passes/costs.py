"""What a kernel costs: floating-point operations and bytes, as expressions of the sizes of its arguments.

They are read off the function before it is scheduled, which says what is computed and not how. Operations are those of
floating-point numbers that it names, a function such as exp counting as one. Only useful work counts: a matmul, also of
integers, has two operations for each pair of elements, what its operands are made of counts once for each element, and
dequantization not at all. Of a recurrence the matmuls with its states count. Bytes are those of the arguments' elements
that it needs, each once: of a table that is gathered from the rows that are asked for, of a matmul all.
"""

from __future__ import annotations

import math

from tvm import DataType, ir, s_tir, tirx
from tvm.ir import prim

from ..attention.problem import ATTRIBUTE, AttentionProblem
from ..manifest import KernelSpec
from ..profiling.expected import rate
from ..tensorir.blocks import is_reduction
from ..tensorir.expressions import Expr, children, is_float, is_function, loads, walk
from ..tensorir.facts import Facts
from ..tensorir.recurrence import ATTRIBUTE as RECURRENCE
from ..tensorir.recurrence import Recurrence

_OPERATIONS = prim.Add | prim.Sub | prim.Mul | prim.Div | prim.Max | prim.Min

_SIGNS = {prim.Add: "+", prim.Sub: "-", prim.Mul: "*", prim.FloorDiv: "//", prim.FloorMod: "%"}


# What texts use beside the sizes: KernelSpec.
_RESERVED = ("min", "max", "volume", "pairs", "unseen")


class _Unknown(Exception):
    """A number that does not follow from the arguments' sizes."""


def kernel_spec(name: str, func: tirx.PrimFunc, schedule: str) -> KernelSpec:
    """What the manifest says of an unscheduled function that the rule `schedule` has an answer for."""
    names = _Names(func)
    arguments = tuple(tuple(map(names.dim, p.shape)) if tirx.is_buffer_var(p) else names.dim(p) for p in func.params)
    if func.attrs is not None and ATTRIBUTE in func.attrs:
        problem = AttentionProblem.from_json(func.attrs[ATTRIBUTE])
        flops, size = _attention(problem, func)
        return KernelSpec(name, "attention", schedule, arguments, flops, size, rate("attention", schedule))
    if func.attrs is not None and RECURRENCE in func.attrs:
        return KernelSpec(
            name, "other", schedule, arguments, _recurrence(func, names), "volume", rate("other", schedule)
        )
    counter = _Counter(func)
    try:
        counter.statement(func.body, tirx.const(1, "int64"))
        flops, size = names.text(counter.simplify(counter.operations)), names.text(counter.bytes())
    except _Unknown:
        flops, size = "0", "volume"
    kind = "matmul" if counter.has_matmul else "other"
    return KernelSpec(name, kind, schedule, arguments, flops, size, rate(kind, schedule))


def _attention(problem: AttentionProblem, func: tirx.PrimFunc) -> tuple[str, str]:
    """Of the keys and values, with their scales, those that any query sees are needed."""
    buffers, layout = dict(zip(problem.parameters(), func.params)), problem.layout
    names = ("kv", "kv") if layout.joint else ("k", "v")
    dims = problem.head_dim, problem.v_head_dim
    row = sum(dim * _itemsize(buffers[name]) // layout.packing for name, dim in zip(names, dims))
    if layout.codec is not None and layout.codec.group:
        scales = (dim // layout.codec.group * _itemsize(buffers[f"{name}_scale"]) for name, dim in zip(names, dims))
        row += sum(scales)
    flops = f"{2 * (problem.head_dim + problem.v_head_dim)} * pairs"
    return flops, f"volume - {row} * unseen"


def _recurrence(func: tirx.PrimFunc, names: _Names) -> str:
    record = Recurrence.from_json(str(func.attrs[RECURRENCE]))
    steps, batches, _ = func.params[0].shape
    return f"{2 * record.gates * record.units**2} * {names.text(steps)} * {names.text(batches)}"


class _Names:
    """Sizes as text in Python's syntax, each variable under a name of its own."""

    def __init__(self, func: tirx.PrimFunc) -> None:
        self._known: dict[tirx.Var, str] = {}
        for p in func.params:
            for node in (n for e in (p.shape if tirx.is_buffer_var(p) else [p]) for n in walk(e)):
                if isinstance(node, tirx.Var) and node not in self._known:
                    self._known[node] = self._free(node.name)

    def _free(self, name: str) -> str:
        taken, free, k = {*self._known.values(), *_RESERVED}, name, 1
        while free in taken:
            free, k = f"{name}_{k}", k + 1
        return free

    def dim(self, expr: Expr) -> str:
        """For the reader, and for names."""
        try:
            return self.text(expr)
        except _Unknown:
            return "?"

    def text(self, expr: Expr) -> str:
        """Raises _Unknown for what is no arithmetic of sizes."""
        if isinstance(expr, tirx.Var):
            if expr not in self._known:
                raise _Unknown
            return self._known[expr]
        if isinstance(expr, prim.IntImm):
            return str(expr.value)
        if isinstance(expr, prim.Cast):
            return self.text(expr.value)
        if type(expr) in _SIGNS:
            bare = isinstance(expr, prim.Add) or (isinstance(expr, prim.Mul) and isinstance(expr.a, prim.Mul))
            a, b = self.text(expr.a), self.text(expr.b)
            a = f"({a})" if " " in a and not bare else a
            return f"{a} {_SIGNS[type(expr)]} " + (f"({b})" if " " in b else b)
        if isinstance(expr, prim.Min | prim.Max):
            return f"{'min' if isinstance(expr, prim.Min) else 'max'}({self.text(expr.a)}, {self.text(expr.b)})"
        raise _Unknown


class _Counter:
    """Counts on a walk over the statements of a function."""

    def __init__(self, func: tirx.PrimFunc) -> None:
        self.arguments = [p for p in func.params if tirx.is_buffer_var(p)]
        self.operations: Expr = _zero()
        self.touched: dict[tirx.Buffer, Expr] = {}
        self.has_matmul = False  # whether any sum of products of different elements is among it: a matmul
        self.facts = Facts.of(func)
        for size in self.facts.largest:
            self.facts.analyzer.bind(size, ir.Range(0, 1 << 40), allow_override=True)
        self._views: dict[tirx.Buffer, tirx.Buffer] = {}  # of arguments
        self._extents: dict[tirx.Var, Expr] = {}  # of loops
        self._made_of: dict[tirx.Var, set[tirx.Var]] = {}  # the loops that other variables depend on

    def simplify(self, expr: Expr) -> Expr:
        return self.facts.simplify(expr)

    def bytes(self) -> Expr:
        total = _zero()
        for buffer, count in self.touched.items():
            count, whole = self.simplify(count), self.simplify(_elements(buffer))
            needed = whole if self.facts.can_prove(count >= whole) else tirx.min(count, whole)
            total = total + needed * _itemsize(buffer)
        return self.simplify(total)

    def statement(self, stmt: tirx.Stmt, points: Expr) -> None:
        """Counts a statement that is executed `points` times."""
        match stmt:
            case tirx.SeqStmt():
                for inner in stmt.seq:
                    self.statement(inner, points)
            case tirx.For():
                self._extents[stmt.loop_var] = stmt.extent
                self.statement(stmt.body, points * stmt.extent)
            case s_tir.SBlockRealize():
                for iter_var, value in zip(stmt.block.iter_vars, stmt.iter_values):
                    self._made_of[iter_var.var] = self._loops(value)
                reduces = any(map(is_reduction, stmt.block.iter_vars))
                store = stmt.block.body
                if reduces and isinstance(store, tirx.BufferStore) and any(map(self._is_matmul, walk(store.value))):
                    self.has_matmul = True
                    self.touch(store.buffer, store.indices)
                    self.matmul(store.value, points)
                else:
                    self.statement(store, points)
            case tirx.Bind():
                self._made_of[stmt.var] = self._loops(stmt.value)
                self.value(stmt.value, points)
            case tirx.IfThenElse():
                self.value(stmt.condition, points)
                self.branches([stmt.then_case, stmt.else_case], points)
            case tirx.BufferStore():
                self.touch(stmt.buffer, stmt.indices)
                for expr in (stmt.value, *stmt.indices):
                    self.value(expr, points)
            case tirx.AttrStmt():
                self.statement(stmt.body, points)
            case tirx.Evaluate():
                self.value(stmt.value, points)
            case tirx.DeclBuffer():
                for argument in self.arguments:
                    if any(argument.same_as(node) for node in walk(stmt.data)):
                        self._views[stmt.buffer] = argument
            case tirx.AllocBuffer():
                pass
            case _:  # loops until something holds, and what else no sizes tell
                raise _Unknown

    def branches(self, branches: list[tirx.Stmt | None], points: Expr) -> None:
        """Counts the larger one."""
        operations, touched = self.operations, self.touched
        counted = []
        for branch in branches:
            self.operations, self.touched = operations, dict(touched)
            if branch is not None:
                self.statement(branch, points)
            counted.append((self.operations, self.touched))
        (operations, touched), (others, touched_else) = counted
        self.operations = self.simplify(tirx.max(operations, others))
        for buffer, count in touched_else.items():
            touched[buffer] = self.simplify(tirx.max(touched.get(buffer, _zero()), count))
        self.touched = touched

    def value(self, expr: Expr, points: Expr) -> None:
        count = 0
        for node in walk(expr):
            if isinstance(node, ir.TensorLoad):
                self.touch(node.source, node.indices)
            else:
                count += _is_operation(node)
        if count:
            self.operations = self.operations + points * count

    def matmul(self, value: Expr, points: Expr) -> None:
        """Counts what is accumulated at each point, and the operands of a multiplication once for each element."""
        pending = [value]
        while pending:
            node = pending.pop()
            if isinstance(node, ir.TensorLoad):
                self.touch(node.source, node.indices)
            elif _is_operation(node) or (isinstance(node, _OPERATIONS) and node.ty == value.ty):
                self.operations = self.operations + points
            if self._is_matmul(node):
                self.operand(node.a)
                self.operand(node.b)
            else:
                pending += children(node)

    def operand(self, value: Expr) -> None:
        """Counts an operand of a multiplication once for each element, and nothing where it is dequantized."""
        nodes = list(walk(value))
        for load in loads(value):
            self.touch(load.source, load.indices)
        if any(map(_is_dequantization, nodes)):
            return
        for node in filter(_is_operation, nodes):
            self.operations = self.operations + self._points(self._loops(node))

    def touch(self, buffer: tirx.Buffer, indices: list[Expr]) -> None:
        buffer = self._views.get(buffer, buffer)
        if any(buffer.same_as(argument) for argument in self.arguments):
            points = self._points(set().union(*map(self._loops, indices)))
            self.touched[buffer] = self.touched.get(buffer, _zero()) + points

    def _points(self, loops: set[tirx.Var]) -> Expr:
        """Return how many values these loops have together."""
        points = tirx.const(1, "int64")
        for loop in sorted(loops, key=lambda var: var.name):
            points = points * self._extents[loop]
        return points

    def _loops(self, expr: Expr) -> set[tirx.Var]:
        """The loops that an expression depends on."""
        found: set[tirx.Var] = set()
        for node in walk(expr):
            if isinstance(node, tirx.Var):
                found |= {node} if node in self._extents else self._made_of.get(node, set())
        return found

    def _is_matmul(self, node: Expr) -> bool:
        """Whether elements of two tensors at different indices are multiplied here."""
        if not isinstance(node, prim.Mul):
            return False
        a, b = ({frozenset(self._loops(load)) for load in loads(operand)} for operand in (node.a, node.b))
        return bool(a and b and a != b)


def _is_operation(node: Expr) -> bool:
    """Whether a node is an operation of floating-point numbers that counts."""
    return is_float(node) and (isinstance(node, _OPERATIONS) or is_function(node))


def _is_dequantization(node: Expr) -> bool:
    """Whether stored integers become floating-point numbers here."""
    if not isinstance(node, prim.Cast) or not is_float(node) or is_float(node.value):
        return False
    return str(node.value.ty) != "bool" and any(True for _ in loads(node.value))


def _zero() -> Expr:
    return tirx.const(0, "int64")


def _itemsize(buffer: tirx.Buffer) -> int:
    return math.ceil(DataType(buffer.dtype).bits / 8)


def _elements(buffer: tirx.Buffer) -> Expr:
    return math.prod(buffer.shape, start=tirx.const(1, "int64"))
