"""Tiny models of all types that ONNX Runtime's own exporter registers (package mobius-onnx), with random weights.

`python -m tests.exports.mobius_models llama gemma3_text@cpu llama@static --folder F` writes F/llama.onnx and so on.
A type of several graphs gives one file each: `whisper` is the decoder, `whisper@encoder` what it reads. After a last @
stands the form: an execution provider of the exporter, "static" for caches of a static capacity, "int4" for weights in
4 bits, or "wide" for four layers of width 768; forms are written of the decoder only. Without names it writes the files
of tests/exports/decoders and graphs, with --all every registered type, and then the missing ones. Needs `pip install
mobius-onnx==0.1.0 onnx-shape-inference`, and PyTorch.
"""

from __future__ import annotations

import argparse
import hashlib
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import numpy as np
import onnx_ir as ir
from onnx_ir.passes import common

from tests.exports.architectures import architecture, registered, wide

CAPACITY = 48  # of static caches
PROVIDERS = ("cpu", "cuda", "dml", "mlx", "onnx-standard", "openvino", "qnn", "trt-rtx", "webgpu")
FORMS = (*PROVIDERS, "static", "int4", "wide")

COMMITTED = (
    "bamba", "bart", "bloom", "deepseek_v3", "deepseek_v4", "gemma2", "gemma3_text", "gemma3n_text", "gemma4_text",
    "gpt2", "gpt_oss", "llama", "llama@cpu", "llama@onnx-standard", "llama@static", "mamba2", "minimax", "mixtral",
    "phi3", "qwen3", "qwen3@static", "bamba@onnx-standard", "qwen3_5_text", "t5", "jamba", "whisper",
    "Eagle3DraftModel", "mllama", "qwen3_tts@code_predictor",
)  # fmt: skip

COMMITTED_GRAPHS = (  # of other models than decoders
    "bert", "vit", "llava@vision_encoder", "llava@embedding", "qwen2_vl@vision_encoder", "bart@encoder",
    "whisper@encoder", "segformer", "DiTTransformer2DModel", "fastconformer_rnnt@encoder",
)  # fmt: skip

_MAIN = ("decoder", "model")  # the graph of a package that is named like its type, or else the first one

# Sizes of a form: GroupQueryAttention asks for heads of 16, and a block of 4-bit weights has at least 16.
_WIDE = {"head_dim": 16}
_QUANTIZED = {"hidden_size": 32, "intermediate_size": 32, "head_dim": 16}


def build(name: str) -> ir.Model:
    """Return one graph by the name of its file."""
    fields = name.split("@")
    form = fields[-1] if fields[-1] in FORMS else ""
    return package(fields[0], form)[name]


def package(name: str, form: str = "") -> dict[str, ir.Model]:
    """Return the graphs of a type by the names of their files, exported in a form."""
    from mobius._builder import build_from_module
    from mobius._configs import QuantizationConfig
    from mobius.tasks import TASK_REGISTRY

    changes: dict[str, Any] = dict(_WIDE) if form in (*PROVIDERS, "static") else {}
    if form == "int4":
        changes = {**_QUANTIZED, "quantization": QuantizationConfig(bits=4, group_size=16, quant_method="gptq")}
    if form == "wide":
        changes = {**wide.SIZES, **wide.BY_TYPE.get(name, {})}
    source = architecture(name, changes)
    task = TASK_REGISTRY[source.task]
    built = build_from_module(
        source.module(source.config),
        source.config,
        task(static_cache=True, max_seq_len=CAPACITY) if form == "static" else task(),  # type: ignore[call-arg]
        execution_provider=form if form in PROVIDERS else "default",
    )
    main = next((component for component in _MAIN if component in built), next(iter(built)))
    models = {}
    for component, model in built.items():
        if form and component != main:
            continue
        fill(model, name)
        common.ClearMetadataAndDocStringPass()(model)
        models["@".join(filter(None, (name, "" if component == main else component, form)))] = model
    return models


def fill(model: ir.Model, seed: str) -> None:
    """Fill the weights with random numbers, so that activations stay about 1."""
    rng = np.random.default_rng(int(hashlib.sha256(seed.encode()).hexdigest()[:8], 16))
    for value in model.graph.initializers.values():
        if value.const_value is not None or value.shape is None or value.name is None or value.dtype is None:
            continue
        shape = [size if isinstance(size, int) else 1 for size in value.shape]
        array = rng.standard_normal(shape) / np.sqrt(max(shape[-1:], default=1))
        if "norm" in value.name and len(shape) == 1:
            array = 1 + 0.2 * rng.standard_normal(shape)
        elif value.dtype == ir.DataType.UINT8:
            array = rng.integers(0, 256, shape)
        value.const_value = ir.Tensor(array.astype(value.dtype.numpy()))


def write_all(folder: Path, form: str) -> None:
    """Write every registered type, and print the types that the exporter does not build, with its errors."""
    missing, count = {}, 0
    names = registered()
    for name in names:
        try:
            models = package(name, form)
        except Exception as error:  # any: the exporter may fail in any way
            missing[name] = f"{type(error).__name__}: {error}".splitlines()[0]
            continue
        for file, model in models.items():
            ir.save(model, folder / f"{file}.onnx")
        count += len(models)
        print(*models, flush=True)
    print(f"registered: {len(names)}\nbuilt: {len(names) - len(missing)}\ngraphs: {count}")
    for name, error in missing.items():
        print(f"missing: {name}: {error}")


def write(folder: Path, names: Iterable[str]) -> None:
    for name in names:
        ir.save(build(name), folder / f"{name}.onnx")
        print(name)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("names", nargs="*", help="types, with @part and @form")
    parser.add_argument("--folder", type=Path)
    parser.add_argument("--all", action="store_true", help="every registered type")
    parser.add_argument("--form", choices=FORMS, default="", help="of --all: the form to write")
    arguments = parser.parse_args()
    here = Path(__file__).parent
    folder = arguments.folder or here / "decoders"
    folder.mkdir(exist_ok=True)
    if arguments.all:
        write_all(folder, arguments.form)
    elif arguments.names:
        write(folder, arguments.names)
    else:
        write(folder, COMMITTED)
        write(arguments.folder or here / "graphs", COMMITTED_GRAPHS)


if __name__ == "__main__":
    main()
