"""`lowering.bench`: the work of models with computable costs, times that add up, and refusals."""

from __future__ import annotations

import dataclasses
import json
import re
import shlex
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import onnx
import pytest
from onnx import numpy_helper

import lowering
from lowering.arithmetic import evaluate
from lowering.commands.cli import main
from lowering.manifest import FILE, Manifest
from lowering.profiling import limits
from tests.support.error_codes import raises

B, S, H, D, WIDTH, ROWS = 3, 37, 4, 16, 256, 500


@pytest.fixture(scope="module")
def artifact(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Embeddings, causal attention with grouped heads, and a gated matmul, of any batch and length."""
    model = onnx.parser.parse_model(f"""<ir_version: 10, opset_import: ["" : 24]>
        m (int64[batch, tokens] ids, bool spare) => (float[batch, tokens, {WIDTH}] y) {{
          x = Gather (table, ids)
          q = MatMul (x, wq) k = MatMul (x, wk)
          a = Attention <is_causal = 1, q_num_heads = {H}, kv_num_heads = {H // 2}> (q, k, k)
          h = MatMul (a, wide) c = Swish (h)
          same = Identity (c) otherwise = Neg (c)
          y = If (spare) <
            then_branch = t () => (float[batch, tokens, {WIDTH}] ty) {{ ty = Mul (same, otherwise) }},
            else_branch = e () => (float[batch, tokens, {WIDTH}] ey) {{ ey = Exp (same) }}
          >
        }}""")
    rng = np.random.default_rng(0)
    shapes = {"table": (ROWS, 64), "wq": (64, H * D), "wk": (64, H // 2 * D), "wide": (H * D, WIDTH)}
    for name, shape in shapes.items():
        model.graph.initializer.append(numpy_helper.from_array(rng.standard_normal(shape).astype(np.float32), name))
    folder = tmp_path_factory.mktemp("bench") / "out"
    lowering.compile(model).save(folder)
    return folder


@pytest.fixture(autouse=True)
def quick_limits(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(limits, "_SECONDS", 0.0)


def test_work_of_a_small_model(artifact: Path) -> None:
    profile = lowering.bench(artifact, {"batch": B, "tokens": S}, seconds=0)
    by_node = {node.split()[-1]: call for call in profile.calls for node in call.nodes}
    rows = B * S
    assert by_node["q"] is by_node["k"] and by_node["q"].flops == 2 * rows * 64 * (H + H // 2) * D
    # Pairs below the diagonal, two matmuls of D each, for every query head.
    assert by_node["a"].flops == 4 * D * H * B * S * (S + 1) // 2
    assert by_node["a"].bytes == 4 * rows * D * (H + 2 * H // 2 + H)
    # Swish: an exponential, a sum, a quotient, and the sign.
    assert by_node["h"] is by_node["c"] and by_node["h"].flops - 2 * rows * H * D * WIDTH in range(
        3 * rows * WIDTH, 6 * rows * WIDTH
    )
    assert by_node["x"].flops == 0 and by_node["x"].bytes == rows * (64 * 4 * 2 + 8)
    assert "ty" in by_node and "ey" not in by_node  # bools are True
    assert [by_node[name].kernel.kind for name in "qkahx"] == ["matmul"] * 2 + ["attention", "matmul", "other"]
    assert [by_node[name].kernel.schedule for name in "qax"] == ["matmul", "attention", "elementwise"]
    few = lowering.bench(artifact, {"batch": 1, "tokens": 2}, seconds=0)
    assert next(c for c in few.calls if c.kernel.kind == "attention").flops == 4 * D * H * 3


def test_rows_of_a_table_are_read_once(artifact: Path) -> None:
    """Work of more ids than the table has rows: no more than the table."""
    ids = np.zeros((20, S), np.int64)
    (call,) = (c for c in lowering.bench(artifact, inputs={"ids": ids}, seconds=0).calls if "Gather x" in c.nodes)
    assert call.bytes == ROWS * 64 * 4 + ids.size * (64 * 4 + 8)


def test_times_add_up(artifact: Path) -> None:
    profile = lowering.bench(lowering.load(artifact), {"batch": 8, "tokens": 256}, seconds=0.5)
    total = sum(call.seconds for call in profile.calls)
    assert 0.6 * profile.cpu_seconds < total < 2 * profile.cpu_seconds  # of one thread; others may run at the same time
    slow = profile.percentiles
    assert 0 < profile.seconds == slow.p50 <= slow.p90 <= slow.p99 and 0 < profile.cpu_seconds < 1.5 * slow.p99
    kinds = profile.by_kind()
    assert set(kinds) == {"matmul", "attention", "other"}
    assert sum(k.calls for k in kinds.values()) == len(profile.calls) == profile.total().calls
    assert sum(k.flops for k in profile.by_kernel().values()) == profile.total().flops
    assert all(profile.cost(call).of_limit > 0 for call in profile.calls)


def test_what_noise_makes_of_it_is_said(artifact: Path) -> None:
    profile = lowering.bench(artifact, {"batch": 1, "tokens": 16}, seconds=0)
    quiet = replace(profile, cpu_seconds=profile.seconds, limits=replace(profile.limits, flops=1e15, bandwidth=1e15))
    assert "busy" not in str(quiet) and "more than 100%" not in str(quiet)
    assert "for 75% of a run another process had the CPU" in str(replace(quiet, cpu_seconds=quiet.seconds / 4))
    slow = replace(quiet, limits=replace(quiet.limits, flops=1e6))
    assert "more than 100%: NumPy was slower than the kernel" in str(slow)


def test_command_without_the_compiler(artifact: Path, tmp_path: Path) -> None:
    """As the README has it: a table and a picture, or JSON, from a process in which nothing can import TVM."""
    readme = (Path(__file__).parents[2] / "README.md").read_text()
    documented = re.search(r"^onnx-lowering (bench out/ .*?)  +# .*$", readme, re.M)
    assert documented is not None
    arguments = ["artifact" if a == "out/" else a for a in shlex.split(documented[1])]
    (tmp_path / "artifact").symlink_to(artifact)
    code = "import sys; sys.modules['tvm'] = None; from lowering.commands.cli import main; sys.exit(main(sys.argv[1:]))"
    command = [sys.executable, "-c", code, *arguments, "--seconds", "0"]
    done = subprocess.run([*command, "--png", "bench.png"], cwd=tmp_path, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    for text in ("of the limit", "NumPy's sgemm", "between kernels", "Attention a", "elementwise"):
        assert text in done.stdout
    written = json.loads(subprocess.run([*command, "--json"], cwd=tmp_path, stdout=subprocess.PIPE, check=True).stdout)
    assert written["by_kind"]["attention"]["calls"] == 1 and written["limits"]["flops"] > 1e9
    assert [c["kernel"]["schedule"] for c in written["calls"]].count("attention") == 1
    assert (tmp_path / "bench.png").read_bytes().startswith(b"\x89PNG")


def test_a_run_as_a_timeline(artifact: Path, tmp_path: Path) -> None:
    """Kernels in sequence, with their work and nodes, for Perfetto."""
    file = tmp_path / "trace.json"
    sizes = ["--dim", f"batch={B}", "--dim", f"tokens={S}", "--seconds", "0"]
    assert main(["bench", str(artifact), *sizes, "--trace", str(file)]) == 0
    first, second, *events = json.loads(file.read_text())["traceEvents"]
    assert f"tokens={S}" in first["args"]["name"] and second["ph"] == "M"
    assert len(events) > 4 and all(event["ph"] == "X" and event["dur"] > 0 for event in events)
    ends = [event["ts"] + event["dur"] for event in events]
    assert all(end <= event["ts"] for end, event in zip(ends, events[1:]))
    (attention,) = [event for event in events if event["cat"] == "attention"]
    assert "a" in attention["args"]["ONNX nodes"].split() and attention["args"]["FLOP"] > 0


def test_several_sizes(artifact: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    command = ["bench", str(artifact), "--seconds", "0", "--dim", "batch=1", "--dim", "tokens=1,64"]
    assert main(command) == 0
    table = capsys.readouterr().out.rstrip().splitlines()[-3:]
    assert [line.split()[:2] for line in table[1:]] == [["batch=1,", "tokens=1"], ["batch=1,", "tokens=64"]]
    assert main([*command, "--json"]) == 0
    single, many = json.loads(capsys.readouterr().out)
    assert (single["sizes"]["tokens"], many["sizes"]["tokens"]) == (1, 64)
    assert sum(call["flops"] for call in many["calls"]) > 60 * sum(call["flops"] for call in single["calls"])
    assert main([*command, "--trace", str(tmp_path / "trace.json")]) == 1
    assert "[argument.run_count_mismatch]" in capsys.readouterr().err


def test_comparison_with_onnxruntime(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    text = '<ir_version: 10, opset_import: ["" : 20]> m (float[n, 8] x) => (float[n, 8] y) { y = Exp (x) }'
    onnx.save(onnx.parser.parse_model(text), tmp_path / "model.onnx")
    lowering.compile(tmp_path / "model.onnx").save(tmp_path / "out")
    command = ["bench", str(tmp_path / "out"), "--seconds", "0", "--dim", "n=3", "--against"]
    assert main([*command, str(tmp_path / "model.onnx")]) == 0
    assert re.search(r"^onnxruntime, in turns with it: [\d.]+ .s, [\d.]+ times as long$", capsys.readouterr().out, re.M)
    other = text.replace("(float[n, 8] x)", "(float[n, 8] z)").replace("Exp (x)", "Exp (z)")
    onnx.save(onnx.parser.parse_model(other), tmp_path / "other.onnx")
    assert main([*command, str(tmp_path / "other.onnx")]) == 1
    assert "has the inputs z, but the artifact has x" in capsys.readouterr().err
    (tmp_path / "broken.onnx").write_bytes(b"no model")
    assert main([*command, str(tmp_path / "broken.onnx")]) == 1
    assert "[profile.onnxruntime_failed]" in capsys.readouterr().err


def test_sizes_that_are_missing_or_unknown(artifact: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with raises("dims.size_missing"):
        lowering.bench(artifact)
    with raises("dims.name_unknown"):
        lowering.bench(artifact, {"batch": 1, "tokens": 2, "length": 3})
    with raises("input.name_unknown"):
        lowering.bench(artifact, {"batch": 1, "tokens": 2}, {"other": np.zeros(3)})
    assert main(["bench", str(artifact), "--dim", "batch=x"]) == 1
    assert "[argument.dim_invalid]" in capsys.readouterr().err


def test_a_cache_of_slots_is_filled_as_asked() -> None:
    model = onnx.parser.parse_model(f"""<ir_version: 10, opset_import: ["" : 24]>
        m (float[B, 2, S, {D}] q, float[B, 2, S, {D}] k, float[B, 2, P, {D}] past_k, float[B, 2, P, {D}] past_v)
          => (float[B, 2, S, {D}] y, float[B, 2, T, {D}] new_k, float[B, 2, T, {D}] new_v) {{
          new_k = Concat <axis = 2> (past_k, k) new_v = Concat <axis = 2> (past_v, k) y = Attention (q, new_k, new_v)
        }}""")
    module = lowering.compile(model, static_cache=64)
    assert module.manifest.slots is not None
    length = module.manifest.slots.length
    with raises("dims.size_missing"):
        lowering.bench(module, {"B": 1, "S": 1})
    for past in (40, 20):
        profile = lowering.bench(module, {"B": 3, "S": 1, length: past}, seconds=0)
        (attention,) = (c for c in profile.calls if c.kernel.kind == "attention")
        assert attention.flops == 4 * D * 3 * 2 * (past + 1)
        rows = 3 * 2 * D * 4
        updates = [c for c in profile.calls if c.kernel.name.startswith("update_cache")]
        assert len(updates) == 2 and all(2 * rows <= c.bytes <= 2 * rows + 3 * 8 for c in updates)
        assert rows * 2 * (past + 2) <= attention.bytes < rows * 2 * (past + 3)  # and the lengths


def test_a_picture_without_matplotlib(
    artifact: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    sizes = ["--dim", "batch=1", "--dim", "tokens=2", "--seconds", "0"]
    assert main(["bench", str(artifact), *sizes, "--png", str(tmp_path / "bench.png")]) == 1
    written = capsys.readouterr()
    assert "attention" in written.out and "pip install matplotlib." in written.err


def test_an_artifact_for_another_machine(artifact: Path, tmp_path: Path) -> None:
    lowering.load(artifact).save(tmp_path / "out")
    path = tmp_path / "out" / FILE
    manifest = dataclasses.replace(Manifest.from_dict(json.loads(path.read_text())), cpu_features=("avx1024",))
    manifest = dataclasses.replace(manifest, hashes={**manifest.hashes, FILE: manifest.digest()})
    path.write_text(manifest.to_json())
    with raises("artifact.cpu_features_missing"):
        lowering.bench(tmp_path / "out", {"batch": 1, "tokens": 2})


@pytest.mark.parametrize("text", ["n ** 2", "n + m", "__import__('os')", "abs(n)", "n if n else 1", "2.5"])
def test_only_arithmetic_of_sizes_is_evaluated(text: str) -> None:
    assert evaluate("min(n * 3, 7) - (n + 1) // 2 % 5", {"n": 2}) == 5
    with pytest.raises(ValueError, match="is not arithmetic of n"):
        evaluate(text, {"n": 2})
