"""Cost of a kernel: floating-point operations and bytes, as expressions of the sizes of its arguments.

Costs are read off the function before it is scheduled, which describes the computation and not its implementation.
Operations are the floating-point operations in it; a function such as exp counts as one. Only useful work counts. A
matmul, also of integers, has two operations for each pair of elements. The computation of its operands counts once for
each element, and dequantization does not count. For a recurrence the matmuls with its states count. Bytes are those of
the required elements of arguments, each once: the gathered rows of a table, all elements of a matmul.
"""

from __future__ import annotations

import math

from tvm import DataType, ir, s_tir, tirx
from tvm.ir import prim

from ..attention.record.problem import ATTRIBUTE, AttentionProblem
from ..manifest import KernelSpec
from ..profiling.expected import lookup_rate
from ..tensorir.blocks import is_reduction
from ..tensorir.expressions import Expr, children, is_float, is_function, loads, walk
from ..tensorir.facts import Facts
from ..tensorir.recurrence import ATTRIBUTE as RECURRENCE
from ..tensorir.recurrence import Recurrence

_OPERATIONS = prim.Add | prim.Sub | prim.Mul | prim.Div | prim.Max | prim.Min

_SIGNS = {prim.Add: "+", prim.Sub: "-", prim.Mul: "*", prim.FloorDiv: "//", prim.FloorMod: "%"}


# Names in texts other than sizes: see KernelSpec.
_RESERVED = ("min", "max", "volume", "pairs", "unseen")


class _UnknownSizeError(Exception):
    """A number that does not follow from the arguments' sizes."""


def make_kernel_spec(name: str, func: tirx.PrimFunc, schedule: str) -> KernelSpec:
    """Return the manifest's description of an unscheduled function that the rule `schedule` schedules."""
    names = _SizeNames(func)
    arguments = tuple(
        tuple(map(names.to_label, p.shape)) if tirx.is_buffer_var(p) else names.to_label(p) for p in func.params
    )
    if func.attrs is not None and ATTRIBUTE in func.attrs:
        problem = AttentionProblem.from_json(func.attrs[ATTRIBUTE])
        flops, size = _attention(problem, func)
        return KernelSpec(name, "attention", schedule, arguments, flops, size, lookup_rate("attention", schedule))
    if func.attrs is not None and RECURRENCE in func.attrs:
        return KernelSpec(
            name, "other", schedule, arguments, _recurrence(func, names), "volume", lookup_rate("other", schedule)
        )
    counter = _CostCounter(func)
    try:
        counter.count_statement(func.body, tirx.const(1, "int64"))
        flops, size = names.to_text(counter.simplify(counter.operations)), names.to_text(counter.count_bytes())
    except _UnknownSizeError:
        flops, size = "0", "volume"
    kind = "matmul" if counter.has_matmul else "other"
    return KernelSpec(name, kind, schedule, arguments, flops, size, lookup_rate(kind, schedule))


def _attention(problem: AttentionProblem, func: tirx.PrimFunc) -> tuple[str, str]:
    """Return the operations and bytes: of keys and values, with their scales, only those that a query sees count."""
    buffers, layout = dict(zip(problem.parameters(), func.params)), problem.layout
    kv_names = ("kv", "kv") if layout.is_joint else ("k", "v")
    dims = problem.head_dim, problem.v_head_dim
    row = sum(dim * _itemsize(buffers[name]) // layout.packing for name, dim in zip(kv_names, dims))
    if layout.quantization is not None and layout.quantization.group:
        scales = (
            dim // layout.quantization.group * _itemsize(buffers[f"{name}_scale"]) for name, dim in zip(kv_names, dims)
        )
        row += sum(scales)
    flops = f"{2 * (problem.head_dim + problem.v_head_dim)} * pairs"
    return flops, f"volume - {row} * unseen"


def _recurrence(func: tirx.PrimFunc, names: _SizeNames) -> str:
    record = Recurrence.from_json(str(func.attrs[RECURRENCE]))
    steps, batches, _ = func.params[0].shape
    return f"{2 * record.gates * record.units**2} * {names.to_text(steps)} * {names.to_text(batches)}"


class _SizeNames:
    """Sizes as text in Python's syntax, each variable under a unique name."""

    def __init__(self, func: tirx.PrimFunc) -> None:
        self._texts: dict[tirx.Var, str] = {}
        for p in func.params:
            for node in (n for e in (p.shape if tirx.is_buffer_var(p) else [p]) for n in walk(e)):
                if isinstance(node, tirx.Var) and node not in self._texts:
                    self._texts[node] = self._make_unique(node.name)

    def _make_unique(self, name: str) -> str:
        used, unique, k = {*self._texts.values(), *_RESERVED}, name, 1
        while unique in used:
            unique, k = f"{name}_{k}", k + 1
        return unique

    def to_label(self, expr: Expr) -> str:
        """Return the size as text, "?" if it is unknown, for the reader and for names."""
        try:
            return self.to_text(expr)
        except _UnknownSizeError:
            return "?"

    def to_text(self, expr: Expr) -> str:
        """Return arithmetic of sizes as text; raise _UnknownSizeError for other expressions."""
        if isinstance(expr, tirx.Var):
            if expr not in self._texts:
                raise _UnknownSizeError
            return self._texts[expr]
        if isinstance(expr, prim.IntImm):
            return str(expr.value)
        if isinstance(expr, prim.Cast):
            return self.to_text(expr.value)
        if type(expr) in _SIGNS:
            bare = isinstance(expr, prim.Add) or (isinstance(expr, prim.Mul) and isinstance(expr.a, prim.Mul))
            a, b = self.to_text(expr.a), self.to_text(expr.b)
            a = f"({a})" if " " in a and not bare else a
            return f"{a} {_SIGNS[type(expr)]} " + (f"({b})" if " " in b else b)
        if isinstance(expr, prim.Min | prim.Max):
            return f"{'min' if isinstance(expr, prim.Min) else 'max'}({self.to_text(expr.a)}, {self.to_text(expr.b)})"
        raise _UnknownSizeError


class _CostCounter:
    """Counts costs on a walk over the statements of a function."""

    def __init__(self, func: tirx.PrimFunc) -> None:
        self.arguments = [p for p in func.params if tirx.is_buffer_var(p)]
        self.operations: Expr = _zero()
        self.accessed: dict[tirx.Buffer, Expr] = {}
        self.has_matmul = False  # whether a sum of products of different elements is among the operations
        self.facts = Facts.of(func)
        for size in self.facts.largest:
            self.facts.analyzer.bind(size, ir.Range(0, 1 << 40), allow_override=True)
        self._views: dict[tirx.Buffer, tirx.Buffer] = {}  # of arguments
        self._extents: dict[tirx.Var, Expr] = {}  # of loops
        self._loop_dependencies: dict[tirx.Var, set[tirx.Var]] = {}  # the loops that other variables depend on

    def simplify(self, expr: Expr) -> Expr:
        return self.facts.simplify(expr)

    def count_bytes(self) -> Expr:
        total = _zero()
        for buffer, count in self.accessed.items():
            count, full = self.simplify(count), self.simplify(_elements(buffer))
            needed = full if self.facts.can_prove(count >= full) else tirx.min(count, full)
            total = total + needed * _itemsize(buffer)
        return self.simplify(total)

    def count_statement(self, stmt: tirx.Stmt, points: Expr) -> None:
        """Count a statement that is executed `points` times."""
        match stmt:
            case tirx.SeqStmt():
                for inner in stmt.seq:
                    self.count_statement(inner, points)
            case tirx.For():
                self._extents[stmt.loop_var] = stmt.extent
                self.count_statement(stmt.body, points * stmt.extent)
            case s_tir.SBlockRealize():
                for iter_var, value in zip(stmt.block.iter_vars, stmt.iter_values):
                    self._loop_dependencies[iter_var.var] = self._find_loops(value)
                reduces = any(map(is_reduction, stmt.block.iter_vars))
                store = stmt.block.body
                if reduces and isinstance(store, tirx.BufferStore) and any(map(self._is_matmul, walk(store.value))):
                    self.has_matmul = True
                    self.count_access(store.buffer, store.indices)
                    self.count_matmul(store.value, points)
                else:
                    self.count_statement(store, points)
            case tirx.Bind():
                self._loop_dependencies[stmt.var] = self._find_loops(stmt.value)
                self.count_value(stmt.value, points)
            case tirx.IfThenElse():
                self.count_value(stmt.condition, points)
                self.count_branches([stmt.then_case, stmt.else_case], points)
            case tirx.BufferStore():
                self.count_access(stmt.buffer, stmt.indices)
                for expr in (stmt.value, *stmt.indices):
                    self.count_value(expr, points)
            case tirx.AttrStmt():
                self.count_statement(stmt.body, points)
            case tirx.Evaluate():
                self.count_value(stmt.value, points)
            case tirx.DeclBuffer():
                for argument in self.arguments:
                    if any(argument.same_as(node) for node in walk(stmt.data)):
                        self._views[stmt.buffer] = argument
            case tirx.AllocBuffer():
                pass
            case _:  # loops until a condition holds, and other statements whose cost does not follow from sizes
                raise _UnknownSizeError

    def count_branches(self, branches: list[tirx.Stmt | None], points: Expr) -> None:
        """Count the more expensive branch."""
        operations, touched = self.operations, self.accessed
        counted = []
        for branch in branches:
            self.operations, self.accessed = operations, dict(touched)
            if branch is not None:
                self.count_statement(branch, points)
            counted.append((self.operations, self.accessed))
        (operations, touched), (operations_else, touched_else) = counted
        self.operations = self.simplify(tirx.max(operations, operations_else))
        for buffer, count in touched_else.items():
            touched[buffer] = self.simplify(tirx.max(touched.get(buffer, _zero()), count))
        self.accessed = touched

    def count_value(self, expr: Expr, points: Expr) -> None:
        count = 0
        for node in walk(expr):
            if isinstance(node, ir.TensorLoad):
                self.count_access(node.source, node.indices)
            else:
                count += _is_operation(node)
        if count:
            self.operations = self.operations + points * count

    def count_matmul(self, value: Expr, points: Expr) -> None:
        """Count the accumulated operations at each point, and operands of a multiplication once for each element."""
        pending = [value]
        while pending:
            node = pending.pop()
            if isinstance(node, ir.TensorLoad):
                self.count_access(node.source, node.indices)
            elif _is_operation(node) or (isinstance(node, _OPERATIONS) and node.ty == value.ty):
                self.operations = self.operations + points
            if self._is_matmul(node):
                self.count_operand(node.a)
                self.count_operand(node.b)
            else:
                pending += children(node)

    def count_operand(self, value: Expr) -> None:
        """Count an operand of a multiplication once for each element; dequantization does not count."""
        nodes = list(walk(value))
        for load in loads(value):
            self.count_access(load.source, load.indices)
        if any(map(_is_dequantization, nodes)):
            return
        for node in filter(_is_operation, nodes):
            self.operations = self.operations + self._count_points(self._find_loops(node))

    def count_access(self, buffer: tirx.Buffer, indices: list[Expr]) -> None:
        buffer = self._views.get(buffer, buffer)
        if any(buffer.same_as(argument) for argument in self.arguments):
            points = self._count_points(set().union(*map(self._find_loops, indices)))
            self.accessed[buffer] = self.accessed.get(buffer, _zero()) + points

    def _count_points(self, loops: set[tirx.Var]) -> Expr:
        """Return the number of iterations of these loops together."""
        points = tirx.const(1, "int64")
        for loop in sorted(loops, key=lambda var: var.name):
            points = points * self._extents[loop]
        return points

    def _find_loops(self, expr: Expr) -> set[tirx.Var]:
        """Return the loops that an expression depends on."""
        loops: set[tirx.Var] = set()
        for node in walk(expr):
            if isinstance(node, tirx.Var):
                loops |= {node} if node in self._extents else self._loop_dependencies.get(node, set())
        return loops

    def _is_matmul(self, node: Expr) -> bool:
        """Return whether the node multiplies elements of two tensors at different indices."""
        if not isinstance(node, prim.Mul):
            return False
        a, b = ({frozenset(self._find_loops(load)) for load in loads(operand)} for operand in (node.a, node.b))
        return bool(a and b and a != b)


def _is_operation(node: Expr) -> bool:
    """Return whether a node is a floating-point operation that counts."""
    return is_float(node) and (isinstance(node, _OPERATIONS) or is_function(node))


def _is_dequantization(node: Expr) -> bool:
    """Return whether stored integers are converted to floating-point numbers here."""
    if not isinstance(node, prim.Cast) or not is_float(node) or is_float(node.value):
        return False
    return str(node.value.ty) != "bool" and any(True for _ in loads(node.value))


def _zero() -> Expr:
    return tirx.const(0, "int64")


def _itemsize(buffer: tirx.Buffer) -> int:
    return math.ceil(DataType(buffer.dtype).bits / 8)


def _elements(buffer: tirx.Buffer) -> Expr:
    return math.prod(buffer.shape, start=tirx.const(1, "int64"))
