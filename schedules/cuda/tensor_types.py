"""What mma.sync multiplies: half precision as it is, and float32 as TF32, which has its exponent and 10 bits of its
fraction.

"tf32" rounds operands to TF32. "3xtf32" makes of each a sum of two such numbers, big + small, and adds three of the
four matmuls, small big + big small + big big, as CUTLASS does (Ootomo and Yokota, 2022): what is left out is 2^-22 of
a matmul or less, about what sums in float32 lose. Both round to nearest, ties away from zero.

Infinity is 1 + inf there, so that it meets nothing but big: inf - inf, or inf times a small that is 0, would be NaN
where float32 has infinity. Numbers beyond TF32's largest, 3.401e38, count as infinity, and those so small that TF32 has
0 for them as 0.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TypeAlias

from tvm import tirx
from tvm.script.ir_builder import tirx as T

from . import ptx
from .ptx import CHUNK_BYTES, Element, let, put, unrolled

Fragment: TypeAlias = Sequence[Element]

_SIGN, _ONE = 0x80000000, 0x3F800000  # bits of a float32


@dataclass(frozen=True)
class TensorType:
    """A way to multiply elements."""

    element: str
    """The type that they have in memory."""
    bytes: int
    """Of an element."""
    operand: str
    """The type that tensor cores are given."""
    terms: tuple[tuple[int, int], ...] = ((0, 0),)
    """The parts of A and of B whose matmuls are added, in order."""

    @property
    def chunk(self) -> int:
        """Elements that come together: of 16 bytes."""
        return CHUNK_BYTES // self.bytes

    @property
    def depth(self) -> int:
        """Values of k of one matmul."""
        return 2 * self.chunk

    @property
    def parts(self) -> int:
        """Operands that an element becomes."""
        return 1 + max(max(term) for term in self.terms)

    @property
    def rate(self) -> float:
        """How many matmuls of elements a matmul of half precision takes the time of."""
        return 2 / self.bytes / len(self.terms)

    def split(self, words: tirx.Buffer, count: int) -> None:
        """words[p count + n] := part p of word n, for the first `count` words, which are elements as they were read."""
        if self.operand != "tf32":
            return
        with unrolled(count) as n:
            x = let(T.reinterpret("float32", words[n]))
            ptx.round_to_tf32(words[n], x)
            if self.parts == 2:
                big = let(T.reinterpret("float32", words[n]))
                one = T.bitwise_or(T.bitwise_and(T.reinterpret("uint32", x), T.uint32(_SIGN)), T.uint32(_ONE))
                finite = tirx.abs(big) < tirx.const(float("inf"), "float32")
                big = let(tirx.Select(finite, big, T.reinterpret("float32", one)))
                put(words, n, T.reinterpret("uint32", big))
                ptx.round_to_tf32(words[count + n], x - big)

    def multiply_add(self, d: Sequence[Element], a: Sequence[Fragment], b: Sequence[Fragment]) -> None:
        """D [16, 8] += A [16, depth] B [depth, 8], of which a and b are the parts; see `ptx.multiply_add`."""
        for of_a, of_b in self.terms:
            ptx.multiply_add(self.operand, d, a[of_a], b[of_b])


TENSOR_TYPES = {
    "float16": TensorType("float16", 2, "float16"),
    "bfloat16": TensorType("bfloat16", 2, "bfloat16"),
    "tf32": TensorType("float32", 4, "tf32"),
    "3xtf32": TensorType("float32", 4, "tf32", ((1, 0), (0, 1), (0, 0))),
}
