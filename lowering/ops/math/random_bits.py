"""Random 32-bit integers by Philox 4x32-10, a counter-based generator.

Salmon, Moraes, Dror and Shaw, "Parallel random numbers: as easy as 1, 2, 3" (SC 2011). A 32-bit value is a function of
a key, which is the seed, and of a counter. No state is stored, so the bits are the same on every target and for every
number of threads. The counter contains the block index (64 bits), the stream of the node, and the steps of the
enclosing loops.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from tvm import tirx
from tvm.script.ir_builder import tirx as T

from ...importing.node import Node
from ...importing.random_streams import RandomStreams
from ...importing.values import Shape, Size, Value
from ...tensorir.independent_loops import independent_loops
from ..helpers.kernels import emit_loops, let

_BLOCK_SIZE = 4  # 32-bit values of a block
_ROUNDS = 10
_MULTIPLIERS = (0xD2511F53, 0xCD9E8D57)
_KEY_STEPS = (0x9E3779B9, 0xBB67AE85)
_STEP_FACTOR = 0x9E3779B1  # a prime that combines the steps of nested loops into one 32-bit value


def emit_random_bits(node: Node, count: Size) -> Value:
    """Emit at least `count` random 32-bit values of the node's stream.

    The seed is the node's attribute `seed`, or else that of the model.

    Returns:
        uint32 [count, rounded up to whole blocks of 4].

    Raises:
        NodeError: The attribute is not finite.
    """
    streams = node.importer.random
    seed = _read_seed(node, streams)
    stream = node.constant(np.asarray(streams.next_stream(), np.int64))
    blocks = node.simplify((count + _BLOCK_SIZE - 1) // _BLOCK_SIZE)

    def statements(seed: Any, stream: Any, *buffers: Any) -> None:
        *steps, out = buffers
        with independent_loops(blocks) as (block,):
            counter = [*_split_halves(block), _low_bits(stream[()]), _mix_steps(steps)]
            values = _emit_philox(counter, _split_halves(seed[()]))
            for k, value in enumerate(values):
                T.buffer_store(out, value, [block * _BLOCK_SIZE + k])

    outputs: list[tuple[Shape, str]] = [((node.simplify(blocks * _BLOCK_SIZE),), "uint32")]
    (values,) = emit_loops(node, "random_words", statements, [seed, stream, *streams.steps], outputs, [blocks])
    return values


def _read_seed(node: Node, streams: RandomStreams) -> Value:
    """Return the seed attribute, or that of the model.

    Integers are used directly as seeds. Other numbers are seeds by the bits of their float64.
    """
    seed = node.attr("seed", None)
    if seed is None:
        return streams.seed
    if not np.isfinite(seed):
        raise node.error("node.seed_not_finite", f"attribute seed is {seed}.", "Give it a finite number.")
    is_whole = abs(seed) < 2**63 and seed == int(seed)
    return node.constant(np.asarray(int(seed), np.int64) if is_whole else np.asarray(seed, np.float64).view(np.int64))


def _emit_philox(counter: Sequence[Any], key: Sequence[Any]) -> list[Any]:
    """Emit ten rounds over a counter of four 32-bit words, with a key of two."""
    counter, key = [let(word) for word in counter], [let(word) for word in key]
    for number in range(_ROUNDS):
        keys = [word + _const_u32(step * number % 2**32) for word, step in zip(key, _KEY_STEPS)]
        first, second = (
            let(word.astype("uint64") * tirx.const(factor, "uint64"))
            for word, factor in zip((counter[0], counter[2]), _MULTIPLIERS)
        )
        counter = [
            let(word)
            for word in (
                _high_bits(second) ^ counter[1] ^ keys[0],
                _low_bits(second),
                _high_bits(first) ^ counter[3] ^ keys[1],
                _low_bits(first),
            )
        ]
    return counter


def _mix_steps(steps: Sequence[Any]) -> Any:
    """Combine the step numbers, outermost loop first, into one 32-bit word; 0 outside loops."""
    mixed = _const_u32(0)
    for step in steps:
        mixed = mixed * _const_u32(_STEP_FACTOR) + _low_bits(step[()])
    return mixed


def _split_halves(number: Any) -> list[Any]:
    """Return the lower and the upper 32 bits of a 64-bit number."""
    return [_low_bits(number), _high_bits(number.astype("uint64"))]


def _low_bits(number: Any) -> Any:
    return number.astype("uint32")


def _high_bits(number: Any) -> Any:
    return tirx.shift_right(number, tirx.const(32, "uint64")).astype("uint32")


def _const_u32(number: int) -> Any:
    return tirx.const(number, "uint32")
