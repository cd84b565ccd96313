"""Operand types of mma.sync: half precision, and float32 as TF32, which has its exponent and 10 bits of its fraction.

"tf32" rounds operands to TF32. "3xtf32" represents each as a sum of two such numbers, big + small, and adds three of
the four matmuls, small big + big small + big big, as CUTLASS does (Ootomo and Yokota, 2022). The omitted term is 2^-22
of a matmul or less, about the error of float32 accumulators. Both round to nearest, ties away from zero.

Infinity is 1 + inf there, so that it is multiplied only by big: inf - inf, or inf times a small that is 0, would be NaN
where float32 has infinity. Numbers beyond TF32's largest, 3.401e38, count as infinity, and those so small that TF32 has
0 for them as 0.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TypeAlias

from tvm import tirx
from tvm.script.ir_builder import tirx as T

from ..primitives import ptx
from ..primitives.ptx import CHUNK_BYTES, Element, let, store_element, unrolled

OperandFragment: TypeAlias = Sequence[Element]

_SIGN, _ONE = 0x80000000, 0x3F800000  # bits of a float32


@dataclass(frozen=True)
class TensorType:
    """A data type of operands and the way in which mma.sync multiplies them."""

    element: str
    """The type of elements in memory."""
    bytes: int
    """Bytes of an element."""
    operand: str
    """The type that tensor cores receive."""
    terms: tuple[tuple[int, int], ...] = ((0, 0),)
    """The operands of A and of B whose matmuls are added, in order."""

    @property
    def chunk(self) -> int:
        """Elements of a chunk of 16 bytes."""
        return CHUNK_BYTES // self.bytes

    @property
    def depth(self) -> int:
        """Values of k of one matmul."""
        return 2 * self.chunk

    @property
    def operand_count(self) -> int:
        """Operands that an element becomes."""
        return 1 + max(max(term) for term in self.terms)

    @property
    def rate(self) -> float:
        """The throughput in matmuls of elements, relative to half precision."""
        return 2 / self.bytes / len(self.terms)

    def split(self, registers: tirx.Buffer, count: int) -> None:
        """Emit registers[p count + n] := operand p of register n, for the first `count` registers, which have
        elements as loaded.
        """
        if self.operand != "tf32":
            return
        with unrolled(count) as n:
            x = let(T.reinterpret("float32", registers[n]))
            ptx.round_to_tf32(registers[n], x)
            if self.operand_count == 2:
                big = let(T.reinterpret("float32", registers[n]))
                unit = T.bitwise_or(T.bitwise_and(T.reinterpret("uint32", x), T.uint32(_SIGN)), T.uint32(_ONE))
                is_finite = tirx.abs(big) < tirx.const(float("inf"), "float32")
                big = let(tirx.Select(is_finite, big, T.reinterpret("float32", unit)))
                store_element(registers, n, T.reinterpret("uint32", big))
                ptx.round_to_tf32(registers[count + n], x - big)

    def multiply_add(self, d: Sequence[Element], a: Sequence[OperandFragment], b: Sequence[OperandFragment]) -> None:
        """Emit D [16, 8] += A [16, depth] B [depth, 8], where a and b are lists of operands; see `ptx.multiply_add`."""
        for a_index, b_index in self.terms:
            ptx.multiply_add(self.operand, d, a[a_index], b[b_index])


TENSOR_TYPES = {
    "float16": TensorType("float16", 2, "float16"),
    "bfloat16": TensorType("bfloat16", 2, "bfloat16"),
    "tf32": TensorType("float32", 4, "tf32"),
    "3xtf32": TensorType("float32", 4, "tf32", ((1, 0), (0, 1), (0, 0))),
}
