"""`lowering.throughput` and `bench --callers`: requests per second of several threads that call one model."""

from __future__ import annotations

import json
import re
import time
from pathlib import Path

import numpy as np
import onnx
import pytest
from onnx import numpy_helper

import lowering
from lowering.commands.cli import main
from tests.support.error_codes import raises

ROWS = 50


@pytest.fixture(scope="module")
def artifact(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Embeddings and a matmul, of any batch and length."""
    model = onnx.parser.parse_model("""<ir_version: 10, opset_import: ["" : 24]>
        m (int64[batch, tokens] ids) => (float[batch, tokens, 64] y) { x = Gather (table, ids) y = MatMul (x, w) }""")
    rng = np.random.default_rng(0)
    for name, shape in (("table", (ROWS, 32)), ("w", (32, 64))):
        model.graph.initializer.append(numpy_helper.from_array(rng.standard_normal(shape).astype(np.float32), name))
    folder = tmp_path_factory.mktemp("throughput") / "out"
    lowering.compile(model).save(folder)
    return folder


def test_requests_per_second(artifact: Path, capsys: pytest.CaptureFixture[str]) -> None:
    measured = lowering.throughput(artifact, {"batch": 1, "tokens": 16}, callers=3, seconds=0.05, warm_up=0)
    assert (measured.callers, measured.threads, measured.sizes) == (3, 1, {"batch": 1, "tokens": 16})
    assert measured.requests >= 3 and measured.requests_per_second == measured.requests / measured.seconds
    assert 0 < measured.latency.p50 <= measured.latency.p90 <= measured.latency.p99 <= measured.seconds
    # Each caller waits for its answers: no more than three requests at a time.
    assert measured.latency.p50 * measured.requests < 2 * 3 * measured.seconds
    command = ["bench", str(artifact), "--dim", "batch=1", "--dim", "tokens=1,16", "--seconds", "0", "--warm-up", "0"]
    assert main([*command, "--callers", "2"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert [re.sub(r"[\d.]+ (?!requests in)", "# ", line) for line in lines[::2]] == [
        f"# requests per second, callers: 2, threads of each: 1; batch=1, tokens={tokens}" for tokens in (1, 16)
    ]
    assert all(re.match(r"latency: p50 [\d.]+ .?s, p90 .*, p99 .*; \d+ requests in ", line) for line in lines[1::2])
    assert main([*command, "--callers", "2", "--json"]) == 0
    single, many = json.loads(capsys.readouterr().out)
    assert (single["sizes"]["tokens"], many["sizes"]["tokens"]) == (1, 16) and many["latency"]["p99"] > 0


def test_what_requests_refuse(artifact: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with raises("argument.integer_invalid"):
        lowering.throughput(artifact, {"batch": 1, "tokens": 2}, callers=0)
    with raises("dims.size_missing"):
        lowering.throughput(artifact)
    ids = np.full((1, 2), ROWS)  # outside the table: found by the call itself
    with pytest.raises(lowering.InputError):
        lowering.throughput(artifact, inputs={"ids": ids}, callers=3, seconds=0, warm_up=0)
    sizes = ["--dim", "batch=1", "--dim", "tokens=2"]
    for other in (["--trace", str(tmp_path / "t")], ["--png", str(tmp_path / "p")], ["--against", "model.onnx"]):
        assert main(["bench", str(artifact), *sizes, "--callers", "2", *other]) == 1
        assert "--callers measures requests" in capsys.readouterr().err


def test_callers_of_a_decoder_have_caches_of_their_own() -> None:
    """With caches in place: one array that two callers write would be refused, or corrupt both."""
    model = onnx.parser.parse_model("""<ir_version: 10, opset_import: ["" : 24]>
        m (float[B, 2, S, 8] q, float[B, 2, P, 8] past_k, float[B, 2, P, 8] past_v)
          => (float[B, 2, S, 8] y, float[B, 2, T, 8] new_k, float[B, 2, T, 8] new_v) {
          new_k = Concat <axis = 2> (past_k, q) new_v = Concat <axis = 2> (past_v, q) y = Attention (q, new_k, new_v)
        }""")
    module = lowering.compile(model, static_cache=16)
    assert module.manifest.slots is not None
    sizes = {"B": 1, "S": 1, module.manifest.slots.length: 3}
    cache = np.zeros((1, 2, 16, 8), np.float32)
    inputs = {name: cache.copy() for name in module.manifest.donated}
    assert inputs
    assert lowering.throughput(module, sizes, inputs, callers=2, seconds=0, warm_up=0).requests >= 2
    assert all(not array.any() for array in inputs.values())  # callers wrote into copies


def test_a_model_warms_up(artifact: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[float] = []
    model = lowering.load(artifact)
    monkeypatch.setattr(model, "wait", lambda: calls.append(time.perf_counter()))
    begin = time.perf_counter()
    lowering.throughput(model, {"batch": 1, "tokens": 2}, seconds=0, warm_up=0.1)
    assert len([at for at in calls if at < begin + 0.1]) > 5
    del calls[:]
    lowering.throughput(model, {"batch": 1, "tokens": 2}, seconds=0, warm_up=0)
    assert len(calls) == 2
