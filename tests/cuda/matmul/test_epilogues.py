"""Epilogues of query, key and value matmuls: which are fused, and their results."""

from __future__ import annotations

import itertools
import os
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import ml_dtypes
import numpy as np
import onnx
import pytest
from onnx import helper, numpy_helper

import lowering
from tests import cuda_emulation as emulated
from tests.cuda.audits import early_launch, sass
from tests.cuda.audits.matmul_code import machine_code_of
from tests.cuda.models.steps import work
from tests.cuda_emulation import device
from tests.cuda_emulation.processes import environment

TARGETS = ("sm_80", "sm_90a")
ARCHITECTURES = (*TARGETS, "sm_100", "sm_120")
LENGTH = 48  # slots of a cache
Arrays = dict[str, np.ndarray]


@dataclass(frozen=True)
class Case:
    """Queries and keys are rotated, keys and values go to caches."""

    k: int = 256
    heads: int = 2
    kv_heads: int = 1
    head_dim: int = 64
    dtype: str = "float16"
    norm: bool = True
    bias: bool = False
    rows: bool = False
    """Whether caches have rows of all heads, as the matmuls give them; nothing is rotated then."""
    rotary: str = "RotaryEmbedding"
    """Or "halves", the same of other operators; "pairs", of neighbors; "" for none."""
    mode: str = "linear"
    cached: bool = True
    """Otherwise keys and values are outputs."""
    one_cache: bool = False
    """Whether values go to what keys have been stored in."""
    reads_cache: str = ""
    """Whether a cache is read "before" its update, or the first one "between" the updates."""
    sizes: tuple[int, int] | None = None
    """Batches and tokens, where the model says how many."""
    joined: bool = True
    """Whether all is one kernel."""

    def model(self) -> onnx.ModelProto:
        rng, kind = np.random.default_rng(self.k), getattr(onnx.TensorProto, self.dtype.upper())
        H, J, D, node = self.heads, self.kv_heads, self.head_dim, helper.make_node
        weights = {"scale": 1 + 0.1 * rng.standard_normal(self.k)}
        nodes = [node("RMSNormalization", ["x", "scale"], ["rows"], axis=-1, epsilon=1e-5)] if self.norm else []
        outputs = {"q": ["B", H, "S", D]}
        for name, heads in (("q", H), ("k", J), ("v", J)):
            weights[f"w{name}"] = rng.standard_normal((self.k, heads * D)) / self.k**0.5
            nodes.append(node("MatMul", ["rows" if self.norm else "x", f"w{name}"], [f"p{name}"]))
            if self.bias:
                weights[f"b{name}"] = rng.standard_normal(heads * D)
                nodes += [node("Add", [f"p{name}", f"b{name}"], [f"biased_{name}"])]
            if self.rows and name != "q":
                nodes.append(node("TensorScatter", [f"cache_{name}", f"p{name}", "at"], [f"next_{name}"], axis=1))
                outputs[f"next_{name}"] = ["B", *self.slots]
                continue
            nodes += [
                node("Constant", [], [f"shape_{name}"], value_ints=[0, 0, heads, D]),
                node("Reshape", [f"biased_{name}" if self.bias else f"p{name}", f"shape_{name}"], [f"r{name}"]),
                node("Transpose", [f"r{name}"], [f"h{name}"], perm=[0, 2, 1, 3]),
            ]
            turned = f"h{name}"
            if self.rotary and name != "v":
                turned = f"t{name}"
                nodes += self.rotated(f"h{name}", turned)
            if name != "q" and self.cached:
                if self.reads_cache == "before":
                    nodes.append(node("Neg", [f"cache_{name}"], [f"was_{name}"]))
                    outputs[f"was_{name}"] = ["B", *self.slots]
                cache = "next_k" if name == "v" and self.one_cache else f"cache_{name}"
                nodes.append(node("TensorScatter", [cache, turned, "at"], [f"next_{name}"], mode=self.mode))
                if name == "v" or not self.one_cache:
                    outputs[f"next_{name}"] = ["B", *self.slots]
                if self.reads_cache == "between" and name == "k":
                    nodes.append(node("Neg", ["next_k"], ["is_k"]))
                    outputs["is_k"] = ["B", *self.slots]
            else:
                nodes.append(node("Identity", [turned], [name]))
                outputs[name] = ["B", heads, "S", D]
        inputs = {"x": ["B", "S", self.k]}
        if self.rotary:
            inputs |= {"cos": ["B", "S", D // 2], "sin": ["B", "S", D // 2]}
        if self.cached:
            inputs |= {f"cache_{n}": ["B", *self.slots] for n in self.caches}
        fixed = dict(zip("BS", self.sizes or "BS"))
        inputs, outputs = ({n: [fixed.get(d, d) for d in dims] for n, dims in x.items()} for x in (inputs, outputs))
        graph = helper.make_graph(
            nodes,
            "epilogues",
            [helper.make_tensor_value_info(n, kind, dims) for n, dims in inputs.items()]
            + ([helper.make_tensor_value_info("at", onnx.TensorProto.INT64, [fixed["B"]])] if self.cached else []),
            [helper.make_tensor_value_info(n, kind, dims) for n, dims in outputs.items()],
            [numpy_helper.from_array(w.astype(self.numpy), n) for n, w in weights.items() if self.norm or n != "scale"],
        )
        return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 24)], ir_version=12)

    @property
    def slots(self) -> tuple[int, ...]:
        """Return the dims of a cache after the batch."""
        if self.rows:
            return (LENGTH, self.kv_heads * self.head_dim)
        return (self.kv_heads, LENGTH, self.head_dim)

    @property
    def caches(self) -> str:
        return "k" if self.one_cache else "kv"

    @property
    def numpy(self) -> np.dtype:
        return np.dtype(getattr(ml_dtypes, self.dtype, self.dtype))

    def rotated(self, x: str, y: str) -> list[onnx.NodeProto]:
        node, half = helper.make_node, self.head_dim // 2
        if self.rotary != "halves":
            return [node("RotaryEmbedding", [x, "cos", "sin"], [y], interleaved=int(self.rotary == "pairs"))]
        tables = []
        for table in ("cos", "sin"):
            tables += [
                node("Concat", [table, table], [f"{y}_{table}_2"], axis=-1),
                node("Constant", [], [f"{y}_{table}_1"], value_ints=[1]),
                node("Unsqueeze", [f"{y}_{table}_2", f"{y}_{table}_1"], [f"{y}_{table}"]),
            ]
        return [
            *tables,
            node("Constant", [], [f"{y}_halves"], value_ints=[half, half]),
            node("Split", [x, f"{y}_halves"], [f"{y}_low", f"{y}_high"], axis=-1),
            node("Neg", [f"{y}_high"], [f"{y}_negative"]),
            node("Concat", [f"{y}_negative", f"{y}_low"], [f"{y}_turned"], axis=-1),
            node("Mul", [x, f"{y}_cos"], [f"{y}_one"]),
            node("Mul", [f"{y}_turned", f"{y}_sin"], [f"{y}_other"]),
            node("Add", [f"{y}_one", f"{y}_other"], [y]),
        ]

    def draw(self, batch: int, tokens: int) -> Arrays:
        rng, D = np.random.default_rng(7 * batch + tokens), self.head_dim
        angles = rng.uniform(0, 6, (batch, tokens, D // 2))
        feeds = {"x": rng.standard_normal((batch, tokens, self.k))}
        if self.rotary:
            feeds |= {"cos": np.cos(angles), "sin": np.sin(angles)}
        if self.cached:
            feeds |= {
                f"cache_{n}": rng.standard_normal((batch, *self.slots)) for n in ("k" if self.one_cache else "kv")
            }
        rounded = {name: array.astype(self.numpy) for name, array in feeds.items()}
        # The last rows of a linear cache end after it: those rows are dropped.
        return rounded | ({"at": rng.integers(0, LENGTH + 1, batch)} if self.cached else {})

    def right(self, proto: onnx.ModelProto, feeds: Arrays) -> Arrays:
        """Return the results in float64."""
        weights = {w.name: numpy_helper.to_array(w).astype("float64") for w in proto.graph.initializer}
        x, D = feeds["x"].astype("float64"), self.head_dim
        if self.norm:
            x = x / np.sqrt((x * x).mean(-1, keepdims=True) + 1e-5) * weights["scale"]
        outputs: Arrays = {}
        for name, heads in (("q", self.heads), ("k", self.kv_heads), ("v", self.kv_heads)):
            rows = x @ weights[f"w{name}"] + weights.get(f"b{name}", 0.0)
            rows = rows.reshape(*x.shape[:2], heads, D).transpose(0, 2, 1, 3)
            if self.rotary and name != "v":
                cos, sin = (feeds[n].astype("float64")[:, None] for n in ("cos", "sin"))
                near = self.rotary == "pairs"
                low, high = (rows[..., ::2], rows[..., 1::2]) if near else (rows[..., : D // 2], rows[..., D // 2 :])
                rotated = [low * cos - high * sin, low * sin + high * cos]
                rows = np.stack(rotated, -1).reshape(rows.shape) if near else np.concatenate(rotated, -1)
            if name == "q" or not self.cached:
                outputs[name] = rows
                continue
            cache = feeds[f"cache_{name}"].astype("float64") if name in self.caches else outputs["next_k"]
            outputs[f"was_{name}"], outputs[f"next_{name}"] = -cache, cache.copy()
            for b, first in enumerate(feeds["at"]):
                for s in range(rows.shape[2]):
                    slot = first + s if self.mode == "linear" else (first + s) % LENGTH
                    if slot < LENGTH and self.rows:
                        outputs[f"next_{name}"][b, slot] = rows[b, :, s].reshape(-1)
                    elif slot < LENGTH:
                        outputs[f"next_{name}"][b, :, slot] = rows[b, :, s]
            outputs[f"is_{name}"] = -outputs[f"next_{name}"]
        return outputs


CASES = {
    "norm and rotation": Case(),
    "bfloat16, more heads, no norm": Case(dtype="bfloat16", heads=4, kv_heads=2, norm=False),
    "biases and larger heads": Case(bias=True, head_dim=128, heads=1, k=520),
    "small heads": Case(head_dim=16, heads=3, kv_heads=3),
    "a rotation of several operators": Case(rotary="halves"),
    "caches that wrap": Case(mode="circular"),
    "caches of rows": Case(rotary="", rows=True),
    "no rotation": Case(rotary="", bias=True),
    "no caches": Case(cached=False),
    "one token": Case(sizes=(1, 1)),
    "as many as say that few are never": Case(sizes=(2, 40)),
    "one cache for both": Case(one_cache=True, joined=False),
    "pairs of neighbors": Case(rotary="pairs", joined=False),
    "caches are read before": Case(reads_cache="before"),
    "a cache is read between the updates": Case(reads_cache="between", joined=False),
}
# Batches and tokens, up to the rows of a block with a norm (8), without (32), and more.
SIZES = ((1, 1), (2, 1), (3, 3), (1, 8), (5, 6), (2, 40), (0, 1))


def measured(name: str, arch: str) -> tuple[list[str], list[int], float]:
    """Return the rules of the called kernels, launches by SIZES, and the largest error in units in the last position.

    Cache slots without a new row do not change."""
    case = CASES[name]
    proto = case.model()
    donated = ("cache_.*",) if case.cached else ()
    model = lowering.compile(proto, f"cuda:{arch}", donate=donated)
    launches, worst = [], 0.0
    for batch, tokens in SIZES if case.sizes is None else [case.sizes]:
        feeds = case.draw(batch, tokens)
        original = {n: array.copy() for n, array in feeds.items()}
        device.take_calls()
        results = model.run(feeds)
        calls = work(device.take_calls())
        launches.append(calls["cuLaunchKernelEx"] + calls["cuLaunchKernel"])
        expected = case.right(proto, original)
        for output, result in results.items():
            wide, want = result.astype("float64"), expected[output]
            assert result.shape == want.shape
            if output.startswith("next_"):
                still = want == original[f"cache_{case.caches[-1] if output == 'next_v' else 'k'}"].astype("float64")
                assert (wide[still] == want[still]).all()
            error = np.abs(wide - want).max(initial=0.0) / np.abs(want).max(initial=1.0)
            worst = max(worst, error / float(ml_dtypes.finfo(case.numpy).eps))
    rules = {kernel.name: kernel.schedule for kernel in model.manifest.kernels}
    return [rules[call.kernel] for call in model.manifest.calls], launches, worst


@pytest.mark.sampled(10)
@pytest.mark.parametrize("arch", TARGETS)
@pytest.mark.parametrize("name", CASES)
def test_epilogues(name: str, arch: str) -> None:
    rules, launches, worst = emulated.run(measured, name, arch, arch=arch, timeout=500)
    case = CASES[name]
    assert worst < 4
    assert ("epilogue_matmul" in rules) == case.joined
    if len(rules) > 1:
        return
    for (batch, tokens), count in zip(SIZES if case.sizes is None else [case.sizes], launches, strict=True):
        rows = batch * tokens
        few = 8 if case.norm else 32
        assert not emulated.counts() or (count == min(rows, 1) if rows <= few else count >= 2)


AUDITED = itertools.product(("norm and rotation", "bfloat16, more heads, no norm"), ARCHITECTURES)


@pytest.mark.sampled(5)
@pytest.mark.no_gpu
@pytest.mark.parametrize(("name", "arch"), AUDITED)
def test_machine_code(name: str, arch: str) -> None:
    """Nothing spills to memory, and only weights are prefetched before earlier kernels are done.

    From sm_100 on, ptxas stores a few numbers there that are used around the loop."""
    manifest, functions = machine_code_of(CASES[name].model(), arch, donate=("cache_k", "cache_v"))
    (kernel,) = manifest.kernels
    assert kernel.schedule == "epilogue_matmul"
    first = next(f for f in functions if f.name == f"{kernel.name}_kernel")
    spills = [at for at, instruction in enumerate(first.instructions) if instruction.opcode in ("LDL", "STL")]
    assert any(instruction.opcode == "HMMA" for instruction in first.instructions)
    assert not {at for body in sass.multiplying(first) for at in body} & set(spills)
    assert len(spills) <= (0 if arch in ("sm_80", "sm_90a") else 8)
    if arch != "sm_80":
        assert early_launch.prefetches(first) and not early_launch.faults(first)


@pytest.mark.no_gpu
@pytest.mark.slow
def test_tuning(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Candidates compute the same results and caches as the CPU."""
    here = {**os.environ, **environment("sm_80")}
    monkeypatch.setenv("PATH", here["PATH"])
    model, sizes, batch = CASES["norm and rotation"].model(), [{"B": 1, "S": 2}], tmp_path / "batch"
    done = lowering.tune(
        model, tmp_path / "database", "cuda:sm_80", sizes=sizes, trials=6, export=batch, donate=("cache_.*",)
    )
    assert [outcome.trials for outcome in done.outcomes] == [6]
    command = [sys.executable, "-m", "lowering", "measure", str(batch)]
    measured = subprocess.run(command, capture_output=True, text=True, timeout=600, env=here)
    assert measured.returncode == 0 and " 0 of candidates that failed" in measured.stdout, measured
