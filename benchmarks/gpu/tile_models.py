"""Models of GPU tiles compared with timings of an H200: `python -m benchmarks.gpu.tile_models --page`.

benchmarks/results/gpu/h200_tiles.jsonl has the timings: microseconds of a kernel for a problem, with tiles. The page
docs/cuda_tile_models.md shows how well the models of schedules/cuda order the tiles of a shape when its timings take no
part in the fit; `--fit` prints the constants that all timings together give.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from scipy.optimize import least_squares
from scipy.stats import spearmanr

from lowering.attention.record.problem import AttentionProblem
from schedules.cuda.attention.decode_tiles import DecodeTiles, DecodeTiming
from schedules.cuda.matmul.matmul_reader import MatmulShape
from schedules.cuda.matmul.matmul_tiles import WgmmaMatmulTiles
from schedules.cuda.matmul.small_m_tiles import SmallMTiles, SmallMTiming
from schedules.cuda.primitives.device import DEVICES

TIMINGS = Path(__file__).parents[1] / "results" / "gpu" / "h200_tiles.jsonl"
PAGE = Path(__file__).parents[2] / "docs" / "cuda_tile_models.md"
GPU = DEVICES["sm_90a"]


class Timing(NamedTuple):
    """Microseconds of a problem with tiles."""

    problem: Any
    tiles: Any
    us: float


@dataclass(frozen=True)
class Model:
    """An estimate of tiles, in logarithms, and the constants that it takes."""

    title: str
    rough: Any
    """Constants to begin a fit with, independent of all timings."""
    timings: dict[str, list[Timing]]
    """By shape."""

    def errors(self, constants: Any, shapes: Sequence[str]) -> list[float]:
        """Return by how much estimates are off, in logarithms, but for a factor that is each shape's own."""
        residuals: list[float] = []
        for shape in shapes:
            differences = [t.tiles.estimate(t.problem, GPU, constants) - math.log(t.us) for t in self.timings[shape]]
            residuals += [error - sum(differences) / len(differences) for error in differences]
        return residuals

    def fitted(self, shapes: Sequence[str]) -> Any:
        """Return the constants that fit these shapes best."""
        names = [field.name for field in dataclasses.fields(self.rough)]
        start = np.log([getattr(self.rough, name) for name in names])

        def constants(logarithms: np.ndarray) -> Any:
            return dataclasses.replace(self.rough, **dict(zip(names, np.exp(logarithms).tolist())))

        def residuals(logarithms: np.ndarray) -> list[float]:
            # Data need not determine every constant: the last terms keep it where it is.
            return [*self.errors(constants(logarithms), shapes), *(0.01 * (logarithms - start))]

        return constants(least_squares(residuals, start, loss="soft_l1", f_scale=0.03).x)

    def left_out(self, shape: str) -> tuple[float, float]:
        """Return how a model whose constants the other shapes give does on a shape: Spearman's correlation of estimates
        and timings, and the time of the tiles that it chooses by the fastest."""
        constants = self.fitted([other for other in self.timings if _of_weights(other) != _of_weights(shape)])
        estimates = [t.tiles.estimate(t.problem, GPU, constants) for t in self.timings[shape]]
        times = [t.us for t in self.timings[shape]]
        return float(spearmanr(estimates, times).statistic), times[int(np.argmin(estimates))] / min(times)


def _of_weights(shape: str) -> str:
    """Return the common key of shapes that differ in rows alone."""
    return shape.partition(" rows of ")[2] or shape


def rows() -> list[dict[str, Any]]:
    return [json.loads(line) for line in TIMINGS.read_text().splitlines()]


def decode_model() -> Model:
    timings: dict[str, list[Timing]] = {}
    for row in rows():
        if row["kernel"] == "decode":
            p = AttentionProblem(
                batch=row["batch"], q_len=1, kv_len=row["keys"], q_heads=32, kv_heads=8, head_dim=128, v_head_dim=128,
                dtype="float16", v_dtype="float16", acc_dtype="float32", scale=128**-0.5,
            )  # fmt: skip
            timing = Timing(p, DecodeTiles(**row["tiles"]), row["us"])
            timings.setdefault(f"{row['batch']} x {row['keys']}", []).append(timing)
    return Model(
        "Decode attention: 32 heads on 8, head size 128; batch x keys",
        DecodeTiming(3000, 700, 1.0, 3000, 3000, 100, 0.1),
        timings,
    )


def many_rows() -> dict[str, list[Timing]]:
    return matmul_timings("many rows", WgmmaMatmulTiles, 1 << 20)


def matmul_timings(kernel: str, kind: type, max_rows: int) -> dict[str, list[Timing]]:
    """Return timings of GEMMs with at most so many rows, by shape."""
    timings: dict[str, list[Timing]] = {}
    for row in rows():
        if row["kernel"] == kernel and row["m"] <= max_rows:
            shape = MatmulShape("float16", 1, row["m"], row["n"], row["k"], row["matmuls"])
            name = f"{row['m']} rows of {row['n']} x {row['k']}{' (gate)' if row['matmuls'] > 1 else ''}"
            timings.setdefault(name, []).append(Timing(shape, kind(**row["tiles"]), row["us"]))
    return timings


def few_rows_model() -> Model:
    rough = SmallMTiming(3000, 32768, 0.1, 0.1, 0.1, 0.1, 0.1, 0.1)
    return Model("Few rows; n x k of the weight", rough, matmul_timings("few rows", SmallMTiles, 8))


HEADER = """# Models of GPU tiles

Generated by `python -m benchmarks.gpu.tile_models --page`; do not edit.

Default tiles, and the order in which a tuner tries them, follow from models in `schedules/cuda` (`estimate` of each
class of tiles). Their constants are fitted to timings of an H200 (`benchmarks/results/gpu/h200_tiles.jsonl`, float16,
captured as graphs over rotating inputs, medians of 5 or 7 turns). Here each shape is left out of the fit of the
constants by which it is predicted; shapes that differ in rows alone are left out together. *Correlation* is Spearman's,
of predicted and measured times over all tiles that were measured; *spread* is the slowest by the fastest; *chosen* is
the time of the tiles that the model thinks fastest, by the fastest.
"""


def page() -> str:
    lines = [HEADER]
    for model in (decode_model(), few_rows_model()):
        lines += [f"## {model.title}\n", "| shape | tiles | spread | correlation | chosen |", "|---|---|---|---|---|"]
        for shape, timings in model.timings.items():
            times = [t.us for t in timings]
            rank, chosen = model.left_out(shape)
            lines.append(f"| {shape} | {len(times)} | {max(times) / min(times):.2f} | {rank:.2f} | {chosen:.3f} |")
        lines.append("")
    lines += [
        "## GEMM with many rows\n",
        "| shape | tiles | measured, us | predicted by the first |",
        "|---|---|---|---|",
    ]
    for shape, timings in many_rows().items():
        first = timings[0]
        for t in timings:
            ratio = math.exp(t.tiles.estimate(t.problem, GPU) - first.tiles.estimate(first.problem, GPU))
            lines.append(f"| {shape} | {_described(t.tiles)} | {t.us:.1f} ({t.us / first.us:.2f}) | {ratio:.2f} |")
    return "\n".join(lines) + "\n"


def _described(tiles: WgmmaMatmulTiles) -> str:
    form = "ping-pong" if tiles.ping_pong else "cooperative"
    return f"{form}, n {tiles.n}, clusters of {tiles.cluster}, split_steps {tiles.split_steps}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--fit", action="store_true", help="print the constants that all timings give")
    parser.add_argument("--page", action="store_true", help="write docs/cuda_tile_models.md")
    options = parser.parse_args()
    if options.fit:
        for model in (decode_model(), few_rows_model()):
            print(model.fitted(list(model.timings)))
    if options.page:
        PAGE.write_text(page())


if __name__ == "__main__":
    main()
