"""BlockStates: what a mask is on blocks of rows and keys, without its ever being written out.

Intervals of the mask's expression decide where they can; what they leave open is evaluated pair by pair, until the
block is known to be partial.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from tvm import tirx
from tvm.script.ir_builder import tirx as T

from ...attention.expr.bound import BoundExpr
from ...attention.expr.node import Expr
from ...attention.flex_node import DOMAIN, FULL, HIDDEN, PARTIAL, Settings
from ...importing.node import Node
from ...importing.values import Value
from .. import op
from ..asserted import asserted
from ..kernels import loops
from ..run_time import bind
from .reads import Reads, table


@op("BlockStates", since=1, domain=DOMAIN)
def block_states(node: Node, lengths: Value, *captured: Value) -> Value:
    """int8 [B, H, row blocks, key blocks] for lengths, int64 [4]: batches, heads, rows and keys. A block that reaches
    behind the last row or key is never full."""
    settings = Settings.from_json(node.attr("settings"))
    if settings.mask is None or settings.block_size is None:
        raise node.error("attribute settings has no mask, or no block size.", "Both are needed.")
    if lengths.rank != 1 or lengths.dtype != "int64":
        raise node.error(f"lengths is {lengths.dtype} of rank {lengths.rank}.", "Make it int64 [4].")
    rows, keys = settings.block_size
    lengths = asserted(node, lengths, (4,))
    ends = dict(zip("bhij", bind(node, lengths)))
    reads = Reads(node, {name: table(node, value) for name, value in zip(settings.captures, captured)}, ends)
    mask = reads.safe(settings.mask)
    names = [name for name in settings.captures if name in reads.arrays]
    shape = (ends["b"], ends["h"], (ends["i"] + rows - 1) // rows, (ends["j"] + keys - 1) // keys)

    def body(*buffers: Any) -> None:
        *tables, states = buffers
        _Kernel(mask, dict(zip(names, tables)), reads.sizes, ends, (rows, keys)).emit(states)

    tensors = [reads.arrays[name] for name in names]
    sizes = [*ends.values(), *reads.sizes.values()]
    (result,) = loops(node, "block_states", body, tensors or [lengths], [(shape, "int8")], sizes)
    return result


class _Kernel:
    def __init__(
        self,
        mask: Expr,
        tables: Mapping[str, tirx.Buffer],
        sizes: Mapping[str, Any],
        ends: Mapping[str, Any],
        block: tuple[int, int],
    ) -> None:
        scalars = {name: T.int64(size) if isinstance(size, int) else size for name, size in sizes.items()}
        self.mask = BoundExpr(mask, tables, scalars)
        self.ends, self.block = ends, block

    def emit(self, states: tirx.Buffer) -> None:
        B, H, row_blocks, key_blocks = states.shape
        count = tirx.max(T.int64(1) * row_blocks, T.int64(1))
        heads = tirx.max(T.int64(1) * H, T.int64(1))
        with T.parallel(T.int64(1) * B * H * row_blocks) as work:
            b, h, row = (T.bind(x) for x in (work // (count * heads), work // count % heads, work % count))
            first = T.bind(row * self.block[0])
            last = T.bind(tirx.min(first + self.block[0], self.ends["i"]) - 1)
            with T.serial(key_blocks) as column:
                key = T.bind(column * self.block[1])
                last_key = T.bind(tirx.min(key + self.block[1], self.ends["j"]) - 1)
                whole = T.bind(tirx.all(last - first == self.block[0] - 1, last_key - key == self.block[1] - 1))
                state = T.bind(self.state(b, h, (first, last), (key, last_key), whole))
                T.buffer_store(states, state, [b, h, row, column])

    def state(self, b: Any, h: Any, rows: tuple[Any, Any], keys: tuple[Any, Any], whole: Any) -> Any:
        shown = T.alloc_buffer((2,), "bool", scope="global")  # whether a pair is hidden, and whether one is visible
        found = self.mask.extremes(b, h, rows, keys)
        surely, possibly = (T.bool(False), T.bool(True)) if found is None else found
        T.buffer_store(shown, tirx.Not(surely), [0])
        T.buffer_store(shown, possibly, [1])
        with T.If(tirx.all(shown[0], shown[1])), T.Then():
            for k in range(2):
                T.buffer_store(shown, T.bool(False), [k])
            with T.serial(rows[1] - rows[0] + 1) as i, T.If(tirx.Not(tirx.all(shown[0], shown[1]))), T.Then():
                visible = T.alloc_buffer((1,), "int64", scope="global")
                T.buffer_store(visible, T.int64(0), [0])
                with T.serial(keys[1] - keys[0] + 1) as j:
                    value = self.mask(b, h, rows[0] + i, keys[0] + j)
                    T.buffer_store(visible, visible[0] + tirx.Select(value, T.int64(1), T.int64(0)), [0])
                T.buffer_store(shown, tirx.any(shown[0], visible[0] < keys[1] - keys[0] + 1), [0])
                T.buffer_store(shown, tirx.any(shown[1], visible[0] > 0), [1])
        full, partial, hidden = (tirx.const(state, "int8") for state in (FULL, PARTIAL, HIDDEN))
        return tirx.Select(shown[1], tirx.Select(tirx.any(shown[0], tirx.Not(whole)), partial, full), hidden)
