"""Models of tiles reproduce the order of H200 timings, also at shapes that the fit has not seen."""

from __future__ import annotations

import pytest

from benchmarks.gpu import tile_models
from benchmarks.gpu.tile_models import GPU, Model, Timing
from schedules.cuda.attention.decode_tiles import DecodeTiles
from schedules.cuda.matmul.matmul_tiles import WgmmaMatmulTiles
from schedules.cuda.matmul.small_m_tiles import SmallMTiles

pytestmark = pytest.mark.no_gpu

DECODE, SMALL_M = tile_models.decode_model(), tile_models.few_rows_model()
# The order is less reliable for weights whose tiles differ by a tenth at most, or that take slightly over two waves.
CLOSE = ("2048 x 2048", "128256 x 2048", "6144 x 4096")


@pytest.mark.parametrize("shape", DECODE.timings)
def test_decode_attention_left_out_of_the_fit(shape: str) -> None:
    correlation, chosen = DECODE.left_out(shape)
    assert correlation >= 0.8 and chosen < 1.05


@pytest.mark.parametrize("shape", SMALL_M.timings)
def test_small_m_left_out_of_the_fit(shape: str) -> None:
    correlation, chosen = SMALL_M.left_out(shape)
    assert chosen < 1.055
    assert correlation >= 0.6 or shape.endswith(CLOSE)


def test_constants_are_those_of_the_fit() -> None:
    """Equal up to rounding: as good as a fit of the timings."""
    for model, constants in ((DECODE, DecodeTiles.TIMING), (SMALL_M, SmallMTiles.TIMING)):
        shapes = list(model.timings)
        committed, fitted = (square(model, values, shapes) for values in (constants, model.fitted(shapes)))
        assert committed < 1.05 * fitted


def square(model: Model, constants: object, shapes: list[str]) -> float:
    return sum(error * error for error in model.errors(constants, shapes))


def fastest(timings: list[Timing]) -> float:
    return min(t.us for t in timings)


def taken(timings: list[Timing], tiles: object, names: tuple[str, ...]) -> float:
    """Return the measured time of tiles that agree in these fields."""
    (us,) = {t.us for t in timings if all(getattr(t.tiles, n) == getattr(tiles, n) for n in names)}
    return us


def test_defaults_are_close_to_the_fastest() -> None:
    for timings in DECODE.timings.values():
        default = DecodeTiles.default(timings[0].problem, GPU)
        us = taken(timings, default, ("keys", "warps", "stages", "split", "per_sm"))
        assert us < 1.05 * fastest(timings)
    for timings in SMALL_M.timings.values():
        us = taken(timings, SmallMTiles.default(timings[0].problem, GPU), ("warps", "ahead"))
        assert us < 1.055 * fastest(timings)


@pytest.mark.parametrize("rows", (16, 32))
def test_kernels_for_more_rows(rows: int) -> None:
    for timings in tile_models.matmul_timings("few rows", SmallMTiles, rows).values():
        if timings[0].problem.rows == rows:
            tiles = SmallMTiles.several(timings[0].problem, GPU, rows)
            assert taken(timings, tiles, ("warps", "ahead", "rows")) < 1.05 * fastest(timings)


def test_the_faster_form_is_chosen() -> None:
    compared = 0
    for timings in tile_models.many_rows().values():
        by_form = {t.tiles.ping_pong: t.us for t in timings}
        if len(by_form) == 2:
            shape = timings[0].problem
            default = WgmmaMatmulTiles.default(shape, GPU)
            # For a long k, the faster form depends on the number of rows, too.
            assert by_form[default.ping_pong] <= min(by_form.values()) * (1.005 if shape.depth <= 4096 else 1.08)
            compared += 1
    assert compared >= 15


def test_page() -> None:
    assert tile_models.PAGE.read_text() == tile_models.page(), "python -m benchmarks.gpu.tile_models --page"
