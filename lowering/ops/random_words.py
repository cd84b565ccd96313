"""Random 32-bit words by Philox 4x32-10, a counter-based generator.

Salmon, Moraes, Dror and Shaw, "Parallel random numbers: as easy as 1, 2, 3" (SC 2011). A word is a function of a key,
which is the seed, and of a counter: no state is kept, so words are the same on every target and number of threads. The
counter holds the number of the block (64 bits), the stream of the node, and the steps of the loops around it.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from tvm import tirx
from tvm.script.ir_builder import tirx as T

from ..importing.node import Node
from ..importing.random_streams import RandomStreams
from ..importing.values import Shape, Size, Value
from ..tensorir.independent import independent
from .kernels import let, loops

_WORDS = 4  # of a block
_ROUNDS = 10
_MULTIPLIERS = (0xD2511F53, 0xCD9E8D57)
_KEY_STEPS = (0x9E3779B9, 0xBB67AE85)
_STEP_FACTOR = 0x9E3779B1  # a prime, by which the steps of nested loops become one word


def random_words(node: Node, count: Size) -> Value:
    """Emit at least `count` random words of the node's stream.

    The seed is the node's attribute `seed`, or else that of the model.

    Returns:
        uint32 [count, rounded up to whole blocks of 4].

    Raises:
        NodeError: The attribute is no finite number.
    """
    streams = node.importer.random
    seed = _attribute_seed(node, streams)
    stream = node.constant(np.asarray(streams.next_stream(), np.int64))
    blocks = node.simplify((count + _WORDS - 1) // _WORDS)

    def statements(seed: Any, stream: Any, *buffers: Any) -> None:
        *steps, out = buffers
        with independent(blocks) as (block,):
            counter = [*_halves(block), _low(stream[()]), _mix_steps(steps)]
            words = _philox(counter, _halves(seed[()]))
            for k, word in enumerate(words):
                T.buffer_store(out, word, [block * _WORDS + k])

    outputs: list[tuple[Shape, str]] = [((node.simplify(blocks * _WORDS),), "uint32")]
    (words,) = loops(node, "random_words", statements, [seed, stream, *streams.steps], outputs, [blocks])
    return words


def _attribute_seed(node: Node, streams: RandomStreams) -> Value:
    """Whole numbers are seeds as they are, others by the bits of their float64."""
    seed = node.attr("seed", None)
    if seed is None:
        return streams.seed
    if not np.isfinite(seed):
        raise node.error(f"attribute seed is {seed}.", "Give it a finite number.")
    is_whole = abs(seed) < 2**63 and seed == int(seed)
    return node.constant(np.asarray(int(seed), np.int64) if is_whole else np.asarray(seed, np.float64).view(np.int64))


def _philox(counter: Sequence[Any], key: Sequence[Any]) -> list[Any]:
    """Emit ten rounds over a counter of four words with a key of two."""
    counter, key = [let(word) for word in counter], [let(word) for word in key]
    for number in range(_ROUNDS):
        keys = [word + _word(step * number % 2**32) for word, step in zip(key, _KEY_STEPS)]
        first, second = (
            let(word.astype("uint64") * tirx.const(factor, "uint64"))
            for word, factor in zip((counter[0], counter[2]), _MULTIPLIERS)
        )
        counter = [
            let(word)
            for word in (
                _high(second) ^ counter[1] ^ keys[0],
                _low(second),
                _high(first) ^ counter[3] ^ keys[1],
                _low(first),
            )
        ]
    return counter


def _mix_steps(steps: Sequence[Any]) -> Any:
    """One word of the numbers of steps, the outermost loop's first; 0 outside loops."""
    mixed = _word(0)
    for step in steps:
        mixed = mixed * _word(_STEP_FACTOR) + _low(step[()])
    return mixed


def _halves(number: Any) -> list[Any]:
    """The lower and the upper word of 64 bits."""
    return [_low(number), _high(number.astype("uint64"))]


def _low(number: Any) -> Any:
    return number.astype("uint32")


def _high(number: Any) -> Any:
    return tirx.shift_right(number, tirx.const(32, "uint64")).astype("uint32")


def _word(number: int) -> Any:
    return tirx.const(number, "uint32")
