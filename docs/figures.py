"""Draws docs/figures from runs of the compiler and of what it makes: `python docs/figures.py` (needs matplotlib).

What runs gave is in docs/figures/data.json, which a test compares with runs of its own; each figure is drawn from that.
"""

from __future__ import annotations

import ast
import json
import re
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import matplotlib
import numpy as np
import onnx
import onnx_ir as ir

import lowering
from lowering import flex
from lowering.demo.decoder import DecoderConfig, build_decoder
from lowering.reporting.memory import read_plan
from lowering.reporting.script import MainFunction

matplotlib.use("svg")
matplotlib.rcParams.update({"svg.hashsalt": "figures", "font.size": 9})
matplotlib.rcParams.update({"axes.spines.right": False, "axes.spines.top": False})
import matplotlib.pyplot as plt  # noqa: E402

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT))

from benchmarks.records import read  # noqa: E402
from benchmarks.report import rows  # noqa: E402

FOLDER = Path(__file__).parent / "figures"
DATA = FOLDER / "data.json"
SAMPLES = ROOT / "tests" / "exports" / "samples"

BLUE, ORANGE, GREEN, GREY = "#3b6fb6", "#d9822b", "#3d9a6c", "#9aa5b1"

# -- runs -------------------------------------------------------------------------------------------------------------

KEYS, TILE = 512, 32


def online_softmax() -> Any:
    """One query row, whose kernel is shown ever more keys: the largest score, log of the sum, and how far y is off."""
    rng = np.random.default_rng(5)
    q, k, v = (rng.standard_normal((1, 1, n, 64), np.float32) for n in (1, KEYS, KEYS))
    q *= 2
    k *= np.linspace(0.3, 1.2, KEYS, dtype=np.float32)[None, None, :, None]  # so that later tiles bring larger scores

    def first(b: Any, h: Any, q_idx: Any, kv_idx: Any, *, count: Any) -> Any:
        return kv_idx < count

    found = []
    for count in range(TILE, KEYS + 1, TILE):
        captures = {"count": np.array(count)}
        y, lse = flex.flex_attention(q, k, v, mask_mod=first, captures=captures, return_lse=True)
        found.append((y[0, 0, 0], float(lse[0, 0, 0])))
    scores = (k[0, 0] @ q[0, 0, 0]) / 8
    last = found[-1][0]
    return {
        "scores": _rounded(scores),
        "lse": _rounded([lse for _, lse in found]),
        "off": _rounded([np.abs(y - last).max() / np.abs(last).max() for y, _ in found]),
    }


def tiles() -> Any:
    """The share of pairs that blocks of a size leave to compute, by mask, and what the mask itself shows."""
    n, documents = 2048, flex.masks.documents([700, 300, 400, 648])
    examples = {
        "causal": (flex.masks.causal, None),
        "window of 256": (flex.masks.sliding_window(255), None),
        "four documents": (flex.masks.document(flex.masks.causal), documents),
    }
    found: dict[str, Any] = {}
    for name, (mask, captures) in examples.items():
        shares = {}
        for size in (256, 128, 64, 32, 16):
            blocks = flex.create_block_mask(mask, None, None, n, n, BLOCK_SIZE=size, captures=captures)
            shares[str(size)] = round(1 - blocks.sparsity() / 100, 4)
        exact = mask(0, 0, *np.ogrid[:n, :n], **(captures or {}))
        found[name] = {"blocks": shares, "exact": round(float(np.mean(np.broadcast_to(exact, (n, n)))), 4)}
    return found


MASKS = {
    "P1 full": "no mask",
    "P1 causal": "is_causal",
    "computed mask, causal": "three nodes: causal",
    "P1 bool triangle": "a causal mask as an input",
    "computed mask, causal and padding": "nodes: causal, a fifth is padding",
    "computed mask, window of 256": "nodes: a window of 256",
    "computed mask, packed documents": "nodes: five documents",
}


def masks() -> Any:
    """Milliseconds of attention under masks, ours and the best peer's, as the benchmarks measured them."""
    found = {row.record.case: row for row in rows(read(ROOT / "benchmarks" / "results" / "cpu-1-thread.json"))}
    times = {}
    for case, name in MASKS.items():
        row = found[case]
        assert row.seconds is not None and row.best is not None and row.best.timing is not None
        times[name] = _rounded([row.seconds * 1e3, row.best.timing.median * 1e3])
    return times


def stages() -> Any:
    """How many nodes or kernels exported models have on their way, by model."""
    found = {}
    for name in ("llama-dynamo18-batch1", "mistral-past-dynamo18", "modernbert-dynamo23", "t5-dynamo18"):
        model = onnx.load(SAMPLES / name / "model.onnx")
        counts = {"exported": len(model.graph.node)}
        for stage, module in _until("group_matmuls", model):
            if stage == "fused":
                counts["attention found"] = sum(1 for _ in module.graph)
            elif stage in _STAGES:
                counts[_STAGES[stage]] = module.script().count("R.call_tir(")
        found[name.rsplit("-", 1)[0] if name.endswith("batch1") else name] = counts
    return found


_STAGES = {
    "legalize": "a kernel each",
    "eliminate_folded": "masks in attention",
    "eliminate_dead_functions": "fused",
    "group_matmuls": "matmuls together",
}

TOKENS = 128


def memory() -> Any:
    """Of each intermediate tensor of a decoder its offset, its bytes, and the first and the last call that uses it."""
    modules = dict(_until("plan_memory", build_decoder(DecoderConfig(layers=2)), donate=("cache_.*",)))
    before, after = (_main(modules[name].script()) for name in ("lower_call_tir", "plan_memory"))
    found = read_plan(before, after, {"batch": 1, "tokens": TOKENS, "capacity": 1024})
    tensors = [[t.offset, t.size, t.first, t.last] for t in found.tensors if t.block is not None]
    return {"calls": found.calls, "tensors": tensors}


def _main(script: str) -> MainFunction:
    functions = (node for node in ast.walk(ast.parse(script)) if isinstance(node, ast.FunctionDef))
    return MainFunction(next(function for function in functions if function.name == "main"))


def numerics() -> Any:
    """Errors of a layer's output: root mean square of the differences over that of the numbers, by way of computing."""
    model = _layer()
    ways: dict[str, dict[str, Any]] = {
        "float32": {},
        "weights f16": {"weights": "f16"},
        "weights int8": {"weights": "int8"},
        "weights int4": {"weights": "int4"},
        "precision float16": {"precision": "float16"},
        "precision bfloat16": {"precision": "bfloat16"},
    }
    sizes = {"batch": 1, "tokens": 64}
    errors = {name: lowering.verify(model, sizes=sizes, **way).comparisons[0].rms for name, way in ways.items()}
    return {name: float(f"{error:.1e}") for name, error in errors.items()}


def _layer() -> onnx.ModelProto:
    """The model of docs/tutorial.md."""
    page = (Path(__file__).parent / "tutorial.md").read_text()
    code = re.search(r"```python\n(.*?)onnx.save", page, re.DOTALL)
    assert code is not None
    names: dict[str, Any] = {}
    exec(code[1], names)
    return names["model"]


class _Enough(Exception):
    pass


def _until(last: str, model: onnx.ModelProto, **options: Any) -> Iterator[tuple[str, Any]]:
    """What `compile` shows of each pass, up to one of them."""
    found: list[tuple[str, ir.Model | Any]] = []

    def dump(name: str, module: Any) -> None:
        found.append((name, module))
        if name == last:
            raise _Enough

    try:
        lowering.compile(model, "cpu:x86-64-v3", dump=dump, **options)
    except _Enough:
        yield from found


def _rounded(values: Any) -> list[float]:
    return [round(float(value), 4) for value in values]


# -- figures ----------------------------------------------------------------------------------------------------------


def draw_online_softmax(data: Any) -> None:
    scores, tiles = np.array(data["scores"]), np.arange(1, len(data["lse"]) + 1)
    figure, (top, bottom) = plt.subplots(2, sharex=True, figsize=(7, 4), height_ratios=(3, 2))
    places = (np.arange(KEYS) + 0.5) / TILE + 0.5
    top.plot(places, scores, ".", color=GREY, markersize=3, label="scores of a row")
    running = np.maximum.accumulate(scores.reshape(-1, TILE).max(1))
    top.step(tiles, running, where="mid", color=ORANGE, label="m, the largest so far")
    top.plot(tiles, data["lse"], "o-", color=BLUE, markersize=3, label="m + log l, which the kernel gives as lse")
    top.legend(frameon=False, fontsize=8, loc="lower left", bbox_to_anchor=(0, 0.98), ncols=3, handlelength=1.5)
    bottom.bar(tiles, data["off"], color=GREEN, width=0.6)
    bottom.set_ylabel("y so far:\noff by")
    bottom.set_xlabel(f"tiles of {TILE} keys that the row has seen")
    _save(figure, "online_softmax")


def draw_tiles(data: Any) -> None:
    figure, axes = plt.subplots(figsize=(7, 2.8))
    for (name, found), color in zip(data.items(), (BLUE, ORANGE, GREEN)):
        sizes = list(found["blocks"])
        axes.plot(range(len(sizes)), [100 * share for share in found["blocks"].values()], "o-", color=color, label=name)
        axes.axhline(100 * found["exact"], color=color, linestyle=":", linewidth=1)
        axes.set_xticks(range(len(sizes)), [f"{size} x {size}" for size in sizes])
    axes.set_ylim(0)
    axes.set_ylabel("% of pairs computed")
    axes.set_xlabel("blocks; dotted: what the mask shows")
    axes.legend(frameon=False, fontsize=8)
    _save(figure, "tiles")


def draw_masks(data: Any) -> None:
    figure, axes = plt.subplots(figsize=(7, 2.8))
    places = np.arange(len(data))[::-1]
    axes.barh(places + 0.2, [ours for ours, _ in data.values()], 0.36, color=BLUE, label="onnx-lowering")
    axes.barh(places - 0.2, [peer for _, peer in data.values()], 0.36, color=GREY, label="best peer")
    axes.set_yticks(places, list(data))
    axes.set_xlabel("ms, 8 heads of 64, 1024 tokens, one thread")
    axes.legend(frameon=False, fontsize=8, loc="lower left", bbox_to_anchor=(0, 0.98), ncols=2)
    _save(figure, "masks")


def draw_stages(data: Any) -> None:
    figure, axes = plt.subplots(figsize=(7, 3.2))
    for (name, counts), color in zip(data.items(), (BLUE, ORANGE, GREEN, GREY)):
        axes.plot(range(len(counts)), list(counts.values()), "o-", color=color, label=name)
        for k, count in enumerate(counts.values()):
            if k in (0, len(counts) - 1):
                axes.annotate(str(count), (k, count), (6 if k else -6, 0), textcoords="offset points",
                              ha="left" if k else "right", va="center", color=color, fontsize=8)  # fmt: skip
    stages = next(iter(data.values()))
    axes.set_xticks(range(len(stages)), [f"{'nodes' if k < 2 else 'kernels'},\n{s}" for k, s in enumerate(stages)])
    axes.tick_params(axis="x", labelsize=7.5)
    axes.set_ylim(0)
    axes.set_xlim(-0.5, len(stages) - 0.4)
    axes.legend(frameon=False, fontsize=8)
    _save(figure, "stages")


def draw_memory(data: Any) -> None:
    figure, axes = plt.subplots(figsize=(7, 3.4))
    for offset, count, first, last in data["tensors"]:
        corner, width, height = (first - 0.45, offset / 1024), last - first + 0.9, count / 1024
        axes.add_patch(plt.Rectangle(corner, width, height, facecolor="#cfe0f5", edgecolor=BLUE, linewidth=0.7))
    highest = max(offset + count for offset, count, *_ in data["tensors"])
    axes.set_xlim(-1, data["calls"])
    axes.set_ylim(0, highest / 1024 * 1.05)
    total = sum(count for _, count, *_ in data["tensors"])
    title = f"{len(data['tensors'])} tensors of {total / 1024:.0f} KiB in a block of {highest / 1024:.0f} KiB"
    axes.set_title(title, fontsize=9)
    axes.set_xlabel("call of a kernel")
    axes.set_ylabel("KiB from the beginning of the block")
    _save(figure, "memory")


def draw_numerics(data: Any) -> None:
    figure, axes = plt.subplots(figsize=(7, 2.4))
    names = list(data)[::-1]
    axes.barh(names, [data[name] for name in names], color=BLUE, height=0.6)
    axes.set_xscale("log")
    axes.set_xlim(1e-8, 1)
    for k, name in enumerate(names):
        axes.annotate(f"{data[name]:.0e}", (data[name], k), (4, 0), textcoords="offset points", va="center", fontsize=8)
    axes.set_xlabel("root mean square error of the logits, of their own")
    _save(figure, "numerics")


def _save(figure: Any, name: str) -> None:
    figure.savefig(FOLDER / f"{name}.svg", bbox_inches="tight", metadata={"Date": None})
    plt.close(figure)


FIGURES: dict[str, tuple[Callable[[], Any], Callable[[Any], None]]] = {
    "online_softmax": (online_softmax, draw_online_softmax),
    "tiles": (tiles, draw_tiles),
    "masks": (masks, draw_masks),
    "stages": (stages, draw_stages),
    "memory": (memory, draw_memory),
    "numerics": (numerics, draw_numerics),
}
"""The run and the drawing of each."""


def main() -> None:
    FOLDER.mkdir(exist_ok=True)
    data = {name: run() for name, (run, _) in FIGURES.items()}
    DATA.write_text("{\n" + ",\n".join(f'"{name}": {json.dumps(found)}' for name, found in data.items()) + "\n}\n")
    for name, (_, draw) in FIGURES.items():
        draw(data[name])


if __name__ == "__main__":
    main()
