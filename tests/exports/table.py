"""Compile the exports, compare them with PyTorch in float64 at every shape setting, and write docs/models.md.

`python -m tests.exports.table [names] --folder F` (needs torch, transformers and onnxscript). F stores the exported
models and, next to each, its measurement: the page is written from all measurements there.
"""

from __future__ import annotations

import argparse
import json
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import tvm
from tvm import relax

import lowering
from lowering.attention.record.formula import Formula
from lowering.attention.record.problem import ATTRIBUTE, AttentionProblem
from lowering.profiling.expected import has_no_rule

PAGE = Path(__file__).parents[2] / "docs" / "models.md"

# The largest error of an output that is right, relative to its range.
BAR = {"float32": 1e-4, "float16": 2e-2}

PROMPT, STEPS = 3, 64


@dataclass(frozen=True)
class Outcome:
    """The results of one model. reason says why it does not compile or run, "" where it does.

    errors has one entry per shape setting. `attentions` counts nodes after fusion, `unfused` softmaxes that are left,
    `masks` the attentions with a mask, and `formulas` the masks that never exist as tensors. slow are the kernels with
    arithmetic that no rule takes, matmuls outside the rule for matmuls among them. steps is the error of 64 tokens read
    one by one into slot caches, None for models without a growing cache.
    """

    operators: dict[str, int]
    compile_s: float
    attentions: int
    unfused: int
    masks: int
    formulas: int
    slow: list[str]
    errors: list[float]
    steps: float | None
    reason: str


@dataclass(frozen=True)
class Measurement(Outcome):
    """The results of one export."""

    name: str
    model: str
    past: bool
    exporter: str
    opset: int
    dtype: str

    @property
    def ok(self) -> bool:
        errors = [*self.errors, *([] if self.steps is None else [self.steps])]
        return not (self.reason or self.slow) and all(error <= BAR[self.dtype] for error in errors)


class AttentionCounter:
    """A counter of attentions in the dumps of the compiler."""

    def __init__(self) -> None:
        self.attentions = self.unfused = self.masks = self.formulas = 0

    def __call__(self, name: str, module: Any) -> None:
        if name == "fused":
            operators = Counter(node.op_type for node in module.graph.all_nodes())
            self.attentions, self.unfused = operators["Attention"], operators["Softmax"]
        elif name == "eliminate_folded":
            for block in module["main"].body.blocks:
                for binding in block.bindings:
                    self.count(module, binding.value)

    def count(self, module: tvm.IRModule, value: Any) -> None:
        if not isinstance(value, relax.Call) or value.op != tvm.ir.Op.get("relax.call_tir"):
            return
        attrs = module[value.args[0]].attrs
        if attrs is not None and ATTRIBUTE in attrs:
            mask = AttentionProblem.from_json(attrs[ATTRIBUTE]).mask
            self.masks += mask is not None
            self.formulas += isinstance(mask, Formula)


def measure(folder: Path, by_steps: bool = False) -> Outcome:
    """Compile the model in the folder and run it at every setting there; by_steps: with slot caches too."""
    path = folder / "model.onnx"
    operators = Counter(_operator(node) for node in onnx.load(path, load_external_data=False).graph.node)
    counter, slow, errors, steps, reason = AttentionCounter(), [], [], None, ""
    seconds, start = 0.0, time.process_time()
    try:
        module = lowering.compile(path, dump=counter)
        seconds = time.process_time() - start
        slow = [k.name for k in module.manifest.kernels if has_no_rule(k) and (k.kind == "matmul" or k.flops != "0")]
        for setting in sorted(folder.glob("*.npz")):
            inputs, expected = load_setting(setting)
            actual = module.run({spec.name: inputs[spec.name] for spec in module.inputs})
            errors.append(max(error(actual[name], e) for name, e in expected.items()))
        if by_steps:
            steps = stepwise(path, module, load_setting(folder / "0.npz")[0])
    except lowering.LoweringError as failure:
        reason = str(failure).splitlines()[0]
    except Exception as failure:  # it is not a message for users, and must not end the table
        reason = f"{type(failure).__name__}: {str(failure).strip().splitlines()[-1]}"
    return Outcome(
        dict(operators),
        seconds,
        counter.attentions,
        counter.unfused,
        counter.masks,
        counter.formulas,
        slow,
        errors,
        steps,
        reason,
    )


def stepwise(path: Path, module: lowering.Model, inputs: dict[str, np.ndarray]) -> float:
    """Return the error of 64 tokens one by one into slot caches, after a prompt of 3, against all of them at once."""
    slots = lowering.compile(path, static_cache=PROMPT + STEPS)
    ids = next(spec.name for spec in slots.inputs if spec.name.endswith("input_ids"))
    own_mask = ids == "input_ids"  # else the attention mask is that of the encoder's states
    fed_inputs = {ids, *slots.manifest.donated, *(["attention_mask"] if own_mask else [])}
    fixed = {spec.name: inputs[spec.name] for spec in module.inputs if spec.name not in fed_inputs}
    tokens = np.random.default_rng(1).integers(3, 100, (len(inputs[ids]), PROMPT + STEPS))
    feeds = {ids: tokens, "attention_mask": np.ones_like(tokens), **fixed}
    feeds |= {name: inputs[name][:, :, :0] for name in slots.manifest.donated}
    expected = module.run({spec.name: feeds[spec.name] for spec in module.inputs})[module.outputs[0].name]
    decoder = slots.decoder(ids=ids, mask="attention_mask" if own_mask else "", fixed=fixed)
    decoder.prefill(tokens[:, :PROMPT])
    actual = np.stack([decoder.step(tokens[:, k]) for k in range(PROMPT, PROMPT + STEPS)], axis=1)
    return error(actual, expected[:, PROMPT:])


def load_setting(path: Path) -> tuple[dict[str, np.ndarray], dict[str, np.ndarray]]:
    """Return inputs and expected outputs by name."""
    with np.load(path) as arrays:
        inputs = {name: arrays[name] for name in arrays.files if not name.startswith("=")}
        return inputs, {name[1:]: arrays[name] for name in arrays.files if name.startswith("=")}


def error(actual: np.ndarray, expected: np.ndarray) -> float:
    """Return the largest difference relative to the range of the expected array, or to its size if that is constant.

    It is infinite for another shape or for NaN.
    """
    if actual.shape != expected.shape:
        return float("inf")
    scale = float(np.ptp(expected)) or float(np.abs(expected).max()) or 1.0 if expected.size else 1.0
    difference = np.abs(actual.astype(np.float64) - expected).max(initial=0.0) / scale
    return float(difference) if np.isfinite(difference) else float("inf")


def _operator(node: onnx.NodeProto) -> str:
    return f"{node.domain}.{node.op_type}" if node.domain not in ("", "ai.onnx") else node.op_type


# -- the page ---------------------------------------------------------------------------------------------------------

HEADER = """# Models

Generated by `python -m tests.exports.table --folder F`; do not edit.

Models of transformers with random weights (tests/exports/models.py: layers as wide as published small models, scaled so
that attention is far from uniform), exported by torch.onnx with dynamic batch, tokens and past. `dynamo` at opset 18 is
decomposed, at 23 it holds Attention nodes; `traced` is the older exporter. Each is compiled once and run at sizes B
(batch), S (tokens), P (past) and E (tokens of the encoder); an error is the largest difference from PyTorch in float64,
relative to the range of the output, for logits and for every present key and value. {bar}

Attentions are Attention nodes behind the fusion passes, and fused are those that the exporter had written out; a
softmax that is left would be an unfused one. A mask is removed when it is a formula and no tensor
(docs/architecture.md). Decoders with a past are compiled a second time with static caches and read tokens one by one,
against all at once.

Measured: {count} of {total} exports.

"""

Column = tuple[str, Callable[[Measurement], str]]


def _error(k: int) -> Callable[[Measurement], str]:
    return lambda m: f"{m.errors[k]:.1e}" if k < len(m.errors) else "-"


COLUMNS: list[Column] = [
    ("model", lambda m: m.model),
    ("past", lambda m: "yes" if m.past else ""),
    ("exporter", lambda m: m.exporter),
    ("opset", lambda m: str(m.opset)),
    ("type", lambda m: m.dtype),
    ("nodes", lambda m: str(sum(m.operators.values()))),
    ("operators", lambda m: str(len(m.operators))),
    ("attentions", lambda m: str(m.attentions)),
    ("of them fused", lambda m: str(m.attentions - m.operators.get("Attention", 0))),
    ("left unfused", lambda m: str(m.unfused)),
    ("masks", lambda m: str(m.masks)),
    ("of them removed", lambda m: str(m.formulas)),
    ("right", lambda m: "yes" if m.ok else "**no**"),
    ("compile CPU s", lambda m: f"{m.compile_s:.1f}"),
]


def page(measurements: Sequence[Measurement], settings: Sequence[str], total: int) -> str:
    """Return the page, sorted. total is how many exports there are."""
    columns = [*COLUMNS, *((f"error at {label}", _error(k)) for k, label in enumerate(settings))]
    columns.append((f"error of {STEPS} steps", lambda m: "-" if m.steps is None else f"{m.steps:.1e}"))
    rows = [[cell(m) for _, cell in columns] for m in sorted(measurements, key=lambda m: m.name)]
    bar = " ".join(f"The bar is {bar:g} for {dtype}." for dtype, bar in BAR.items())
    text = HEADER.format(bar=bar, count=len(rows), total=total) + _table([heading for heading, _ in columns], rows)
    wrong = [[m.name, m.reason or "an output differs by more than the bar"] for m in measurements if not m.ok]
    text += "\n## Exceptions\n\n" + (_table(["export", "reason"], sorted(wrong)) if wrong else "None.\n")
    used = Counter(name for m in measurements for name in m.operators)
    by_use = sorted(used, key=lambda name: (-used[name], name))
    return text + "\n## Operators\n\nBy the number of exports that hold them: " + _list(by_use, used)


def _table(headings: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    lines = [headings, ["---"] * len(headings), *rows]
    return "\n".join("| " + " | ".join(cell.replace("|", "/") for cell in line) + " |" for line in lines) + "\n"


def _list(names: Sequence[str], count: Counter[str]) -> str:
    return ", ".join(f"{name} {count[name]}" for name in names) + ".\n"


def main(arguments: Sequence[str] | None = None) -> None:
    from tests.exports.export import exports, make
    from tests.exports.forms import SETTINGS

    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", help="exports, or models for all of their exports")
    parser.add_argument("--folder", type=Path, required=True)
    parser.add_argument("--page", type=Path, default=PAGE)
    options = parser.parse_args(arguments)
    measurements: list[Measurement] = []
    for export in exports():
        record = options.folder / f"{export.name}.json"
        if not options.names or export.name in options.names or export.model in options.names:
            outcome = measure(make(export, options.folder), by_steps=export.past and not export.traced)
            measurement = Measurement(
                **asdict(outcome),
                name=export.name,
                model=export.model,
                past=export.past,
                exporter=export.exporter,
                opset=export.opset,
                dtype="float16" if export.half else "float32",
            )
            record.write_text(json.dumps(asdict(measurement)))
            worst = ", ".join(f"{e:.1e}" for e in measurement.errors)
            verdict = "right" if measurement.ok else f"WRONG {measurement.reason}"
            print(f"{export.name}: {measurement.compile_s:.1f} s, errors {worst}: {verdict}", flush=True)
        if record.is_file():
            measurements.append(Measurement(**json.loads(record.read_text())))
    options.page.write_text(
        page(measurements, [f"B{s.batch} S{s.tokens} P{s.past} E{s.source}" for s in SETTINGS], len(exports()))
    )


if __name__ == "__main__":
    main()
