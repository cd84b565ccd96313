"""A mask tensor read two elements at a time: those of two neighboring keys, as one word.

Threads of a GPU that hold scores in the fragments of tensor cores have pairs of neighboring keys. Where a row of the
mask has an even number of elements and the first key is even, a pair begins at a multiple of its size, and has both of
its elements: one load brings them. Sizes tell, when the kernel runs; elsewhere a word is put together of elements.
"""

from __future__ import annotations

from tvm import DataType, tirx
from tvm.ir import Expr
from tvm.script.ir_builder import tirx as T

from .parameters import int64
from .scores import Scores


class MaskPairs:
    """Pairs of elements of a problem's mask tensor, bool or of floats of at most 32 bits, for kernels on GPUs, whose
    tensors begin at multiples of 16 bytes.

    Declares a view of the tensor, by words, where the IRBuilder stands. Rows and keys are inside, as in
    `Scores.additive`.
    """

    def __init__(self, scores: Scores) -> None:
        self.scores, self.buffer = scores, scores.buffers["mask"]
        bits = 8 if self.buffer.dtype == "bool" else DataType(self.buffer.dtype).bits
        self.element, self.bits, self.word = f"uint{bits}", bits, f"uint{2 * bits}"
        self.words = T.decl_buffer(self.buffer.shape, self.word, data=self.buffer.data)

    def whole(self, b: Expr, j: Expr) -> Expr:
        """Whether the elements of key j and the next one are a word of memory, whatever row they are of; bool. Then
        those of every second key behind it are, too."""
        size = int64(self.buffer.shape[3])
        even = [tirx.truncmod(int64(n), T.int64(2)).equal(T.int64(0)) for n in (size, self.scores.column(b, j))]
        return tirx.all(*even, size > 0)

    def place(self, b: Expr, h: Expr, i: Expr, j: Expr) -> Expr:
        """Where the pair of key j and the next one is, as a number of words; that of key j + 2 is the next. int64."""
        _, indices = self.scores.mask_at(b, h, i, j, inside=True)
        offset = int64(0)
        for index, size in zip(indices, self.buffer.shape):
            offset = offset * int64(size) + index
        return offset >> T.int64(1)

    def at(self, place: Expr) -> Expr:
        """The word at that place."""
        return self.words[0, 0, 0, place]

    def with_element(self, word: Expr, pair: tuple[Expr, Expr, Expr, Expr], n: int) -> Expr:
        """The word, of which the first (n = 0) or second element becomes that of (b, h, i, j)."""
        value = self.scores.element(*pair, inside=True)
        bits = value.astype(self.element) if self.buffer.dtype == "bool" else T.reinterpret(self.element, value)
        rest = (2**self.bits - 1) << (0 if n else self.bits)
        place = bits.astype(self.word) << tirx.const(n * self.bits, self.word)
        return T.bitwise_or(T.bitwise_and(word, tirx.const(rest, self.word)), place)

    def added(self, word: Expr, n: int) -> Expr:
        """The first (n = 0) or second element of a word as what is added to a score, -inf where it hides the key."""
        bits = (word >> tirx.const(n * self.bits, self.word)).astype(self.element)
        if self.buffer.dtype == "bool":
            return self.scores.added(tirx.NE(bits, tirx.const(0, self.element)))
        return self.scores.added(T.reinterpret(self.buffer.dtype, bits))

    @property
    def hidden(self) -> Expr:
        """A word that hides both keys."""
        if self.buffer.dtype == "bool":
            return tirx.const(0, self.word)
        lowest = {"float16": 0xFC00, "bfloat16": 0xFF80, "float32": 0xFF800000}[self.buffer.dtype]
        return tirx.const(lowest << self.bits | lowest, self.word)
