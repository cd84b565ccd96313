"""Drawing of the key tiles that an attention kernel visits for each of its tiles of query rows."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from schedules import count_packed_heads

from ..attention.record.problem import AttentionProblem
from .elements import E, Node, make_svg
from .ticks import list_ticks
from .visibility import ALWAYS, BY_DATA, CHANGED, compute_visibility, compute_visible_ranges

_MAX_DRAWN = 2048  # rows and keys of a drawing
_SIDE, _LEFT, _TOP = 420.0, 48.0, 26.0

_STATES = {
    "full": "every row of the tile sees every key: no mask code",
    "partial": "some pairs are hidden or changed, or it is a short one at the end: mask code runs",
    "by-data": "what is hidden depends on data: skipped where all is, without mask code where nothing is",
    "skipped": "in tiles that no loop visits, or that the mask's formula hides",
}


@dataclass(frozen=True)
class TileGeometry:
    """The tiles of a kernel: packed rows by keys.

    A query row contributes `group` heads to the packed rows.
    """

    kernel: str
    rows: int
    keys: int
    group: int

    def __str__(self) -> str:
        heads = f" ({self.group} heads of a query row are one behind the other)" if self.group > 1 else ""
        return f"{self.kernel}: tiles of {self.rows} rows{heads} by {self.keys} keys"


def read_geometry(problem: AttentionProblem, chosen: Mapping[str, Any] | None, rows: int) -> TileGeometry | None:
    """Return the tile geometry of the kernel that runs for this number of query rows, or None without tiles.

    chosen is the result of `schedules.variant.describe_choice`.
    """
    if rows <= read_max_decode_rows(problem, chosen):
        decode = _read_leaf_choice(chosen)["tiles"]["decode"]
        return TileGeometry("decode", max(rows, 1) * problem.group, decode.get("kv", decode.get("keys")), problem.group)
    match _read_leaf_choice(chosen):
        case {"variant": "tiled", "tiles": {"prefill": prefill}}:
            return TileGeometry("prefill", prefill["q"], prefill["kv"], problem.group)
        case {"variant": "mma" | "wgmma" as name, "tiles": {"prefill": prefill}}:
            if name == "mma":
                return TileGeometry("prefill by mma.sync", prefill["q"], prefill["kv"], 1)
            return TileGeometry(
                "prefill by wgmma", 64 * prefill["consumers"], prefill["kv"], count_packed_heads(problem)
            )
    return None


def read_max_decode_rows(problem: AttentionProblem, chosen: Mapping[str, Any] | None) -> int:
    """Return the most query rows of the decode kernel; 0 where there is none."""
    match _read_leaf_choice(chosen):
        case {"tiles": {"prefill": _, "decode": {"q_len": max_rows}}}:
            return max_rows
        case {"tiles": {"prefill": _, "decode": {"rows": packed_rows}}}:
            return packed_rows // problem.group
    return 0


def _read_leaf_choice(chosen: Mapping[str, Any] | None) -> Mapping[str, Any]:
    """Return the variant that runs, at the larger sizes where there are several."""
    while chosen is not None and "variant" not in chosen:
        chosen = chosen.get("large", chosen.get("otherwise"))
    return chosen or {}


def render_block_map(
    problem: AttentionProblem, tiles: TileGeometry, rows: int, keys: int, scalars: Mapping[str, int]
) -> Iterator[Node]:
    """Yield the drawing with its legend."""
    drawn = min(rows, _MAX_DRAWN), min(keys, _MAX_DRAWN)
    tiles_by_state = find_visited_tiles(problem, tiles, *drawn, scalars)
    pairs = sum((i1 - i0) * (j1 - j0) for state_tiles in tiles_by_state.values() for i0, i1, j0, j1 in state_tiles)
    counts = {state: f"{len(state_tiles)} {state.replace('-', ' ')}" for state, state_tiles in tiles_by_state.items()}
    counts["skipped"] = f"{1 - pairs / max(drawn[0] * drawn[1], 1):.0%} of all pairs skipped"
    legend = E(
        "ul",
        (
            E("li", E("span", class_=f"swatch {state}"), f"{counts[state]}: {text}")
            for state, text in _STATES.items()
            if tiles_by_state.get(state, True)
        ),
        class_="legend",
    )
    caption = f"{tiles}; {rows} query rows, {keys} keys"
    if drawn != (rows, keys):
        caption += f", of which {drawn[0]} rows and {drawn[1]} keys are drawn"
    yield E(
        "figure", _draw_tiles(tiles_by_state, tiles, *drawn, caption), E("figcaption", caption, legend), class_="map"
    )


def find_visited_tiles(
    problem: AttentionProblem, tiles: TileGeometry, rows: int, keys: int, scalars: Mapping[str, int]
) -> dict[str, list[tuple[float, float, int, int]]]:
    """Return the visited tiles by state: [start, stop) of rows in units of query rows, and [start, stop) of keys."""
    seen, ranges = (
        compute_visibility(problem, rows, keys, scalars),
        compute_visible_ranges(problem, rows, keys, scalars),
    )
    tiles_by_state: dict[str, list[tuple[float, float, int, int]]] = {"full": [], "partial": [], "by-data": []}
    for r0 in range(0, rows * tiles.group, tiles.rows):
        r1 = min(r0 + tiles.rows, rows * tiles.group)
        i0, i1 = r0 // tiles.group, (r1 - 1) // tiles.group + 1
        for start, end in _list_key_ranges(problem, np.any(ranges[i0:i1], axis=0)):
            for j0 in range(start, end, tiles.keys):
                j1 = min(j0 + tiles.keys, end)
                block = seen[i0:i1, j0:j1]
                if (block == ALWAYS).all() and j1 - j0 == tiles.keys:
                    state = "full"
                elif (block >= CHANGED).any():
                    state = "partial"
                elif (block == BY_DATA).any():
                    state = "by-data"
                else:
                    continue
                tiles_by_state[state].append((r0 / tiles.group, r1 / tiles.group, j0, j1))
    return tiles_by_state


def _list_key_ranges(problem: AttentionProblem, visible: np.ndarray) -> Iterator[tuple[int, int]]:
    """Yield the ranges of keys that any row of a tile sees; keys after the sinks are a range of their own."""
    window = problem.window
    sinks = window.sinks if window is not None and window.left is not None and isinstance(window.sinks, int) else 0
    for first, visible_range in ((0, visible[:sinks]), (sinks, visible[sinks:])):
        (indices,) = np.nonzero(visible_range)
        if len(indices):
            yield first + int(indices[0]), first + int(indices[-1]) + 1


def _draw_tiles(
    tiles_by_state: Mapping[str, list[tuple[float, float, int, int]]],
    tiles: TileGeometry,
    rows: int,
    keys: int,
    label: str,
) -> Node:
    longest = max(rows, keys, 1)
    wide, high = max(_SIDE * keys / longest, 24), max(_SIDE * rows / longest, 24)
    x, y = wide / max(keys, 1), high / max(rows, 1)
    shapes = [E("rect", x=_LEFT, y=_TOP, width=f"{wide:.1f}", height=f"{high:.1f}", class_="skipped frame")]
    for state, state_tiles in tiles_by_state.items():
        gap = 0.5 if min(tiles.keys * x, tiles.rows / tiles.group * y) > 3 else 0
        path = "".join(
            f"M{_LEFT + j0 * x:.2f} {_TOP + i0 * y:.2f}h{max((j1 - j0) * x - gap, 0.2):.2f}"
            f"v{max((i1 - i0) * y - gap, 0.2):.2f}h{-max((j1 - j0) * x - gap, 0.2):.2f}z"
            for i0, i1, j0, j1 in state_tiles
        )
        if path:
            shapes.append(E("path", d=path, class_=state))
    for value in list_ticks(keys, 6):
        shapes.append(E("text", str(value), x=f"{_LEFT + value * x:.1f}", y=_TOP - 6, text_anchor="middle"))
    for value in list_ticks(rows, 6) if high > 40 else [0]:
        shapes.append(E("text", str(value), x=_LEFT - 6, y=f"{_TOP + value * y + 4:.1f}", text_anchor="end"))
    shapes.append(E("text", "row", x=4, y=_TOP - 6))
    shapes.append(E("text", "key", x=_LEFT + wide + 8, y=_TOP - 6))
    return make_svg(_LEFT + wide + 40, _TOP + high + 8, shapes, label=label)
