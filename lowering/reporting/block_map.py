"""Which tiles of keys an attention kernel visits for each of its tiles of query rows, as a picture."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from schedules.cuda.attention_tiles import count_packed_heads

from ..attention.problem import AttentionProblem
from .elements import E, Node, svg
from .ticks import ticks
from .visibility import ALWAYS, BY_DATA, CHANGED, before_mask, visibility

_MOST = 2048  # rows and keys that are drawn
_SIDE, _LEFT, _TOP = 420.0, 48.0, 26.0

_STATES = {
    "full": "every row of the tile sees every key: no mask code",
    "partial": "some pairs are hidden or changed, or it is a short one at the end: mask code runs",
    "by-data": "what is hidden depends on data: skipped where all is, without mask code where nothing is",
    "skipped": "in tiles that no loop visits, or that the mask's formula hides",
}


@dataclass(frozen=True)
class Geometry:
    """Tiles of so many packed rows, `group` heads of each query row, by so many keys, and of which kernel."""

    kernel: str
    rows: int
    keys: int
    group: int

    def __str__(self) -> str:
        heads = f" ({self.group} heads of a query row are one behind the other)" if self.group > 1 else ""
        return f"{self.kernel}: tiles of {self.rows} rows{heads} by {self.keys} keys"


def geometry(problem: AttentionProblem, chosen: Mapping[str, Any] | None, rows: int) -> Geometry | None:
    """How the kernel that runs for so many query rows cuts up its work; None where it has no tiles.

    chosen is what `schedules.variant.described` says.
    """
    if rows <= most_decoded(problem, chosen):
        decode = _leaf(chosen)["tiles"]["decode"]
        return Geometry("decode", max(rows, 1) * problem.group, decode.get("kv", decode.get("keys")), problem.group)
    match _leaf(chosen):
        case {"variant": "tiled", "tiles": {"prefill": prefill}}:
            return Geometry("prefill", prefill["q"], prefill["kv"], problem.group)
        case {"variant": "mma" | "wgmma" as name, "tiles": {"prefill": prefill}}:
            if name == "mma":
                return Geometry("prefill by mma.sync", prefill["q"], prefill["kv"], 1)
            return Geometry("prefill by wgmma", 64 * prefill["consumers"], prefill["kv"], count_packed_heads(problem))
    return None


def most_decoded(problem: AttentionProblem, chosen: Mapping[str, Any] | None) -> int:
    """The most query rows that the kernel for decoding serves; 0 where there is none."""
    match _leaf(chosen):
        case {"tiles": {"prefill": _, "decode": {"q_len": most}}}:
            return most
        case {"tiles": {"prefill": _, "decode": {"rows": packed}}}:
            return packed // problem.group
    return 0


def _leaf(chosen: Mapping[str, Any] | None) -> Mapping[str, Any]:
    """The variant that runs, at the larger sizes where there are several."""
    while chosen is not None and "variant" not in chosen:
        chosen = chosen.get("large", chosen.get("otherwise"))
    return chosen or {}


def block_map(
    problem: AttentionProblem, tiles: Geometry, rows: int, keys: int, scalars: Mapping[str, int]
) -> Iterator[Node]:
    """The picture with its legend."""
    drawn = min(rows, _MOST), min(keys, _MOST)
    found = visited(problem, tiles, *drawn, scalars)
    pairs = sum((i1 - i0) * (j1 - j0) for places in found.values() for i0, i1, j0, j1 in places)
    counts = {state: f"{len(places)} {state.replace('-', ' ')}" for state, places in found.items()}
    counts["skipped"] = f"{1 - pairs / max(drawn[0] * drawn[1], 1):.0%} of all pairs skipped"
    legend = E(
        "ul",
        (
            E("li", E("span", class_=f"swatch {state}"), f"{counts[state]}: {text}")
            for state, text in _STATES.items()
            if found.get(state, True)
        ),
        class_="legend",
    )
    caption = f"{tiles}; {rows} query rows, {keys} keys"
    if drawn != (rows, keys):
        caption += f", of which {drawn[0]} rows and {drawn[1]} keys are drawn"
    yield E("figure", _picture(found, tiles, *drawn, caption), E("figcaption", caption, legend), class_="map")


def visited(
    problem: AttentionProblem, tiles: Geometry, rows: int, keys: int, scalars: Mapping[str, int]
) -> dict[str, list[tuple[float, float, int, int]]]:
    """By state, of each visited tile the first packed row and the one behind the last, as query rows, and its keys."""
    seen, ranges = visibility(problem, rows, keys, scalars), before_mask(problem, rows, keys, scalars)
    found: dict[str, list[tuple[float, float, int, int]]] = {"full": [], "partial": [], "by-data": []}
    for r0 in range(0, rows * tiles.group, tiles.rows):
        r1 = min(r0 + tiles.rows, rows * tiles.group)
        i0, i1 = r0 // tiles.group, (r1 - 1) // tiles.group + 1
        for start, end in _ranges(problem, np.any(ranges[i0:i1], axis=0)):
            for j0 in range(start, end, tiles.keys):
                j1 = min(j0 + tiles.keys, end)
                part = seen[i0:i1, j0:j1]
                if (part == ALWAYS).all() and j1 - j0 == tiles.keys:
                    state = "full"
                elif (part >= CHANGED).any():
                    state = "partial"
                elif (part == BY_DATA).any():
                    state = "by-data"
                else:
                    continue
                found[state].append((r0 / tiles.group, r1 / tiles.group, j0, j1))
    return found


def _ranges(problem: AttentionProblem, some: np.ndarray) -> Iterator[tuple[int, int]]:
    """The keys that some row of a tile sees: those from the sinks on, where there are any, are a range of their own."""
    window = problem.window
    sinks = window.sinks if window is not None and window.left is not None and isinstance(window.sinks, int) else 0
    for first, part in ((0, some[:sinks]), (sinks, some[sinks:])):
        (at,) = np.nonzero(part)
        if len(at):
            yield first + int(at[0]), first + int(at[-1]) + 1


def _picture(
    found: Mapping[str, list[tuple[float, float, int, int]]], tiles: Geometry, rows: int, keys: int, label: str
) -> Node:
    longest = max(rows, keys, 1)
    wide, high = max(_SIDE * keys / longest, 24), max(_SIDE * rows / longest, 24)
    x, y = wide / max(keys, 1), high / max(rows, 1)
    parts = [E("rect", x=_LEFT, y=_TOP, width=f"{wide:.1f}", height=f"{high:.1f}", class_="skipped frame")]
    for state, places in found.items():
        gap = 0.5 if min(tiles.keys * x, tiles.rows / tiles.group * y) > 3 else 0
        path = "".join(
            f"M{_LEFT + j0 * x:.2f} {_TOP + i0 * y:.2f}h{max((j1 - j0) * x - gap, 0.2):.2f}"
            f"v{max((i1 - i0) * y - gap, 0.2):.2f}h{-max((j1 - j0) * x - gap, 0.2):.2f}z"
            for i0, i1, j0, j1 in places
        )
        if path:
            parts.append(E("path", d=path, class_=state))
    for value in ticks(keys, 6):
        parts.append(E("text", str(value), x=f"{_LEFT + value * x:.1f}", y=_TOP - 6, text_anchor="middle"))
    for value in ticks(rows, 6) if high > 40 else [0]:
        parts.append(E("text", str(value), x=_LEFT - 6, y=f"{_TOP + value * y + 4:.1f}", text_anchor="end"))
    parts.append(E("text", "row", x=4, y=_TOP - 6))
    parts.append(E("text", "key", x=_LEFT + wide + 8, y=_TOP - 6))
    return svg(_LEFT + wide + 40, _TOP + high + 8, parts, label=label)
