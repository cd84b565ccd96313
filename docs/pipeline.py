"""Draws docs/pipeline.svg, the figure in the README: `python docs/pipeline.py` (needs matplotlib)."""

from __future__ import annotations

from pathlib import Path

import matplotlib

matplotlib.use("svg")
matplotlib.rcParams["svg.hashsalt"] = "pipeline"  # the same bytes on every run
import matplotlib.pyplot as plt  # noqa: E402

STAGES = [
    ("model.onnx", "opset 11 to 25\nsymbolic sizes", "#e8eef7"),
    ("importer", "one function per\noperator version", "#d5e3f5"),
    ("Relax", "fused, caches\nin place", "#d5e3f5"),
    ("TensorIR", "AttentionProblem\nplain lowering", "#d9efdd"),
    ("schedules", "online softmax tiles\nsplit-KV, matmuls", "#d9efdd"),
    ("model.so", "weights, manifest\nC++ headers", "#f7ead7"),
]


def main() -> None:
    figure, axes = plt.subplots(figsize=(11, 1.7))
    for k, (name, detail, color) in enumerate(STAGES):
        axes.add_patch(plt.Rectangle((k * 2, 0), 1.6, 1, facecolor=color, edgecolor="#445566"))
        axes.text(k * 2 + 0.8, 0.7, name, ha="center", va="center", fontsize=12, weight="bold")
        axes.text(k * 2 + 0.8, 0.33, detail, ha="center", va="center", fontsize=8)
        if k:
            axes.annotate("", (k * 2, 0.5), (k * 2 - 0.4, 0.5), arrowprops={"arrowstyle": "->", "color": "#445566"})
    axes.set_xlim(-0.1, 2 * len(STAGES) - 0.3)
    axes.set_ylim(-0.1, 1.1)
    axes.axis("off")
    figure.savefig(Path(__file__).with_suffix(".svg"), bbox_inches="tight", metadata={"Date": None})


if __name__ == "__main__":
    main()
