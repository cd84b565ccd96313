"""`verify`: inputs that fit, tolerances that sound models meet and unsound ones do not, and who cannot run a model."""

from __future__ import annotations

import copy
import dataclasses
import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnx_ir as ir
import pytest

import lowering
from lowering.checking import references, trial
from lowering.checking.synthetic_inputs import generate_inputs
from lowering.commands.cli import main
from lowering.compiling.compiler import compile_to
from lowering.manifest import FILE, Manifest, TensorSpec
from lowering.runtime.decoding.decoder import Decoder
from lowering.serving.paged_cache import PagedKVCache
from tests.support.error_codes import raises

ROWS, POSITIONS, WIDTH = 50, 12, 96


def encoder(seed: int = 0, dtype: Any = np.float32) -> onnx.ModelProto:
    """Embeddings of ids and positions, and two matmuls; what a mask hides is 0."""
    text = """<ir_version: 10, opset_import: ["" : 23]>
        m (int64[B, T] ids, int64[B, T] position_ids, int64[B, T] attention_mask) => (float[B, T, 96] y) {
          e = Gather (token_table, ids)
          flat = Reshape (position_ids, shape)
          p = Gather (position_table, flat)
          like = Shape (e)
          q = Reshape (p, like)
          x = Add (e, q)
          h = MatMul (x, up)
          g = Tanh (h)
          o = MatMul (g, down)
          shown = Cast <to = TYPE> (attention_mask)
          wide = Unsqueeze (shown, last)
          y = Mul (o, wide)
        }"""
    kind = onnx.helper.np_dtype_to_tensor_dtype(np.dtype(dtype))
    text = text.replace("TYPE", str(kind)).replace("float[", "float16[" if dtype == np.float16 else "float[")
    model, rng = onnx.parser.parse_model(text), np.random.default_rng(seed)
    sizes = {
        "token_table": (ROWS, WIDTH),
        "position_table": (POSITIONS, WIDTH),
        "up": (WIDTH, WIDTH),
        "down": (WIDTH, WIDTH),
    }
    arrays = {name: (rng.standard_normal(size) / np.sqrt(WIDTH)).astype(dtype) for name, size in sizes.items()}
    arrays |= {"shape": np.array([-1]), "last": np.array([-1])}
    model.graph.initializer.extend(onnx.numpy_helper.from_array(array, name) for name, array in arrays.items())
    return model


@pytest.mark.parametrize("shape", ["T", "1,T", "1,1,T", "B,1,1,T", "B,2,1,T"])
def test_masks_of_one_row_hide_keys_as_well_as_the_future(shape: str) -> None:
    """onnx's evaluator hides from all queries what the first may not see; the standard spreads the mask before."""
    text = f"""<ir_version: 10, opset_import: ["" : 24]>
        m (float[B, 2, S, 8] q, float[B, 2, T, 8] k, bool[{shape}] mask) => (float[B, 2, S, 8] y)
        {{ y = Attention <is_causal = 1> (q, k, k, mask) }}"""
    rng, (batch, tokens) = np.random.default_rng(2), (2, 5)
    sizes = {"1": 1, "2": 2, "B": batch, "T": tokens}
    mask = rng.random([sizes[name] for name in shape.split(",")]) < 0.7
    mask[..., 0] = True  # each query sees a key
    q, k = (rng.standard_normal((batch, 2, tokens, 8)).astype(np.float32) for _ in "qk")
    result = lowering.verify(onnx.parser.parse_model(text), inputs={"q": q, "k": k, "mask": mask})
    assert result.first_difference is None, str(result)


def test_synthetic_inputs_fit_the_graph() -> None:
    graph, rng = ir.from_proto(encoder()).graph, np.random.default_rng(0)
    sizes = {"B": 40, "T": 16}
    names = ("ids", "position_ids", "attention_mask")
    specs = [TensorSpec(name, "int64", "int64", ("B", "T")) for name in names]
    ids, positions, mask = generate_inputs(graph, specs, sizes, rng).values()
    assert ids.min() == 0 and ids.max() == ROWS - 1 and len(np.unique(ids)) > ROWS // 2
    assert (positions == np.minimum(np.arange(16), POSITIONS - 1)).all()
    assert (np.sort(mask, axis=1) == mask).all() and set(np.unique(mask)) == {0, 1} and (mask.sum(axis=1) >= 8).all()
    (other,) = generate_inputs(graph, [TensorSpec("lengths", "int64", "int64", ("B",))], sizes, rng).values()
    assert set(np.unique(other)) == {0, 1}


@pytest.mark.parametrize(
    "how", ["", "--weights=f16", "--weights=int8", "--weights=int4", "--precision=bfloat16", "f16"]
)
def test_a_sound_model_agrees(tmp_path: Path, how: str, capsys: pytest.CaptureFixture[str]) -> None:
    onnx.save(encoder(dtype=np.float16 if how == "f16" else np.float32), tmp_path / "m.onnx")
    options = [how] if how.startswith("-") else []
    assert main(["verify", str(tmp_path / "m.onnx"), "--json", "--seed", "3", *options]) == 0
    said = json.loads(capsys.readouterr().out)
    (y,) = said["comparisons"]
    assert said["ok"] and said["seed"] == 3 and y["close"]
    assert ("of itself" if how == "" else "of an output's rms") in said["allowed"]
    assert how in ("", "f16") or y["rms"] > 1e-5  # what is allowed is something that there is


def test_arguments_of_compile(tmp_path: Path) -> None:
    """They compile the model that is compared: sizes are fixed, records name tiles, and a linker is called."""
    result = lowering.verify(encoder(), dims={"B": 1, "T": (5, 8)}, cc="gcc", checks=False, database=tmp_path / "tuned")
    assert result.first_difference is None
    assert result.inputs["ids"].shape[0] == 1 and 5 <= result.inputs["ids"].shape[1] <= 8
    with pytest.raises(TypeError, match="no_such"):
        lowering.verify(encoder(), no_such=1)  # type: ignore[call-arg]
    with raises("toolchain.linker_missing"):
        lowering.verify(encoder(), cc="no-such-linker")


@pytest.mark.parametrize("against", ["reference", "onnxruntime"])
def test_weights_in_a_file_of_their_own(tmp_path: Path, against: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Wherever it is; and for ONNX Runtime again in a file, if they are too many for a protobuf."""
    onnx.save(encoder(), tmp_path / "m.onnx", save_as_external_data=True, size_threshold=0, location="weights")
    assert lowering.verify(tmp_path / "m.onnx", against=against).first_difference is None
    monkeypatch.setattr(references, "MOST_INSIDE", 1)
    assert lowering.verify(tmp_path / "m.onnx", against=against).first_difference is None


@pytest.mark.parametrize("weights", [None, "int8"])
def test_an_unsound_one_does_not(monkeypatch: pytest.MonkeyPatch, weights: Any) -> None:
    """A wrong answer is found, however much its scheme may cost."""
    compiled = trial.compile

    def wrong(model: Any, *options: Any, **more: Any) -> lowering.Model:
        other = ir.to_proto(model)
        (down,) = (w for w in other.graph.initializer if w.name == "down")
        down.CopyFrom(onnx.numpy_helper.from_array(onnx.numpy_helper.to_array(down) * np.float32(1.5), "down"))
        return compiled(other, *options, **more)

    assert lowering.verify(encoder(), weights=weights).first_difference is None
    monkeypatch.setattr(trial, "compile", wrong)
    assert lowering.verify(encoder(), weights=weights).first_difference is not None


def test_a_reference_that_cannot_is_asked_first(monkeypatch: pytest.MonkeyPatch) -> None:
    text = """<ir_version: 10, opset_import: ["" : 23, "com.microsoft" : 1]>
        m (float[N, 8] x) => (float[N, 8] y) { y = com.microsoft.FastGelu (x) }"""
    monkeypatch.setattr(trial, "compile", lambda *_, **__: pytest.fail("compiled before"))
    with raises("verify.reference_failed"):
        lowering.verify(onnx.parser.parse_model(text))


@pytest.fixture(scope="module")
def artifact(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Save the encoder, and an artifact of it next to the file: compressed weights, batch 1, 5 to 8 tokens."""
    folder = tmp_path_factory.mktemp("artifact")
    onnx.save(encoder(), folder / "m.onnx")
    compile_to(folder / "out", encoder(), weights="int8", dims={"B": 1, "T": (5, 8)})
    return folder / "out"


def test_an_artifact(artifact: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """Nothing is compiled; the manifest says what sizes are legal, and what its weights may cost."""
    monkeypatch.setattr(trial, "compile", lambda *_, **__: pytest.fail("compiled"))
    assert main(["verify", str(artifact.parent / "m.onnx"), "--artifact", str(artifact), "--json"]) == 0
    said = json.loads(capsys.readouterr().out)
    assert said["ok"] and said["allowed"] == "0.1 of an output's rms, for weights int8"
    result = lowering.verify(encoder(), artifact=lowering.load(artifact), sizes={"T": 7})
    assert result.inputs["ids"].shape == (1, 7) and result.first_difference is None
    result = lowering.verify(encoder(), artifact=artifact, inputs={"ids": np.zeros((1, 6), np.int64)})
    assert result.inputs["attention_mask"].shape == (1, 6)
    assert lowering.verify(encoder(seed=1), artifact=artifact).first_difference is not None  # of other weights


BAD: dict[str, tuple[list[str], str]] = {
    "another size": (["--dim", "B=2"], "dimension 'B' was compiled with the static size 1, and 2 was given"),
    "a size out of range": (["--dim", "T=9"], "the model takes 5 to 8"),
    "an option of compile": (["--weights", "int8"], "[verify.artifact_with_options]"),
    "a pattern of compile": (["--donate", "x"], "[verify.artifact_with_options]"),
    "a part": (["--reduce", "new"], "[verify.reduce_with_artifact]"),
    "no artifact": (["--artifact", "empty"], "'empty' is not an artifact: it has no manifest.json"),
    "nothing": (["--artifact", "gone"], "gone"),
    "for another machine": (
        ["--artifact", "foreign"],
        "was built for a CPU with no_such_feature, which this one lacks",
    ),
    "another model": (["--artifact", "other"], "not compiled from this model: it takes 'x', which the model does not"),
    "other shapes": (["--artifact", "turned"], "it takes ids: int64[B, T, N], and the model int64[B,T]"),
    "not signed": (["--verify-key", "key.pub"], "is not signed"),
}


@pytest.mark.parametrize("case", BAD)
def test_artifacts_that_will_not_do(
    case: str, artifact: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    options, message = BAD[case]
    monkeypatch.chdir(tmp_path)
    (tmp_path / "empty").mkdir()
    if case == "another model":
        save('<ir_version: 10, opset_import: ["" : 23]> m (float[N] x) => (float[N] y) { y = Neg (x) }', "other")
    if case == "other shapes":
        save(
            """<ir_version: 10, opset_import: ["" : 23]>
            m (int64[B, T, N] ids, int64[B, T] position_ids, int64[B, T] attention_mask) => (int64[B, T, N] y) {
              y = Neg (ids) }""",
            "turned",
        )
    if case == "for another machine":
        shutil.copytree(artifact, "foreign")
        manifest = Manifest.from_dict(json.loads((artifact / FILE).read_text()))
        manifest = dataclasses.replace(manifest, cpu_features=("no_such_feature",))
        manifest = dataclasses.replace(manifest, hashes={**manifest.hashes, FILE: manifest.digest()})
        Path("foreign", FILE).write_text(manifest.to_json())
    model, chosen = artifact.parent / "m.onnx", [] if options[0] == "--artifact" else ["--artifact", str(artifact)]
    assert main(["verify", str(model), *chosen, *options]) == 1
    error = capsys.readouterr().err
    assert error.startswith("error[") and message in error and "Traceback" not in error, error
    assert not Path("new").exists()


def save(text: str, folder: str) -> None:
    lowering.compile(onnx.parser.parse_model(text)).save(folder)


def test_sizes_that_are_totals_of_others() -> None:
    """As exporters name them."""
    text = """<ir_version: 10, opset_import: ["" : 23]>
        m (float[N, S] x, float[N, P] past, float[N, L] all) => (float[N, L] y) {
          both = Concat <axis = 1> (past, x)
          y = Add (both, all) }"""
    model = onnx.parser.parse_model(text)
    model.graph.input[2].type.tensor_type.shape.dim[1].dim_param = "P + S"
    assert lowering.verify(model, sizes={"P": 3}).inputs["all"].shape == (4, 7)
    assert lowering.verify(model, inputs={"x": np.ones((2, 1), np.float32)}).inputs["all"].shape == (2, 5)


DECODER = Path(__file__).parents[1] / "exports" / "samples" / "llama-past-dynamo23" / "model.onnx"
ENCODED = DECODER.parents[1] / "flan-t5-past-dynamo18-batch1" / "model.onnx"


def test_a_decoder_with_static_caches(monkeypatch: pytest.MonkeyPatch) -> None:
    """Compiled here or before: a prompt with padding, steps, and a fork."""
    model = lowering.compile(DECODER, static_cache=9)
    result = lowering.verify(DECODER, artifact=model)
    assert result.first_difference is None and len(result.comparisons) == 1 + 3 + 1  # until the slots are full
    names = [c.name for c in result.comparisons]
    assert names[:3] == ["logits of tokens 1 to 6", "logits of token 7", "logits of token 7 of a fork"]
    assert result.inputs["attention_mask"].min() == 0
    ids = np.full((3, 7), 5)
    result = lowering.verify(DECODER, artifact=model, inputs={"input_ids": ids})
    assert result.first_difference is None and result.inputs["input_ids"] is ids
    for options, wanted in (
        ({"inputs": {"past_0": np.zeros(1)}}, "'past_0' is managed by the decoder itself"),
        ({"sizes": {"past": 2}}, "do not choose dimension 'past'"),
        ({"inputs": {"input_ids": np.zeros(3)}}, "'input_ids' must be integers \\[batch, tokens\\], not float64"),
        ({"inputs": {"attention_mask": np.ones((1, 1))}}, "the mask must have the shape of the tokens"),
        ({"inputs": {"input_ids": np.zeros((1, 12), np.int64)}}, "the caches have 9 slots"),
    ):
        with pytest.raises(lowering.InputError, match=wanted):
            lowering.verify(DECODER, artifact=model, **options)

    fixed = lowering.compile(DECODER, static_cache=9, dims={"batch": 3, "total": (1, 9)})
    result = lowering.verify(DECODER, artifact=fixed, sizes={"batch": 3})
    assert result.first_difference is None and result.inputs["input_ids"].shape == (3, 9)
    for name, wanted in (("batch", "was compiled with the static size 3"), ("total", "do not choose")):
        with pytest.raises(lowering.InputError, match=wanted):
            lowering.verify(DECODER, artifact=fixed, sizes={name: 2})

    monkeypatch.setattr(Decoder, "fork", copy.copy)  # which shares the caches
    first = lowering.verify(DECODER, artifact=model).first_difference
    assert first is not None and first.name == "logits of token 8"


def test_static_cache_of_the_command(capsys: pytest.CaptureFixture[str]) -> None:
    decoder = DECODER.parents[1] / "flan-t5-past-dynamo18-batch1" / "model.onnx"
    assert main(["verify", str(decoder), "--static-cache", "8"]) == 0
    out = capsys.readouterr().out
    assert "logits of token 7 of a fork: max abs" in out and "all outputs agree with reference" in out


def test_a_served_decoder(monkeypatch: pytest.MonkeyPatch) -> None:
    """Requests that come and go, share a block, wait for blocks and are put back: each gets what it gets alone."""
    model = lowering.compile(DECODER, serve=lowering.Serve(40, tokens_per_block=8))
    add, shared = PagedKVCache.add, []
    monkeypatch.setattr(PagedKVCache, "add", lambda *arguments: shared.append(add(*arguments)) or shared[-1])  # type: ignore[func-returns-value]
    result = lowering.verify(DECODER, artifact=model)
    assert result.first_difference is None and result.allowed.startswith("of each element")
    assert [c.name for c in result.comparisons][:2] == [f"logits of request {r}, tokens 9 to 16" for r in (0, 1)]
    assert result.inputs["input_ids"].shape == (5, 16) and shared == [0, 8, 0, 0, 0, 0]  # the last one twice
    longer = lowering.verify(DECODER, artifact=model, sizes={"tokens": 40}, seed=1)
    assert longer.first_difference is None and longer.inputs["input_ids"].shape == (5, 40)
    ids = np.full((1, 3), 5)
    result = lowering.verify(DECODER, artifact=model, inputs={"input_ids": ids})
    assert result.first_difference is None and len(result.comparisons) == 1

    for options, wanted in (
        (
            {"inputs": {"attention_mask": np.ones((1, 1))}},
            "'attention_mask' is managed by the served decoder itself",
        ),
        ({"sizes": {"past": 2}}, "do not choose dimension 'past'"),
        ({"sizes": {"tokens": 41}}, "the requests have 41 tokens, and the model was compiled for at most 40"),
        ({"inputs": {"input_ids": np.zeros(3)}}, "'input_ids' must be integers \\[batch, tokens\\], not float64"),
        ({"serve": lowering.Serve(40)}, "Leave out the options of compile"),
    ):
        with pytest.raises(lowering.InputError, match=wanted):
            lowering.verify(DECODER, artifact=model, **options)
    other = onnx.load(DECODER)
    other.graph.input[3].type.tensor_type.shape.dim[3].dim_value = 8
    with raises("verify.artifact_mismatch"):
        lowering.verify(other, artifact=model)
    with raises("verify.artifact_mismatch"):
        lowering.verify(DECODER.parents[1] / "flan-t5-past-dynamo18-batch1" / "model.onnx", artifact=model)

    first = lowering.verify(DECODER, artifact=model, seed=2).inputs["input_ids"][0]
    monkeypatch.setattr(PagedKVCache, "add", lambda cache, name, ids: add(cache, name, first[: len(ids)]))
    wrong = lowering.verify(DECODER, artifact=model, seed=2).first_difference
    assert wrong is not None and wrong.rms > 0.5 and "request 2" in wrong.name  # which reads what others wrote


def test_a_served_decoder_with_sources() -> None:
    """A decoder of PyTorch, whose padding mask of the source is removed; requests have sources of different lengths."""
    model = lowering.compile(ENCODED, serve=lowering.Serve(8, tokens_per_block=4), precision="float16")
    result = lowering.verify(ENCODED, against="onnxruntime", artifact=model, sizes={"source": 6})
    assert result.first_difference is None and result.inputs["cross_3"].shape == (5, 2, 6, 4)
    sources = {name: result.inputs[name] for name in result.inputs if name.startswith("cross")}
    again = lowering.verify(ENCODED, against="onnxruntime", artifact=model, inputs=sources, seed=3)
    assert again.first_difference is None and again.inputs.keys() == result.inputs.keys()
    ids = {"decoder_input_ids": np.full((1, 3), 5)}  # one request, of whose 40 rows 11 count
    assert lowering.verify(ENCODED, artifact=model, sizes={"source": 40}, inputs=ids, seed=2).first_difference is None
    with raises("verify.row_count_mismatch"):
        lowering.verify(ENCODED, artifact=model, inputs={"cross_0": sources["cross_0"][:1]})
    other = onnx.load(ENCODED)
    (ids_of,) = [value for value in other.graph.input if value.name == "decoder_input_ids"]
    sizes = [size.dim_param or size.dim_value for size in ids_of.type.tensor_type.shape.dim]
    other.graph.input.append(onnx.helper.make_tensor_value_info("weights", onnx.TensorProto.FLOAT, sizes))
    other.graph.node.append(onnx.helper.make_node("Identity", ["weights"], ["same"]))
    with raises("verify.input_unrecognized"):
        lowering.verify(other, artifact=model)
    other = onnx.load(ENCODED)
    other.graph.input[7].type.tensor_type.shape.dim[3].dim_value = 8
    with raises("verify.artifact_mismatch"):
        lowering.verify(other, artifact=model)


@pytest.mark.parametrize(
    "name, options",
    [
        ("Eagle3DraftModel", {"static_cache": 24}),  # ids and hidden states of each token
        ("Eagle3DraftModel", {"serve": lowering.Serve(40)}),
        ("qwen3_tts@code_predictor", {"static_cache": 24}),  # embeddings
    ],
)
def test_decoders_that_read_embeddings(name: str, options: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    path = DECODER.parents[2] / "decoders" / f"{name}.onnx"
    model = lowering.compile(path, **options)
    result = lowering.verify(path, against="onnxruntime", artifact=model)
    assert result.first_difference is None
    embeddings = [key for key, array in result.inputs.items() if array.ndim == 3 and array.dtype == np.float32]
    assert embeddings
    spec = model.manifest.decoder or model.manifest.served
    assert spec is not None
    tokens = {name: result.inputs[name][:, :7] for name in (spec.ids, *spec.per_token)}
    again = lowering.verify(path, against="onnxruntime", artifact=model, inputs=tokens)
    assert again.first_difference is None and again.inputs[embeddings[0]].shape[1] == 7
    wrong = {embeddings[0]: tokens[embeddings[0]][..., :-1]}
    with raises("verify.array_mismatch"):
        lowering.verify(path, artifact=model, inputs=wrong)
    if "serve" not in options:
        prefill = Decoder.prefill

        def moved(self: Decoder, tokens: Any, mask: Any) -> np.ndarray:
            by_name = tokens if isinstance(tokens, dict) else {"": tokens}
            changed = {key: array + 1 if array.dtype.kind == "f" else array for key, array in by_name.items()}
            return prefill(self, changed if isinstance(tokens, dict) else changed[""], mask)

        monkeypatch.setattr(Decoder, "prefill", moved)
        assert lowering.verify(path, against="onnxruntime", artifact=model).first_difference is not None


def test_serve_of_the_command(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["verify", str(DECODER), "--serve", "24", "--cache", "int8"]) == 0
    out = capsys.readouterr().out
    assert "allowed: 0.1 of an output's rms, for cache int8" in out and "logits of request 4, token" in out
    assert main(["verify", str(DECODER), "--serve", "24", "--reduce", "small"]) == 1
    assert main(["verify", str(DECODER), "--cache", "int8"]) == 1
    assert "[argument.option_requires_other]" in capsys.readouterr().err


def test_halved_caches_are_compared_as_what_they_were() -> None:
    model = lowering.compile(DECODER, precision="float16")
    result = lowering.verify(DECODER, artifact=model, sizes={"total": 8})
    assert result.first_difference is None and result.inputs["past_0"].dtype == np.float32
