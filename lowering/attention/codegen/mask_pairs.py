"""A mask tensor read as packed pairs: the elements of two neighboring keys in one load.

Threads of a GPU with scores in the fragments of tensor cores have pairs of neighboring keys. If a row of the mask has
an even number of elements and the first key is even, a pair begins at a multiple of its size and contains both
elements. One load then reads both. Sizes decide this when the kernel runs; otherwise a pair is assembled from elements.
"""

from __future__ import annotations

from tvm import DataType, tirx
from tvm.ir import Expr
from tvm.script.ir_builder import tirx as T

from .parameters import int64
from .scores import PairScores


class MaskPairs:
    """Packed pairs of elements of a mask tensor, bool or floats of at most 32 bits, for kernels on GPUs.

    Tensors there begin at multiples of 16 bytes. The constructor declares a view of the tensor, by packed pairs, at the
    insertion point of the IRBuilder. Rows and keys are inside, as in `PairScores.compute_bias`.
    """

    def __init__(self, scores: PairScores) -> None:
        self.scores, self.buffer = scores, scores.buffers["mask"]
        bits = 8 if self.buffer.dtype == "bool" else DataType(self.buffer.dtype).bits
        self.element, self.bits, self.pair_dtype = f"uint{bits}", bits, f"uint{2 * bits}"
        self.pairs = T.decl_buffer(self.buffer.shape, self.pair_dtype, data=self.buffer.data)

    def whole(self, b: Expr, j: Expr) -> Expr:
        """Return whether the elements of key j and the next one are an aligned pair in memory, in every row; bool.

        Then so are those of every second key after it.
        """
        size = int64(self.buffer.shape[3])
        even = [tirx.truncmod(int64(n), T.int64(2)).equal(T.int64(0)) for n in (size, self.scores.column(b, j))]
        return tirx.all(*even, size > 0)

    def pair_offset(self, b: Expr, h: Expr, i: Expr, j: Expr) -> Expr:
        """Return the int64 offset of the pair of key j and the next one, in pairs; that of key j + 2 is the next."""
        _, indices = self.scores.mask_at(b, h, i, j, inside=True)
        offset = int64(0)
        for index, size in zip(indices, self.buffer.shape):
            offset = offset * int64(size) + index
        return offset >> T.int64(1)

    def at(self, offset: Expr) -> Expr:
        """Return the pair at that offset."""
        return self.pairs[0, 0, 0, offset]

    def with_element(self, packed: Expr, pair: tuple[Expr, Expr, Expr, Expr], n: int) -> Expr:
        """Return the pair with its first (n = 0) or second element replaced by that of (b, h, i, j)."""
        bits = self.scores.element(self._to_bits, *pair, inside=True)
        other_bits = (2**self.bits - 1) << (0 if n else self.bits)
        shifted = bits.astype(self.pair_dtype) << tirx.const(n * self.bits, self.pair_dtype)
        return T.bitwise_or(T.bitwise_and(packed, tirx.const(other_bits, self.pair_dtype)), shifted)

    def _to_bits(self, value: Expr) -> Expr:
        return value.astype(self.element) if self.buffer.dtype == "bool" else T.reinterpret(self.element, value)

    def convert_to_bias(self, packed: Expr, n: int) -> Expr:
        """Return the first (n = 0) or second element of a pair as a bias of a score, -inf where it masks the key."""
        bits = (packed >> tirx.const(n * self.bits, self.pair_dtype)).astype(self.element)
        if self.buffer.dtype == "bool":
            return self.scores.convert_to_bias(tirx.NE(bits, tirx.const(0, self.element)))
        return self.scores.convert_to_bias(T.reinterpret(self.buffer.dtype, bits))

    @property
    def hidden(self) -> Expr:
        """A pair that masks both keys."""
        if self.buffer.dtype == "bool":
            return tirx.const(0, self.pair_dtype)
        lowest = {"float16": 0xFC00, "bfloat16": 0xFF80, "float32": 0xFF800000}[self.buffer.dtype]
        return tirx.const(lowest << self.bits | lowest, self.pair_dtype)
