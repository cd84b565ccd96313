"""llama.cpp: the Llama cases as GGUF files, in the types that its users choose.

The environment variable LLAMA_CPP names the folder of its libraries, such as `bins/linux-x64` of the npm package
@node-llama-cpp/linux-x64, or one of its files `libggml-cpu-*.so`, which is then used whatever the machine has.
"""

from __future__ import annotations

import ctypes
import logging
import os
import tempfile
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import gguf
import numpy as np
from onnx import numpy_helper

from ..cases.case import Case
from ..cases.transformers import LlamaCase
from . import Contender, Form

logging.getLogger("gguf").setLevel(logging.WARNING)

_VARIABLE = "LLAMA_CPP"
_TYPES = {"f16": ("F16",), "int8": ("Q8_0",), "int4": ("Q4_0",)}
_EPSILON = 1e-5  # of RMSNormalization, where a model gives none


class _Params(ctypes.Structure):
    """Parameters by value, as the library fills them in; it knows their fields, and larger ones are harmless."""

    _fields_ = [("numbers", ctypes.c_uint32 * 128)]


class _Batch(ctypes.Structure):
    _fields_ = [("count", ctypes.c_int32), ("arrays", ctypes.c_void_p * 6)]


class _Library:
    """The functions of libllama."""

    def __init__(self, path: Path) -> None:
        folder = path if path.is_dir() else path.parent
        for name in ("libggml-base.so", "libggml.*so", "libllama.*so"):
            found = sorted(folder.glob(name))
            if not found:
                raise ImportError(f"{_VARIABLE}={path} has no {name}")
            library = ctypes.CDLL(str(found[0]), mode=ctypes.RTLD_GLOBAL)
            if name.startswith("libggml."):
                load = library.ggml_backend_load_all_from_path if path.is_dir() else library.ggml_backend_load
                load(str(path).encode())
        self.silence = ctypes.CFUNCTYPE(None, ctypes.c_int, ctypes.c_char_p, ctypes.c_void_p)(lambda *_: None)
        library.llama_log_set(self.silence, None)
        library.llama_backend_init()
        pointer = ctypes.c_void_p
        self.model_params = _declare(library.llama_model_default_params, _Params)
        self.context_params = _declare(library.llama_context_default_params, _Params)
        self.load = _declare(library.llama_model_load_from_file, pointer, ctypes.c_char_p, _Params)
        self.open = _declare(library.llama_init_from_model, pointer, pointer, _Params)
        self.set_threads = _declare(library.llama_set_n_threads, None, pointer, ctypes.c_int32, ctypes.c_int32)
        self.memory = _declare(library.llama_get_memory, pointer, pointer)
        self.remove = _declare(
            library.llama_memory_seq_rm, ctypes.c_bool, pointer, ctypes.c_int32, ctypes.c_int32, ctypes.c_int32
        )
        self.decode = _declare(library.llama_decode, ctypes.c_int32, pointer, _Batch)
        self.logits = _declare(library.llama_get_logits_ith, ctypes.POINTER(ctypes.c_float), pointer, ctypes.c_int32)
        self.batch = _declare(library.llama_batch_get_one, _Batch, pointer, ctypes.c_int32)
        self.close_context = _declare(library.llama_free, None, pointer)
        self.close_model = _declare(library.llama_model_free, None, pointer)


def _declare(function: Any, result: Any, *arguments: Any) -> Callable[..., Any]:
    function.restype, function.argtypes = result, list(arguments)
    return function


class Peer:
    def __init__(self, threads: int) -> None:
        if _VARIABLE not in os.environ:
            raise ImportError(f"{_VARIABLE} does not name the folder of its libraries")
        self._threads, self._library = threads, _Library(Path(os.environ[_VARIABLE]))

    def forms(self, case: Case) -> dict[str, Form]:
        """A file of each type that stores weights in as many bits; its keys and values are float16, as by default."""
        if not isinstance(case, LlamaCase):
            return {}
        return {kind: Form(partial(self._session, case, kind), self._threads) for kind in _TYPES.get(case.weights, ())}

    def _session(self, case: LlamaCase, kind: str) -> Contender:
        """The new tokens after those of a past, which the library has read before; each call reads them again.

        The keys of the case are random, and those of its tokens are not, so results with a past are not compared.
        """
        session = _Session(self._library, case, kind, self._threads)
        ids = case.feeds()["ids"][0].astype(np.int32)
        if case.past:
            session.decode(np.random.default_rng(1).integers(0, case.config.vocabulary, case.past).astype(np.int32), 0)
        return Contender(
            lambda: session.decode(ids, case.past),
            lambda logits: {} if case.past else {"logits": np.array(logits, copy=True)[None]},
        )


class _Session:
    """A model with a context, which it closes."""

    def __init__(self, library: _Library, case: LlamaCase, kind: str, threads: int) -> None:
        self._library, self._vocabulary = library, case.config.vocabulary
        with tempfile.TemporaryDirectory() as folder:
            path = Path(folder) / "model.gguf"
            _write_gguf(case, kind, path)
            self._model = library.load(str(path).encode(), library.model_params())
        if not self._model:
            raise RuntimeError(f"llama.cpp cannot load the model in {kind}")
        params, longest = library.context_params(), max(case.past, case.S, 512)
        params.numbers[:3] = case.capacity, longest, longest  # the context, and tokens of a call and of its parts
        self._context = library.open(self._model, params)
        if not self._context:
            raise RuntimeError("llama.cpp cannot open a context")
        library.set_threads(self._context, threads, threads)
        self._memory = library.memory(self._context)

    def decode(self, ids: np.ndarray, past: int) -> np.ndarray:
        """Read tokens from position `past` on, and return the logits of the last one."""
        library = self._library
        library.remove(self._memory, -1, past, -1)
        if library.decode(self._context, library.batch(ids.ctypes.data, len(ids))):
            raise RuntimeError("llama.cpp cannot decode")
        return np.ctypeslib.as_array(library.logits(self._context, -1), (self._vocabulary,))

    def __del__(self) -> None:
        if getattr(self, "_context", None):
            self._library.close_context(self._context)
        if getattr(self, "_model", None):
            self._library.close_model(self._model)


def _write_gguf(case: LlamaCase, kind: str, path: Path) -> None:
    """Write the case's model with all matrices in that type."""
    c, dtype = case.config, gguf.GGMLQuantizationType[kind]
    arrays = {t.name: numpy_helper.to_array(t) for t in case.model().graph.initializer}
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_vocab_size(c.vocabulary)
    writer.add_context_length(c.positions)
    writer.add_embedding_length(c.hidden)
    writer.add_block_count(c.layers)
    writer.add_feed_forward_length(c.mlp)
    writer.add_head_count(c.heads)
    writer.add_head_count_kv(c.kv_heads)
    writer.add_rope_dimension_count(c.head_dim)
    writer.add_rope_freq_base(10000.0)
    writer.add_layer_norm_rms_eps(_EPSILON)
    writer.add_tokenizer_model("no_vocab")

    def add(name: str, matrix: np.ndarray) -> None:
        data = gguf.quants.quantize(np.ascontiguousarray(matrix, np.float32), dtype)
        writer.add_tensor(f"{name}.weight", data, raw_dtype=dtype)

    add("token_embd", arrays["embedding"])
    add("output", arrays["lm_head"].T)
    writer.add_tensor("output_norm.weight", arrays["norm.weight"])
    names = {"wv": "attn_v", "wo": "attn_output", "w1": "ffn_gate", "w3": "ffn_up", "w2": "ffn_down"}
    for k in range(c.layers):
        source, to = f"layer{k}", f"blk.{k}"
        for norm, name in (("norm1", "attn_norm"), ("norm2", "ffn_norm")):
            writer.add_tensor(f"{to}.{name}.weight", arrays[f"{source}.{norm}.weight"])
        for name, heads in (("q", c.heads), ("k", c.kv_heads)):
            add(f"{to}.attn_{name}", _interleave(arrays[f"{source}.w{name}"].T, heads))
        for name, target in names.items():
            add(f"{to}.{target}", arrays[f"{source}.{name}"].T)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def _interleave(matrix: np.ndarray, heads: int) -> np.ndarray:
    """Order the rows of each head so that those that are rotated together are neighbors."""
    return matrix.reshape(heads, 2, -1, matrix.shape[1]).swapaxes(1, 2).reshape(matrix.shape)
