"""SortByExpert: a stable counting sort of rows by their expert."""

from __future__ import annotations

from typing import Any

from tvm import tirx
from tvm.script.ir_builder import tirx as T

from ...attention.codegen.parameters import int64
from ...graph.loading.legality import OWN_DOMAIN
from ...importing.node import Node
from ...importing.values import Value
from ...tensorir.along_rows import ATTRIBUTE, Grouped, to_json
from ...tensorir.independent_loops import independent_loops
from .. import op
from ..helpers.kernels import emit_loops, serial


@op("SortByExpert", since=1, domain=OWN_DOMAIN)
def sort_by_expert(node: Node, chosen: Value) -> tuple[Value, ...]:
    """Sort rows by expert and return three int64 tensors [R].

    chosen [R] has an expert below attribute `experts` for each row. The results are `sorted`, the experts in ascending
    order; `order`, the row at each sorted position; and `positions`, the sorted position of each row. A number outside
    the range counts as the nearest expert.
    """
    (rows,), experts = chosen.shape, node.attr("experts")

    def body(chosen: Any, *outputs: Any) -> None:
        ordered, order, positions = outputs

        def expert_of(row: Any) -> Any:
            return tirx.max(tirx.min(chosen[row].astype("int64"), int64(experts - 1)), int64(0))

        # Each expert scans all rows, so that no iteration depends on another one.
        with independent_loops(experts) as (expert,):
            position = T.alloc_buffer((1,), "int64")
            T.buffer_store(position, int64(0), [0])
            with serial(rows) as row:
                T.buffer_store(position, position[0] + (expert_of(row) < expert).astype("int64"), [0])
            with serial(rows) as row, T.If(expert_of(row) == expert), T.Then():
                T.buffer_store(ordered, expert, [position[0]])
                T.buffer_store(order, row, [position[0]])
                T.buffer_store(positions, position[0], [row])
                T.buffer_store(position, position[0] + 1, [0])

    attributes = {ATTRIBUTE: to_json(Grouped(experts))}
    return emit_loops(node, "sort_by_expert", body, [chosen], [((rows,), "int64")] * 3, attributes=attributes)
