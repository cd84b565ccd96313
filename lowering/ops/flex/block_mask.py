"""BlockStates: the state of a mask in each block of rows and keys, without materializing the mask.

Interval analysis of the mask's expression decides a block where it can. Any other block is evaluated pair by pair,
until the block is found to be partial.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from tvm import tirx
from tvm.script.ir_builder import tirx as T

from ...attention.expr.bound import BoundExpr
from ...attention.expr.node import Expr
from ...attention.flex_node import DOMAIN, FULL, HIDDEN, PARTIAL, FlexAttentionSettings
from ...importing.node import Node
from ...importing.values import Value
from .. import op
from ..helpers.assertions import assert_shape
from ..helpers.kernels import emit_loops
from ..helpers.requirements import require_tensor
from ..helpers.run_time import bind_sizes
from .reads import CapturedReads, as_table


@op("BlockStates", since=1, domain=DOMAIN)
def block_states(node: Node, lengths: Value, *captured: Value) -> Value:
    """Return int8 [B, H, row blocks, key blocks], the state of each block.

    lengths is int64 [4]: batches, heads, rows and keys. A block that extends past the last row or key is never full.
    """
    settings = FlexAttentionSettings.from_json(node.attr("settings"))
    if settings.mask is None or settings.block_size is None:
        raise node.error("flex.settings_incomplete", "attribute settings has no mask, or no block size.", "Give both.")
    require_tensor(node, "lengths", lengths, "int64", "[4]")
    rows, keys = settings.block_size
    lengths = assert_shape(node, lengths, (4,))
    extents = dict(zip("bhij", bind_sizes(node, lengths)))
    reads = CapturedReads(
        node, {name: as_table(node, value) for name, value in zip(settings.captures, captured)}, extents
    )
    mask = reads.guard(settings.mask)
    names = [name for name in settings.captures if name in reads.arrays]
    shape = (extents["b"], extents["h"], (extents["i"] + rows - 1) // rows, (extents["j"] + keys - 1) // keys)

    def body(*buffers: Any) -> None:
        *tables, states = buffers
        _BlockStatesKernel(mask, dict(zip(names, tables)), reads.sizes, extents, (rows, keys)).emit(states)

    tensors = [reads.arrays[name] for name in names]
    sizes = [*extents.values(), *reads.sizes.values()]
    (result,) = emit_loops(node, "block_states", body, tensors or [lengths], [(shape, "int8")], sizes)
    return result


class _BlockStatesKernel:
    def __init__(
        self,
        mask: Expr,
        tables: Mapping[str, tirx.Buffer],
        sizes: Mapping[str, Any],
        extents: Mapping[str, Any],
        block: tuple[int, int],
    ) -> None:
        scalars = {name: T.int64(size) if isinstance(size, int) else size for name, size in sizes.items()}
        self.mask = BoundExpr(mask, tables, scalars)
        self.extents, self.block = extents, block

    def emit(self, states: tirx.Buffer) -> None:
        B, H, row_blocks, key_blocks = states.shape
        count = tirx.max(T.int64(1) * row_blocks, T.int64(1))
        heads = tirx.max(T.int64(1) * H, T.int64(1))
        with T.parallel(T.int64(1) * B * H * row_blocks) as work:
            b, h, row = (T.bind(x) for x in (work // (count * heads), work // count % heads, work % count))
            first = T.bind(row * self.block[0])
            last = T.bind(tirx.min(first + self.block[0], self.extents["i"]) - 1)
            with T.serial(key_blocks) as column:
                key = T.bind(column * self.block[1])
                last_key = T.bind(tirx.min(key + self.block[1], self.extents["j"]) - 1)
                is_whole = T.bind(tirx.all(last - first == self.block[0] - 1, last_key - key == self.block[1] - 1))
                state = T.bind(self.emit_state(b, h, (first, last), (key, last_key), is_whole))
                T.buffer_store(states, state, [b, h, row, column])

    def emit_state(self, b: Any, h: Any, rows: tuple[Any, Any], keys: tuple[Any, Any], is_whole: Any) -> Any:
        flags = T.alloc_buffer((2,), "bool", scope="global")  # is some pair hidden, is some pair visible
        bounds = self.mask.compute_interval(b, h, rows, keys)
        all_visible, any_visible = (T.bool(False), T.bool(True)) if bounds is None else bounds
        T.buffer_store(flags, tirx.Not(all_visible), [0])
        T.buffer_store(flags, any_visible, [1])
        with T.If(tirx.all(flags[0], flags[1])), T.Then():
            for k in range(2):
                T.buffer_store(flags, T.bool(False), [k])
            with T.serial(rows[1] - rows[0] + 1) as i, T.If(tirx.Not(tirx.all(flags[0], flags[1]))), T.Then():
                visible = T.alloc_buffer((1,), "int64", scope="global")
                T.buffer_store(visible, T.int64(0), [0])
                with T.serial(keys[1] - keys[0] + 1) as j:
                    value = self.mask(b, h, rows[0] + i, keys[0] + j)
                    T.buffer_store(visible, visible[0] + tirx.Select(value, T.int64(1), T.int64(0)), [0])
                T.buffer_store(flags, tirx.any(flags[0], visible[0] < keys[1] - keys[0] + 1), [0])
                T.buffer_store(flags, tirx.any(flags[1], visible[0] > 0), [1])
        full, partial, hidden = (tirx.const(state, "int8") for state in (FULL, PARTIAL, HIDDEN))
        return tirx.Select(flags[1], tirx.Select(tirx.any(flags[0], tirx.Not(is_whole)), partial, full), hidden)
