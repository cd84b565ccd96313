"""Alias analysis of `main`: which memory bindings read and write, and which bindings only rename memory."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

import tvm_ffi
from tvm import ir, relax

from ..importing.checks import read_checked_tensor

_CALL, _IN_PLACE, *_VIEWS = map(
    ir.Op.get,
    (
        "relax.call_tir",
        "relax.call_tir_inplace",
        "relax.reshape",
        "relax.memory.view",
        "relax.memory.ensure_zero_offset",
    ),
)


@dataclass
class Accesses:
    """The memory that bindings read and write.

    Each memory region is named by the variable that it was allocated or passed for.
    """

    read: set[relax.Var] = field(default_factory=set)
    written: set[relax.Var] = field(default_factory=set)

    def add(self, other: Accesses) -> None:
        """Add the accesses of another binding."""
        self.read |= other.read
        self.written |= other.written

    def has_conflict_with(self, later: Accesses) -> bool:
        """Return whether later accesses must stay ordered with these."""
        return bool((later.read | later.written) & self.written or later.written & self.read)


class Memory:
    """Memory accesses of bindings, recorded in execution order. A variable may be a view of several regions."""

    def __init__(self) -> None:
        self._names: dict[relax.Var, set[relax.Var]] = {}

    def record_accesses(self, binding: relax.Binding) -> Accesses:
        """Return the memory that a binding reads and writes."""
        read = self.find_names(relax.analysis.free_vars(binding.value))
        if read_kernel(binding) is None:
            self._names[binding.var] = {binding.var, *read}
            return Accesses(read)
        arguments = binding.value.args[1].fields
        updated = [arguments[index] for index in read_inplace_arguments(binding.value) if index >= 0]
        written = {binding.var, *self.find_names(updated)}
        self._names[binding.var] = written
        return Accesses(read, written)

    def find_names(self, variables: Iterable[relax.Var]) -> set[relax.Var]:
        return {name for var in variables for name in self._names.get(var, {var})}


def read_kernel(binding: relax.Binding) -> ir.GlobalVar | None:
    """Return the TensorIR function that a binding calls, None if it calls none."""
    value = binding.value
    return value.args[0] if isinstance(value, relax.Call) and value.op in (_CALL, _IN_PLACE) else None


def read_inplace_arguments(value: relax.Expr) -> list[int]:
    """Return the argument that each result of a kernel call aliases, -1 for a new array; [] if all results are new."""
    is_in_place = isinstance(value, relax.Call) and value.op == _IN_PLACE
    return [int(index) for index in value.attrs.inplace_indices] if is_in_place else []


def get_viewed(binding: relax.Binding) -> relax.Expr | None:
    """Return the tensor whose memory a binding only renames, casts or checks; None if it owns its memory."""
    value = binding.value
    if isinstance(binding, relax.MatchCast) or isinstance(value, relax.Var):
        return value
    is_view_call = isinstance(value, relax.Call) and value.op in _VIEWS
    return value.args[0] if is_view_call else read_checked_tensor(value)


def is_view(binding: relax.Binding) -> bool:
    """Return whether a binding only renames memory, checked or not, and defines no sizes."""
    if isinstance(binding, relax.MatchCast):
        return False
    return isinstance(binding.value, relax.TupleGetItem) or get_viewed(binding) is not None


def list_reads(expr: relax.Expr) -> list[relax.Var]:
    """Return all variables that an expression reads, each as often as it is read."""
    reads: list[relax.Var] = []
    tvm_ffi.structural_walk(expr, (relax.Var, reads.append))
    return reads
