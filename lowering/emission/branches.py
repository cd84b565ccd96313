"""C code of branches: an `if` statement, before which the results of both are declared."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

from .c_code import NO_BLOCK, CTensor, Value, reject

if TYPE_CHECKING:
    from .function_code import FunctionEmitter


class Branches:
    """The branches of an If, while a function is emitted."""

    def __init__(self, emitter: FunctionEmitter) -> None:
        self._emitter, self._statements = emitter, emitter.code.statements
        self._results: list[tuple[str, str, str, str]] = []  # type, name, and the value in each branch
        self._middle = 0

    @contextmanager
    def open(self, condition: str) -> Iterator[None]:
        """Emit the `if` around what the block emits. `condition` is the address of a bool."""
        position = len(self._statements)
        self._statements += ["", f"if (*(const uint8_t*){condition} != 0) {{"]
        yield
        self._statements += [*(f"{name} = {other};" for _, name, _, other in self._results), "}"]
        self._statements[self._middle] = " ".join(f"{name} = {value};" for _, name, value, _ in self._results)
        self._statements[position] = " ".join(f"{kind} {name};" for kind, name, _, _ in self._results)

    def begin_other(self) -> None:
        """Begin the branch of a false condition."""
        self._middle = len(self._statements)
        self._statements += ["", "} else {"]

    def merge(self, value: Value, other: Value) -> Value:
        """Return the value of branches with these values."""
        if isinstance(value, tuple) and isinstance(other, tuple):
            return tuple(self.merge(*pair) for pair in zip(value, other, strict=True))
        if not isinstance(value, CTensor) or not isinstance(other, CTensor) or len(value.shape) != len(other.shape):
            raise reject("branches (If) whose results have different ranks")
        to_c = self._emitter.code.to_c
        shape = tuple(
            size
            if self._emitter.analyzer.can_prove_equal(size, other_size)
            else self._emitter.name_new_size(self._add("int64_t", to_c(size), to_c(other_size)))
            for size, other_size in zip(value.shape, other.shape)
        )
        address = self._add("void*", value.address, other.address)
        is_owned = NO_BLOCK not in (value.block, other.block) or value.block != other.block
        block = self._add("Block*", value.block, other.block) if is_owned else NO_BLOCK
        return CTensor(address, shape, value.dtype, block=block)

    def _add(self, kind: str, value: str, other: str) -> str:
        name = self._emitter.code.choose_name("branch")
        self._results.append((kind, name, value, other))
        return name
