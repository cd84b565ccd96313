"""flex.show: its numbers are counted pair by pair, and text and pictures show the blocks that there are."""

from __future__ import annotations

import io
import re
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import numpy as np
import pytest
from rich.console import Console

from lowering import InputError, flex
from lowering.flex.mask_picture import MaskWork
from tests.support.error_codes import raises

RNG = np.random.default_rng(0)


def count_blocks(shown: np.ndarray, size: tuple[int, int]) -> tuple[np.ndarray, MaskWork]:
    """Return the states of the blocks of a dense mask, and the work in them."""
    rows, keys = shown.shape
    starts = range(0, rows, size[0]), range(0, keys, size[1])
    states = np.zeros([len(axis) for axis in starts], int)
    pairs = [0, 0, 0]
    for r, row in enumerate(starts[0]):
        for c, key in enumerate(starts[1]):
            block = shown[row : row + size[0], key : key + size[1]]
            states[r, c] = 2 if block.shape == size and block.all() else int(block.any())
            pairs[states[r, c]] += block.size
    return states, MaskWork(*((states == state).sum().item() for state in range(3)), *pairs)


MASKS: dict[str, Callable[..., Any]] = {
    "causal": flex.masks.causal,
    "window": flex.masks.sliding_window(20),
    "image": flex.masks.neighborhood((7, 11), (3, 6)),
    "hidden": lambda b, h, i, j: j < 0,
    "full": flex.masks.full,
    "stripes": lambda b, h, i, j: j % 6 < 3,
}


@pytest.mark.parametrize("name", MASKS)
@pytest.mark.parametrize(("rows", "keys", "size"), [(77, 77, (8, 8)), (40, 91, (5, 13)), (1, 50, (128, 16))])
def test_numbers_are_exact(name: str, rows: int, keys: int, size: tuple[int, int]) -> None:
    picture = flex.show(MASKS[name], Q_LEN=rows, KV_LEN=keys, BLOCK_SIZE=size)
    shown = np.broadcast_to(MASKS[name](0, 0, *np.ogrid[:rows, :keys]), (rows, keys))
    states, work = count_blocks(shown, size)
    np.testing.assert_array_equal(picture.states, states)
    assert picture.work == picture.total == work
    assert work.pairs == rows * keys and work.blocks == states.size
    assert f"{work.full_blocks} full, {work.partial_blocks} partial, {work.hidden_blocks} skipped" in str(picture)
    assert f"{100 * work.hidden_pairs / (rows * keys):.2f}% of {rows * keys:,} pairs" in str(picture)
    assert f"save {work.full_pairs:,} evaluations" in str(picture)


def test_one_batch_and_head_is_drawn_and_all_are_counted() -> None:
    captures = {"lengths": np.array([5, 30])}

    def mod(b: Any, h: Any, i: Any, j: Any, *, lengths: Any) -> Any:
        return (j < lengths[b]) & (i - j <= 4 * h)

    options = {"B": 2, "H": 3, "Q_LEN": 20, "KV_LEN": 30, "BLOCK_SIZE": (4, 6), "captures": captures}
    picture = flex.show(mod, **options, batch=1, head=2)
    work_by_head = [
        count_blocks(mod(b, h, *np.ogrid[:20, :30], **captures), (4, 6))[1] for b in range(2) for h in range(3)
    ]  # fmt: skip
    assert picture.work == work_by_head[5]
    assert picture.total.hidden_pairs == sum(work.hidden_pairs for work in work_by_head)
    assert picture.total.full_blocks == sum(work.full_blocks for work in work_by_head)
    assert picture.total.pairs == 6 * 600
    assert "batch 1 of 2, head 2 of 3" in str(picture)
    assert f"all batches and heads: {picture.total.saved:.2%}" in str(picture)
    mask = flex.create_block_mask(mod, 2, 3, 20, 30, (4, 6), captures)
    assert str(flex.show(mask, batch=1, head=2)) == str(picture)


def test_a_mask_without_a_mask_mod_saves_no_evaluations() -> None:
    mask = flex.BlockMask.from_kv_blocks(
        np.array([[[1, 2]]]), np.array([[[[1, 0, 0], [2, 0, 0]]]]), BLOCK_SIZE=4, seq_lengths=(7, 12)
    )
    picture = flex.show(mask)
    assert picture.work == MaskWork(3, 3, 0, 4 * 8 + 3 * 4, 4 * 4 + 3 * 8, 0)
    assert "evaluations" not in str(picture)


# -- text -------------------------------------------------------------------------------------------------------------

SHADES = {"·": 0, "░": 1, "▒": 2, "▓": 3, "█": 4}


def read_shades(text: str) -> np.ndarray:
    """Return the shades of the text, in which each stands twice."""
    rows = [line for line in text.splitlines() if line and set(line) <= set(SHADES)]
    assert all(row[::2] == row[1::2] for row in rows)
    return np.array([[SHADES[glyph] for glyph in row[::2]] for row in rows])


def test_text_draws_every_block(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    picture = flex.show(flex.masks.sliding_window(9), Q_LEN=50, KV_LEN=60, BLOCK_SIZE=4)
    np.testing.assert_array_equal(read_shades(str(picture)), picture.states * 2)
    assert repr(picture) == str(picture)


@pytest.mark.parametrize("columns", [1, 30, 79])
def test_text_is_scaled_down_to_the_terminal(columns: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", str(columns))
    picture = flex.show(flex.masks.sliding_window(150), Q_LEN=500, KV_LEN=410, BLOCK_SIZE=4)
    rows, keys = picture.states.shape
    shades = read_shades(str(picture))
    limit = max(columns // 2, 1)
    step = -(-max(rows, keys) // limit)
    assert shades.shape == (-(-rows // step), -(-keys // step)) and max(shades.shape) <= limit
    for (r, c), shade in np.ndenumerate(shades):
        mean = picture.states[r * step : (r + 1) * step, c * step : (c + 1) * step].mean()
        assert shade == (0 if mean == 0 else 4 if mean == 2 else 1 if mean < 2 / 3 else 2 if mean < 4 / 3 else 3)
    assert columns == 1 or set(shades.flat) >= {0, 2, 4}


def test_rich_colors_the_same_text() -> None:
    picture = flex.show(flex.masks.causal, Q_LEN=64, KV_LEN=64, BLOCK_SIZE=8)
    plain, colored = io.StringIO(), io.StringIO()
    Console(file=plain, width=100).print(picture)
    Console(file=colored, width=100, force_terminal=True, color_system="standard").print(picture)
    assert plain.getvalue().rstrip("\n") == "\n".join(picture.text(100))
    assert "\x1b[34m█" in colored.getvalue()
    assert re.sub(r"\x1b\[[0-9;]*m", "", colored.getvalue()) == plain.getvalue()


@pytest.mark.parametrize(("rows", "keys"), [(0, 0), (0, 300), (5, 0)])
def test_nothing_is_shown_of_nothing(rows: int, keys: int, tmp_path: Path) -> None:
    picture = flex.show(flex.masks.causal, Q_LEN=rows, KV_LEN=keys)
    assert picture.work == MaskWork(0, 0, 0, 0, 0, 0) and picture.work.saved == 0
    assert "0 blocks" in str(picture) and not read_shades(str(picture)).size
    ElementTree.fromstring(picture._repr_html_())
    picture.save(tmp_path / "nothing.png")
    assert (tmp_path / "nothing.png").stat().st_size


# -- pictures ---------------------------------------------------------------------------------------------------------


def read_boxes(svg: str) -> dict[float, list[tuple[int, int, int]]]:
    """Return the row, the first column and the width of all rectangles by opacity."""
    inner = ElementTree.fromstring(svg).find("{*}svg")
    assert inner is not None
    boxes_by_opacity = {}
    for path in inner.iterfind("{*}path"):
        boxes = re.findall(r"M(\d+) (\d+)h(\d+)v1h-\3z", path.attrib["d"])
        assert "".join(f"M{x} {y}h{w}v1h-{w}z" for x, y, w in boxes) == path.attrib["d"]
        boxes_by_opacity[float(path.attrib["fill-opacity"])] = [(int(y), int(x), int(w)) for x, y, w in boxes]
    return boxes_by_opacity


def test_svg_draws_every_block() -> None:
    picture = flex.show(flex.masks.neighborhood((8, 8), 5), Q_LEN=64, KV_LEN=64, BLOCK_SIZE=(4, 2))
    opacity = np.zeros(picture.states.shape)
    for shade, boxes in read_boxes(picture._repr_html_()).items():
        for y, x, width in boxes:
            assert not opacity[y, x : x + width].any()
            opacity[y, x : x + width] = shade
    np.testing.assert_array_equal(opacity, picture.states / 2)


def test_svg_says_what_the_text_says_and_stays_small() -> None:
    def unkind(b: Any, h: Any, i: Any, j: Any) -> Any:
        return (i // 8 + j // 8) % 2 == 0

    picture = flex.show(flex.and_masks(unkind, lambda b, h, i, j: i < 0), Q_LEN=4096, KV_LEN=4096, BLOCK_SIZE=8)
    svg = picture._repr_html_()
    text = "".join(ElementTree.fromstring(svg).itertext())
    assert all(line in text for line in (picture.title, *picture.summary))
    chequered = flex.show(unkind, Q_LEN=512, KV_LEN=512, BLOCK_SIZE=8)
    assert len(chequered._repr_html_()) < 50_000
    assert len(flex.show(unkind, Q_LEN=8192, KV_LEN=8192, BLOCK_SIZE=8)._repr_html_()) < 50_000


def test_a_block_mask_shows_itself() -> None:
    mask = flex.create_block_mask(flex.masks.causal, None, None, 30, 30, 4)
    assert mask._repr_html_() == flex.show(mask)._repr_html_()
    assert flex.create_block_mask(flex.masks.causal, 0, None, 30, 30, 4)._repr_html_() is None


def test_files(tmp_path: Path) -> None:
    picture = flex.show(flex.masks.causal, Q_LEN=1000, KV_LEN=1000)
    picture.save(tmp_path / "mask.svg")
    assert (tmp_path / "mask.svg").read_text() == picture._repr_html_()
    picture.save(str(tmp_path / "mask.png"))
    assert (tmp_path / "mask.png").read_bytes().startswith(b"\x89PNG")


def test_blocks_of_a_png_lie_where_their_pairs_do(tmp_path: Path) -> None:
    """Also the last ones, which are cut: to 3 of 8 rows and 5 of 6 keys here."""
    from matplotlib.image import imread

    picture = flex.show(lambda b, h, i, j: (i < 8) & (j >= 42), Q_LEN=11, KV_LEN=47, BLOCK_SIZE=(8, 6))
    picture.save(tmp_path / "mask.png")
    pixels = imread(tmp_path / "mask.png")[..., :3] * 255
    skipped, partial = (
        (np.abs(pixels - color).max(-1) < 3).sum() for color in ([0xF2, 0xF4, 0xF7], [0x9D, 0xC0, 0xE4])
    )
    assert partial / (partial + skipped) == pytest.approx(8 * 5 / (11 * 47), rel=0.1)


def test_a_picture_without_matplotlib(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    picture = flex.show(flex.masks.causal, Q_LEN=10, KV_LEN=10)
    with raises("toolchain.package_missing"):
        picture.save(tmp_path / "mask.png")
    picture.save(tmp_path / "mask.svg")


@pytest.mark.parametrize(
    ("call", "pattern"),
    [
        (lambda: flex.show(flex.masks.causal, Q_LEN=3), "Give Q_LEN and KV_LEN"),
        (lambda: flex.show(flex.masks.causal, Q_LEN=3, KV_LEN=3, head=1), "head 1 cannot be shown: the mask has 1"),
        (lambda: flex.show(flex.masks.causal, B=2, Q_LEN=3, KV_LEN=3, batch=-1), "batch -1 cannot be shown"),
        (lambda: flex.show(flex.create_block_mask(flex.masks.causal, 1, 1, 3, 3), H=1), "has its own"),
        (lambda: flex.show(flex.masks.causal, Q_LEN=3, KV_LEN=3).save("mask.docx"), "one of the endings"),
        (lambda: flex.show(flex.masks.causal, Q_LEN=3, KV_LEN=3).save("mask"), "one of the endings"),
    ],
)
def test_what_does_not_fit_is_refused(call: Callable[[], Any], pattern: str) -> None:
    with pytest.raises(InputError, match=pattern):
        call()
