"""K-slices of a row on their way from memory to the thread that multiplies them; quantized ones are dequantized there.

A thread copies its own chunks asynchronously to slots in shared memory that no other thread uses. Registers would
suffice, but ptxas moves a load to the use of its value to save them, and then almost nothing is in flight.
"""

from __future__ import annotations

from collections.abc import Mapping

from tvm import tirx

from lowering.tensorir.expressions import Expr, substitute

from ..primitives import ptx
from ..primitives.ptx import CHUNK_BYTES, alloc_registers, alloc_shared_memory, let, store_element
from .dequantizer import Dequantizer
from .matmul_grid import BatchIndices
from .matmul_reader import Operand
from .tensor_types import TensorType

CHUNK_REGISTERS = CHUNK_BYTES // 4


class ThreadSlots:
    """Slots of 16 bytes in shared memory for each thread of a block, allocated to operands one after another."""

    def __init__(self, thread: Expr, threads: int, size: int, front: int = 0) -> None:
        """Allocate `size` bytes, the first `front` of which are reserved for other data."""
        self.thread, self.threads, self.allocated, self.first = thread, threads, 0, front // 4
        self.memory = alloc_shared_memory(size // 4, "uint32", CHUNK_BYTES)

    def allocate(self, slots: int) -> int:
        """Return the first of so many slots."""
        self.allocated += slots
        return self.allocated - slots

    def at(self, slot: int) -> ptx.Element:
        """Return the slot of this thread."""
        return self.memory[self.first + (slot * self.threads + self.thread) * CHUNK_REGISTERS]


class KSlices:
    """`ahead` k-slices of c chunks of a row of A, or of a column of B; zeros where it does not exist.

    Rows are whole k-slices. `memory` maps the function's tensors to flat views.
    """

    def __init__(
        self,
        operand: Operand,
        tensor_type: TensorType,
        memory: Mapping[tirx.Buffer, tirx.Buffer],
        batch_indices: BatchIndices,
        position: tuple[Expr, Expr],
        slots: ThreadSlots,
        ahead: int,
        c: int,
    ) -> None:
        """`position` is the index of the row or column, and whether it exists."""
        self.outer, self.exists = map(let, position)
        self.operand, self.memory, self.type, self.slots, self.c = operand, memory, tensor_type, slots, c
        self.dequantizer = (
            None if operand.quantized is None else Dequantizer(operand.quantized, tensor_type.element, memory)
        )
        self.start = let(substitute(operand.start, {**batch_indices, operand.outer: self.outer.astype("int64")}))
        self.column = let(self.outer + substitute(operand.first, batch_indices).astype("int32"))
        self.copies = c if self.dequantizer is None else 1  # copies of 16 bytes of a k-slice
        self.first = slots.allocate(ahead * self.copies)
        self.registers = alloc_registers(self.copies * CHUNK_REGISTERS, "uint32")
        self.scales: dict[int, list[tirx.Buffer]] = {}

    def fetch(self, index: int, k: Expr, inside: Expr) -> None:
        """Begin to copy k-slice number `index`, from k on."""
        is_read, slot = let(tirx.all(self.exists, inside)), self.first + index * self.copies
        if self.dequantizer is None:
            memory = self.memory[self.operand.buffer]
            for n in range(self.c):
                along = substitute(self.operand.along, {self.operand.k: (k + n * self.type.chunk).astype("int64")})
                ptx.copy_chunk(self.slots.at(slot + n), memory[self.start + along], is_read)
            return
        offset = self.dequantizer.offset(self.start + k.astype("int64"))
        ptx.copy_chunk(self.slots.at(slot), self.dequantizer.memory[offset], is_read)
        has_one_scale = self.dequantizer.block % (self.type.chunk * self.c) == 0
        if index not in self.scales:
            self.scales[index] = [alloc_registers(2, "float32") for _ in range(1 if has_one_scale else self.c)]
        for n, scale in enumerate(self.scales[index]):
            self.dequantizer.load_scale_and_zero(scale, self.column, let(k + n * self.type.chunk), is_read)

    def read(self, index: int, k: Expr, inside: Expr) -> None:
        """Load k-slice number `index`, which was fetched and has arrived, into registers."""
        for n in range(self.copies):
            chunk = alloc_registers(CHUNK_REGISTERS, "uint32")
            ptx.load_shared(chunk, self.slots.at(self.first + index * self.copies + n))
            for x in range(CHUNK_REGISTERS):
                store_element(self.registers, n * CHUNK_REGISTERS + x, chunk[x])

    def chunk(self, index: int, n: int) -> list[list[Expr]]:
        """Return the packed registers of the n-th chunk of the k-slice that was read, by operand (see
        `TensorType.terms`).
        """
        packed = alloc_registers(4 * self.type.operand_count, "uint32")
        if self.dequantizer is not None:
            scales = self.scales[index]
            self.dequantizer.dequantize(
                packed, 0, self.registers, n * self.dequantizer.registers, scales[min(n, len(scales) - 1)]
            )
        else:
            for x in range(CHUNK_REGISTERS):
                store_element(packed, x, self.registers[n * CHUNK_REGISTERS + x])
        self.type.split(packed, 4)
        return [[packed[4 * operand + x] for x in range(4)] for operand in range(self.type.operand_count)]
