"""The bindings of a block of `main`: who reads their results, and which of them may run together."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence

from tvm import relax

from ..aliases import Accesses, Memory, is_view, list_reads, read_inplace_arguments, read_kernel


class Block:
    """The bindings of a block in execution order, and their memory accesses.

    `uses` are the numbers of reads of each variable in all of `main`. New variables are of `kind`.
    """

    def __init__(self, bindings: Sequence[relax.Binding], kind: type[relax.Var], uses: Mapping[relax.Var, int]) -> None:
        self.bindings, self.kind, self.uses = bindings, kind, uses
        memory = Memory()
        self.accesses = [memory.record_accesses(binding) for binding in bindings]
        self.reads = [list_reads(binding.value) for binding in bindings]
        self.positions = {binding.var: n for n, binding in enumerate(bindings)}
        self.readers: dict[relax.Var, list[int]] = {}
        for n, read in enumerate(self.reads):
            for var in read:
                self.readers.setdefault(var, []).append(n)

    def find_single_reads(self, n: int) -> Iterator[tuple[int, tuple[int, ...], int]]:
        """Yield the outputs of call n with a single reader: output number, views in between, reader's position."""
        for number, views, var in self._find_outputs(n):
            sole_reader = self.find_sole_reader(var)
            if sole_reader is not None:
                yield number, (*views, *sole_reader[0]), sole_reader[1]

    def _find_outputs(self, n: int) -> Iterator[tuple[int, tuple[int, ...], relax.Var]]:
        """Yield the tensors that a call returns by number, and the single binding that reads each off its tuple."""
        var = self.bindings[n].var
        if isinstance(var.ty, relax.TensorType):
            yield 0, (), var
            return
        positions = self.readers.get(var, [])
        numbers = [value.index for value in (self.bindings[position].value for position in positions)
                   if isinstance(value, relax.TupleGetItem)]  # fmt: skip
        if len(numbers) == self.uses.get(var, 0):
            for position, number in zip(positions, numbers):
                if numbers.count(number) == 1:
                    yield int(number), (position,), self.bindings[position].var

    def find_sole_reader(self, var: relax.Var) -> tuple[tuple[int, ...], int] | None:
        """Return the views between a tensor and its sole reader, and the reader's position; None if it has several."""
        views: tuple[int, ...] = ()
        while self.uses.get(var, 0) == 1 and len(self.readers.get(var, [])) == 1:
            (position,) = self.readers[var]
            binding = self.bindings[position]
            if not is_view(binding):
                return views, position
            if not isinstance(binding.var.ty, relax.TensorType):
                return None
            views, var = (*views, position), binding.var
        return None

    def find_trailing_views(self, fused: Collection[int]) -> list[int] | None:
        """Return the positions of views that must follow these bindings when they run together at the last position.

        Return None if they cannot be moved, as another binding accesses the same memory, or if one of them reads or
        updates a cache that another one updates.
        """
        updates = [n for n in fused if read_inplace_arguments(self.bindings[n].value)]
        caches = [name for n in updates for name in self.accesses[n].written - {self.bindings[n].var}]
        producers = (n for n in fused if n not in updates and read_kernel(self.bindings[n]) is not None)
        read = set[relax.Var]().union(*(self.accesses[n].read for n in producers))
        if len(caches) > len(set(caches)) or read & set(caches):
            return None
        trailing: list[int] = []
        moved = Accesses()
        for n in range(min(fused), max(fused)):
            accesses = self.accesses[n]
            if n in fused:
                moved.add(accesses)
            elif is_view(self.bindings[n]) and accesses.read & moved.written:
                trailing.append(n)
            elif moved.has_conflict_with(accesses):
                return None
        return trailing
