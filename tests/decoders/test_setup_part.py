"""Computations that depend on an encoder's output alone run once: in the setup. A decoder keeps the rest."""

from __future__ import annotations

from collections.abc import Collection
from pathlib import Path

import numpy as np
import onnx
import onnx_ir as ir
import onnxruntime
import pytest

import lowering
from lowering.graph.caches.setup_split import split_setup
from tests.support.error_codes import raises

DECODERS = Path(__file__).parents[1] / "exports" / "decoders"
HEAD = '<ir_version: 10, opset_import: ["" : 24]>'
RNG = np.random.default_rng(0)
B, S, E, H, D = 2, 3, 5, 2, 4
SIZES = {"B": B, "S": S, "E": E}


def split_model(text: str, called: Collection[str] = ("q",)) -> tuple[ir.Model, ir.Model | None]:
    """Return the decoder that is left of a model, and its setup, after a check that both compute the same as it."""
    whole = onnx.parser.parse_model(f"{HEAD} {text}")
    for name, *shape in (("Wk", H * D, H * D), ("Wv", H * D, H * D)):
        whole.graph.initializer.append(
            onnx.numpy_helper.from_array(RNG.standard_normal(shape).astype(np.float32), name)
        )
    decoder = ir.from_proto(whole)
    setup = split_setup(decoder, called)
    feeds = {value.name: array_for(value) for value in whole.graph.input}
    expected = run(whole, feeds)
    setup_outputs = {} if setup is None else run(ir.to_proto(setup), feeds)
    results = {**setup_outputs, **run(ir.to_proto(decoder), {**feeds, **setup_outputs})}
    for name in expected.keys() & results.keys():
        np.testing.assert_allclose(results[name], expected[name], rtol=1e-5, atol=1e-5)
    return decoder, setup


def array_for(value: onnx.ValueInfoProto) -> np.ndarray:
    shape = [SIZES.get(dim.dim_param, dim.dim_value) for dim in value.type.tensor_type.shape.dim]
    if value.type.tensor_type.elem_type == onnx.TensorProto.FLOAT:
        return RNG.standard_normal(shape).astype(np.float32)
    return np.arange(np.prod(shape)).reshape(shape) % 4 > 0


def run(model: onnx.ModelProto, feeds: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    session = onnxruntime.InferenceSession(model.SerializeToString())
    names = [output.name for output in session.get_outputs()]
    return dict(zip(names, session.run(None, {i.name: feeds[i.name] for i in session.get_inputs()})))


def names(values: Collection[ir.Value]) -> list[str | None]:
    return [value.name for value in values]


FLAT = """
    k = MatMul (states, Wk)
    v = MatMul (states, Wv)
"""


def test_flat_keys_and_values_are_stored_by_heads() -> None:
    """With the number of keys of each source, which attention without a mask reads then."""
    decoder, setup = split_model(
        f"""g (float[B,S,8] q, float[B,E,8] states) => (float[B,S,8] y) {{ {FLAT}
        y = Attention <q_num_heads = 2, kv_num_heads = 2> (q, k, v) }}"""
    )
    assert setup is not None
    assert names(decoder.graph.inputs) == ["q", "setup.0", "setup.1", "source_lengths"]
    assert names(setup.graph.inputs) == ["states"]
    assert [str(value.shape) for value in setup.graph.outputs] == ["[B,2,E,4]", "[B,2,E,4]", "[B]"]
    assert not any(node.op_type == "MatMul" for node in decoder.graph)


def test_keys_that_are_outputs_keep_their_names_and_leave_the_decoder() -> None:
    decoder, setup = split_model(
        f"""g (float[B,S,8] q, float[B,E,8] states) => (float[B,S,8] y, float[B,2,E,4] key, float[B,2,E,4] value) {{
        {FLAT} y, key, value = Attention <q_num_heads = 2, kv_num_heads = 2> (q, k, v) }}"""
    )
    assert setup is not None
    assert names(decoder.graph.outputs) == ["y"]
    assert names(setup.graph.outputs) == ["key", "value", "source_lengths"]
    assert names(decoder.graph.inputs) == ["q", "key", "value", "source_lengths"]


def test_keys_that_are_passed_on_leave_the_decoder() -> None:
    """Nothing is left to compute once, and nothing to copy at every step."""
    decoder, setup = split_model(
        """g (float[B,2,S,4] q, float[B,2,E,4] key) => (float[B,2,S,4] y, float[B,2,E,4] same) {
        y = Attention (q, key, key) same = Identity (key) }"""
    )
    assert setup is None and names(decoder.graph.outputs) == ["y"]


def test_a_mask_of_the_source_stays_in_the_decoder() -> None:
    """It needs no matmul. Sizes that the model asks the tokens for are those of the source as well."""
    decoder, setup = split_model(
        """g (float[B,2,S,4] q, float[B,E,8] states, bool[B,E] mask) => (float[B,2,S,4] y) {
        batch = Shape <start = 0, end = 1> (q)
        rest = Constant <value_ints = [-1, 2, 4]> ()
        by_heads = Concat <axis = 0> (batch, rest)
        k = MatMul (states, Wk)
        k3 = Reshape (k, by_heads)
        k4 = Transpose <perm = [0, 2, 1, 3]> (k3)
        v = MatMul (states, Wv)
        v3 = Reshape (v, by_heads)
        v4 = Transpose <perm = [0, 2, 1, 3]> (v3)
        axes = Constant <value_ints = [1, 2]> ()
        seen = Unsqueeze (mask, axes)
        all = Shape (states)
        one = Constant <value_ints = [1]> ()
        two = Constant <value_ints = [2]> ()
        length = Slice (all, one, two)
        rows = Shape <start = 2, end = 3> (q)
        shape = Concat <axis = 0> (one, one, rows, length)
        full = Expand (seen, shape)
        y = Attention (q, k4, v4, full) }"""
    )
    assert setup is not None
    assert names(setup.graph.inputs) == ["states"]
    assert [str(value.shape) for value in setup.graph.outputs] == ["[B,2,E,4]", "[B,2,E,4]"]
    assert names(decoder.graph.inputs) == ["q", "mask", "setup.0", "setup.1"]


@pytest.mark.parametrize(
    "text",
    [
        "(float[B,S,8] q, float[B,E,8] states) => (float[B,S,8] y) { s = ReduceSum (states) y = Add (q, s) }",
        "(float[B,S,8] q, float[B,S,8] states) => (float[B,S,8] y) { k = MatMul (states, Wk) y = Add (q, k) }",
        "(float[B,S,8] q) => (float[B,S,8] y) { y = MatMul (q, Wk) }",
    ],
    ids=["no-matmul", "a-row-for-each-token", "no-source"],
)
def test_nothing_to_compute_once(text: str) -> None:
    decoder, setup = split_model(f"g {text}")
    assert setup is None and "q" in names(decoder.graph.inputs)


@pytest.fixture(scope="module")
def model() -> lowering.Model:
    return lowering.compile(DECODERS / "t5.onnx", static_cache=48)


@pytest.fixture(scope="module")
def states() -> np.ndarray:
    return np.random.default_rng(1).standard_normal((2, 7, 16)).astype(np.float32)


def test_steps_compute_nothing_of_the_source(model: lowering.Model) -> None:
    assert model.setup is not None
    kernels = [[k for k in module.manifest.kernels if "encoder" in k.flops] for module in (model, model.setup)]
    assert not kernels[0] and any(kernel.kind == "matmul" for kernel in kernels[1])
    assert {t.name for t in model.setup.outputs} <= {t.name for t in model.inputs}


def test_a_loaded_artifact_runs_by_hand(model: lowering.Model, states: np.ndarray, tmp_path: Path) -> None:
    model.save(tmp_path / "out")
    loaded = lowering.load(tmp_path / "out")
    decoder, setup = loaded.decoder(fixed={"encoder_hidden_states": states}), loaded.setup
    assert setup is not None
    inputs = {t.name: np.zeros([2, *t.dims[1:]], t.dtype) for t in loaded.inputs if t.name in loaded.manifest.donated}
    inputs |= {"input_ids": np.array([[1, 2], [3, 4]]), "past_length": np.array(0)}
    logits = loaded.run({**inputs, **setup.run({"encoder_hidden_states": states})})["logits"]
    np.testing.assert_array_equal(decoder.prefill([[1, 2], [3, 4]]), logits)
    with raises("artifact.part_not_standalone"):
        setup.save(tmp_path / "setup")
    (tmp_path / "out" / "setup.so").unlink()
    with raises("artifact.file_missing"):
        lowering.load(tmp_path / "out")


def test_sequences_go_on_from_others(model: lowering.Model, states: np.ndarray) -> None:
    """Four sequences of two sources: some go on from others of their source, some from those of the other one."""
    rng = np.random.default_rng(2)
    ids = rng.integers(0, 40, (4, 12))
    decoder = model.decoder(fixed={"encoder_hidden_states": states, "source_lengths": np.array([7, 4])})
    decoder.prefill(ids[:, :5])
    histories, sources = ids[:, :5], np.array([0, 0, 1, 1])
    for step, rows in enumerate(([1, 1, 3, 2], [0, 1, 2, 3], [2, 0, 1, 1], [3, 3, 3, 0]), 5):
        addresses = [cache.ctypes.data for cache in decoder._memory.values()]
        decoder.reorder(rows)
        assert addresses == [cache.ctypes.data for cache in decoder._memory.values()]
        histories, sources = np.concatenate([histories[rows], ids[:, step : step + 1]], axis=1), sources[rows]
        fork = decoder.fork()
        logits = decoder.step(ids[:, step])
        fixed = {"encoder_hidden_states": states[sources], "source_lengths": np.array([7, 4])[sources]}
        np.testing.assert_allclose(logits, model.decoder(fixed=fixed).prefill(histories)[:, -1], rtol=1e-4, atol=1e-5)
        np.testing.assert_array_equal(logits, fork.step(ids[:, step]))


def test_another_source(model: lowering.Model, states: np.ndarray) -> None:
    decoder = model.decoder(fixed={"encoder_hidden_states": states[:1]})
    first = decoder.prefill([[1, 2, 3]])
    decoder.reset(fixed={"encoder_hidden_states": states[1:, :4]})
    second = decoder.prefill([[1, 2, 3]])
    decoder.reset()
    np.testing.assert_array_equal(decoder.prefill([[1, 2, 3]]), second)
    decoder.reset(fixed={"encoder_hidden_states": states[:1]})
    np.testing.assert_array_equal(decoder.prefill([[1, 2, 3]]), first)


def test_outputs_of_the_setup_replace_the_source(model: lowering.Model, states: np.ndarray) -> None:
    assert model.setup is not None
    expected = model.decoder(fixed={"encoder_hidden_states": states}).prefill([[1, 2], [3, 4]])
    setup_outputs = model.setup.run({"encoder_hidden_states": states})
    np.testing.assert_array_equal(model.decoder(fixed=setup_outputs).prefill([[1, 2], [3, 4]]), expected)
    setup_outputs.popitem()
    with raises("decoder.fixed_missing"):
        model.decoder(fixed=setup_outputs)


def test_refusals(model: lowering.Model, states: np.ndarray) -> None:
    for fixed in ({}, {"source_lengths": [7, 7]}):
        with raises("decoder.fixed_missing"):
            model.decoder(fixed=fixed)
    decoder = model.decoder(fixed={"encoder_hidden_states": states})
    with raises("decoder.empty"):
        decoder.reorder([0, 1])
    with raises("decoder.source_count_mismatch"):
        model.decoder(fixed={"encoder_hidden_states": states, "source_lengths": [7, 7, 7]})
    for lengths in ([8, 7], [-1, 7], [1.0, 2.0]):
        with raises("decoder.source_lengths_invalid"):
            model.decoder(fixed={"encoder_hidden_states": states, "source_lengths": lengths})
    for wrong in ("bogus", "past_length"):
        with raises("decoder.fixed_name_unknown"):
            decoder.reset(fixed={"encoder_hidden_states": states, wrong: 1})
    with raises("decoder.source_rows_not_divisible"):
        decoder.prefill([[1], [2], [3]])
    decoder.prefill([[1], [2]])
    for rows in ([0], [0, 2], [-1, 0], [0.0, 1.0]):
        with raises("decoder.rows_invalid"):
            decoder.reorder(rows)
