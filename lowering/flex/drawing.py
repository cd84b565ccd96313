"""Pictures of block states: SVG, generated without any library, and figures drawn by matplotlib.

The colors of SVG are visible on a light and on a dark background.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from xml.sax.saxutils import escape

import numpy as np

from ..attention.flex_node import FULL
from ..errors import InputError
from ..machine import describe_missing_package

_SIDE = 256
"""The longer side of an SVG picture, in pixels."""
_MIN_SIDE = 12
_WIDTH = 440
_MAX_CELLS, _MAX_PIXELS = 64, 1024
_MAX_GRID_LINES = 40
_LINE = 17
_COLOR, _GREY = "#3b82c8", "#808080"
_STRETCHED = 8


def downsample_states(states: np.ndarray, limit: int) -> tuple[np.ndarray, int]:
    """Return the states as float64, at most `limit` along an axis, and the blocks along each side of a cell.

    If there are more states, a cell is the mean of a square of them.
    """
    step = max(1, *(-(-count // limit) for count in states.shape))
    if step == 1 or not states.size:
        return states.astype(np.float64), step
    starts = [np.arange(0, count, step) for count in states.shape]
    sums = np.add.reduceat(np.add.reduceat(states, starts[0], axis=0, dtype=np.int64), starts[1], axis=1)
    rows, columns = (np.diff([*start, count]) for start, count in zip(starts, states.shape))
    return sums / (rows[:, None] * columns), step


def shade_states(means: np.ndarray) -> np.ndarray:
    """Return the shades of mean states.

    The shade is 0 if all are hidden, 4 if all are full, 2 if all are partial, 1 and 3 between.
    """
    between = 1 + np.floor(means / FULL * 3).astype(int)
    return np.where(means == 0, 0, np.where(means == FULL, 4, between))


def render_svg(states: np.ndarray, title: str, summary: Sequence[str]) -> str:
    """Render a picture with a legend, and its title and its summary below."""
    cells = shade_states(downsample_states(states, _MAX_CELLS)[0])
    rows, columns = cells.shape
    width, height = (max(_SIDE * count // max(rows, columns, 1), _MIN_SIDE) for count in (columns, rows))
    total = height + 10 + _LINE * (2 + len(summary))
    lines = [
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{_WIDTH}" height="{total}" viewBox="0 0 {_WIDTH} {total}" '
        f'role="img" font-family="sans-serif" font-size="12"><title>{escape(title)}</title>',
        f'<svg x="1" y="1" width="{width}" height="{height}" viewBox="0 0 {max(columns, 1)} {max(rows, 1)}" '
        f'preserveAspectRatio="none" shape-rendering="crispEdges">',
    ]
    for shade in range(1, 5):
        if (chosen := cells == shade).any():
            lines.append(f'<path fill="{_COLOR}" fill-opacity="{shade / 4}" d="{_render_cells(chosen)}"/>')
    grid = _render_grid(rows, columns, width, height)
    lines.append(f'</svg><path fill="none" stroke="{_GREY}" stroke-width=".5" d="{grid}"/>')
    for column, (label, shade) in enumerate((("full", 4), ("partial", 2), ("skipped", 0))):
        x, y = 1 + 80 * column, height + 11
        box = f'<rect x="{x}" y="{y}" width="11" height="11" stroke="{_GREY}" stroke-width=".5" '
        lines.append(box + f'fill="{_COLOR}" fill-opacity="{shade / 4}"/>' + _render_text(x + 17, y + 10, label))
    lines += [_render_text(1, height + 4 + _LINE * column, line) for column, line in enumerate((title, *summary), 2)]
    return "\n".join((*lines, "</svg>")) + "\n"


def _render_text(x: int, y: int, line: str) -> str:
    return f'<text x="{x}" y="{y}" fill="{_GREY}">{escape(line)}</text>'


def _render_cells(chosen: np.ndarray) -> str:
    """Render rectangles of one cell's height, one for each run of chosen cells in a row."""
    edges = np.diff(np.pad(chosen, ((0, 0), (1, 1))).astype(int), axis=1)
    starts, ends = np.argwhere(edges == 1), np.argwhere(edges == -1)
    return "".join(f"M{x} {y}h{end - x}v1h{x - end}z" for (y, x), (_, end) in zip(starts.tolist(), ends.tolist()))


def _render_grid(rows: int, columns: int, width: int, height: int) -> str:
    """Render the border, and lines between cells unless these are too narrow for them."""
    path = f"M1 1h{width}v{height}h{-width}z"
    if max(rows, columns) <= _MAX_GRID_LINES:
        path += "".join(f"M1 {1 + height * k / rows:.4g}h{width}" for k in range(1, rows))
        path += "".join(f"M{1 + width * k / columns:.4g} 1v{height}" for k in range(1, columns))
    return path


def save_figure(
    states: np.ndarray,
    block_size: tuple[int, int],
    lengths: tuple[int, int],
    title: str,
    summary: Sequence[str],
    path: Path,
) -> None:
    """Draw a file with axes of rows and keys.

    Raises InputError without matplotlib, and for an unknown ending.
    """
    try:
        from matplotlib.colors import LinearSegmentedColormap
        from matplotlib.figure import Figure
        from matplotlib.patches import Patch
    except ImportError as error:
        raise InputError(
            "toolchain.package_missing",
            f"'{path}' cannot be drawn: {describe_missing_package('matplotlib')} An SVG file does not need it.",
        ) from error
    colors = LinearSegmentedColormap.from_list("states", ["#f2f4f7", "#9dc0e4", _COLOR])
    drawing = Figure(figsize=(6, 6.5), layout="constrained")
    drawing.suptitle("\n".join((title, *summary)), fontsize=9, x=0.02, ha="left")
    axes = drawing.subplots()
    rows, keys = (max(length, 1) for length in lengths)
    if states.size:
        means, step = downsample_states(states, _MAX_PIXELS)
        tall, wide = (count * step * size for count, size in zip(means.shape, block_size))
        axes.imshow(means, colors, vmin=0, vmax=FULL, extent=(0, wide, tall, 0), interpolation="nearest")
    axes.set(xlim=(0, keys), ylim=(rows, 0), xlabel="key", ylabel="row")
    axes.set_aspect("equal" if max(rows, keys) <= _STRETCHED * min(rows, keys) else "auto")
    patches = [
        Patch(fc=colors(x), ec=_GREY, label=label) for x, label in ((1.0, "full"), (0.5, "partial"), (0.0, "skipped"))
    ]
    drawing.legend(handles=patches, loc="outside lower left", ncols=3, frameon=False)
    if path.suffix[1:] not in drawing.canvas.get_supported_filetypes():
        endings = ", ".join(sorted(drawing.canvas.get_supported_filetypes()))
        raise InputError(
            "flex.drawing_format_unsupported",
            f"'{path}' cannot be drawn in this format. Use one of the endings {endings}.",
        )
    drawing.savefig(path, dpi=150)
