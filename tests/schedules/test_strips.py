"""Blocks of rows and the heights of their strips, beside those that occur when blocks are divided."""

from __future__ import annotations

import pytest
from tvm import tirx

from schedules.cpu.matmul.strips import RowBlock, list_block_sizes

MC = 48


def number(value: int) -> tirx.IntImm:
    return tirx.const(value, "int64")


def divide(count: int, mr: int) -> set[int]:
    """Return the heights of a block's strips, as the kernel divides its rows."""
    strips = max(-(-count // mr), 1)
    return {count // strips + (strip < count % strips) for strip in range(strips)}


@pytest.mark.parametrize("mr", range(1, 13))
def test_every_height_of_a_block_of_any_size_is_listed(mr: int) -> None:
    block = RowBlock(number(0), tirx.Var("count", "int64"))
    for bound in range(60):
        assert {*block.list_heights(mr, above=bound)} >= set().union(
            *(divide(count, mr) for count in range(bound + 1, bound + 100))
        )
        if bound:
            expected = set().union(*(divide(count, mr) for count in range(1, bound + 1)))
            assert {*block.list_heights(mr, up_to=bound)} == expected


@pytest.mark.parametrize("mr", [1, 2, 3, 4, 6, 8, 12])
def test_static_blocks_have_the_heights_of_their_sizes(mr: int) -> None:
    for rows in range(1, 300):
        blocks = -(-rows // MC)
        height = -(-rows // (blocks * mr)) * mr
        actual = {min(height, rows - block * height) for block in range(blocks)}
        sizes = list_block_sizes(*map(number, (rows, blocks, height)))
        assert sizes == sorted(actual) and min(actual) > 0 and max(actual) <= MC
        heights = RowBlock(number(0), number(0), sizes).list_heights(mr)
        assert {*heights} == set().union(*(divide(count, mr) for count in actual))


def test_sizes_that_are_not_static_are_not_listed() -> None:
    assert list_block_sizes(tirx.Var("rows", "int64"), number(1), number(6)) is None
