"""Donated caches: updated in their own memory, only where the new rows go, and never at the cost of another reader."""

from __future__ import annotations

import subprocess
import sys
import textwrap

import numpy as np
import onnx
import pytest
from onnx.reference import ReferenceEvaluator

import lowering

HEADER = '<ir_version: 10, opset_import: ["" : 24]>'
SIGNATURE = "model (float[B, 2, C, 8] cache, float[B, 2, L, 8] new, int64[B] at) => "

# name: (outputs, body, what the compiler says about copies)
MODELS = {
    "plain": (
        "(float[B, 2, C, 8] present)",
        "present = TensorScatter (cache, new, at)",
        None,
    ),
    "circular": (
        "(float[B, 2, C, 8] present)",
        'present = TensorScatter <mode = "circular"> (cache, new, at)',
        None,
    ),
    "chain of two updates": (
        "(float[B, 2, C, 8] present)",
        "one = Constant <value_int = 1> () next = Add (at, one) first = TensorScatter (cache, new, at) "
        "twice = Add (new, new) present = TensorScatter (first, twice, next)",
        None,
    ),
    "old value read after the update": (
        "(float[B, 2, C, 8] present, float[B, 2, C, 8] change)",
        "present = TensorScatter (cache, new, at) change = Sub (present, cache)",
        "is read after it was updated",
    ),
    "old value read by a node after the update that does not need it": (
        "(float[B, 2, C, 8] present, float[B, 2, C, 8] twice)",
        "present = TensorScatter (cache, new, at) twice = Add (cache, cache)",
        None,
    ),
    "old value read through a view": (
        "(float[B, 2, C, 8] present, float[B, R] flat)",
        "present = TensorScatter (cache, new, at) shape = Constant <value_ints = [0, -1]> () "
        "view = Reshape (cache, shape) later = Reshape (present, shape) flat = Sub (later, view)",
        "is read after it was updated",
    ),
    "two updates of one cache": (
        "(float[B, 2, C, 8] present, float[B, 2, C, 8] other)",
        "twice = Add (new, new) present = TensorScatter (cache, new, at) other = TensorScatter (cache, twice, at)",
        None,
    ),
    "the cache is also an output": (
        "(float[B, 2, C, 8] present, float[B, 2, C, 8] old)",
        "old = Identity (cache) present = TensorScatter (cache, new, at)",
        "is also an output",
    ),
    "the present is an output twice": (
        "(float[B, 2, C, 8] present, float[B, 2, C, 8] again)",
        "present = TensorScatter (cache, new, at) again = Identity (present)",
        None,
    ),
    "read by attention": (
        "(float[B, 2, C, 8] present, float[B, 2, L, 8] y)",
        "present = TensorScatter (cache, new, at) shape = Shape <start = 2, end = 3> (new) valid = Add (at, shape) "
        "y = Attention <is_causal = 1> (new, present, present, , , , valid)",
        None,
    ),
}


def feeds(batch: int = 3, heads: int = 2, capacity: int = 11, rows: int = 2) -> dict[str, np.ndarray]:
    rng = np.random.default_rng(0)
    return {
        "cache": rng.standard_normal((batch, heads, capacity, 8)).astype(np.float32),
        "new": rng.standard_normal((batch, heads, rows, 8)).astype(np.float32),
        "at": rng.integers(0, capacity - rows, batch),
    }


@pytest.mark.parametrize("name", MODELS)
def test_donated_cache(name: str) -> None:
    outputs, body, note = MODELS[name]
    model = onnx.parser.parse_model(f"{HEADER} {SIGNATURE} {outputs} {{ {body} }}")
    module = lowering.compile(model, donate=("cache",))
    inputs = feeds()
    expected = ReferenceEvaluator(model).run(None, inputs)
    cache = inputs["cache"].copy()
    results = module.run({**inputs, "cache": cache})
    for spec, reference in zip(module.outputs, expected):
        np.testing.assert_allclose(results[spec.name], reference, rtol=1e-5, atol=1e-6)
    assert results["present"] is cache
    for other, array in results.items():
        assert other == "present" or not np.shares_memory(array, cache)
    notes = [n for n in module.manifest.notes if "donated cache" in n]
    assert notes == [] if note is None else note in notes[0]


@pytest.mark.parametrize("name", MODELS)
def test_cache_that_is_not_donated_is_never_modified(name: str) -> None:
    outputs, body, _ = MODELS[name]
    model = onnx.parser.parse_model(f"{HEADER} {SIGNATURE} {outputs} {{ {body} }}")
    inputs = feeds()
    before = {k: v.copy() for k, v in inputs.items()}
    results = lowering.compile(model).run(inputs)
    for name_, array in inputs.items():
        np.testing.assert_array_equal(array, before[name_])
        assert not any(np.shares_memory(array, r) for r in results.values())
    for spec, reference in zip(model.graph.output, ReferenceEvaluator(model).run(None, before)):
        np.testing.assert_allclose(results[spec.name], reference, rtol=1e-5, atol=1e-6)


def test_update_that_is_the_cache_itself() -> None:
    """The update aliases the cache through a view: rows must be read before they are overwritten."""
    model = onnx.parser.parse_model(
        f"{HEADER} model (float[2, 4, 8] cache, int64[2] at) => (float[2, 4, 8] present) {{ "
        '  view = Identity (cache) present = TensorScatter <mode = "circular", axis = 1> (cache, view, at) }'
    )
    inputs = {"cache": np.arange(64, dtype=np.float32).reshape(2, 4, 8), "at": np.array([1, 3])}
    expected = ReferenceEvaluator(model).run(None, inputs)[0]
    module = lowering.compile(model, donate=("cache",))
    np.testing.assert_array_equal(module.run({**inputs, "cache": inputs["cache"].copy()})["present"], expected)


PROTECTED = """
import ctypes, mmap, sys
import numpy as np
import lowering
from lowering.demo.decoder import DecoderConfig, build_decoder

PAGE, CAPACITY, PROMPT = mmap.PAGESIZE, 1024, 32
config = DecoderConfig(layers=1)
model = lowering.compile(build_decoder(config), donate=("cache_.*",))
libc = ctypes.CDLL(None, use_errno=True)
libc.mprotect.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)
shape = (1, config.kv_heads, CAPACITY, config.head_dim)
caches, maps = {}, []
for name in ("cache_k.0", "cache_v.0"):
    pages = mmap.mmap(-1, int(np.prod(shape)) * 4)
    caches[name] = np.frombuffer(pages, np.float32).reshape(shape)
    maps.append(pages)
model.run({"ids": np.arange(PROMPT)[None], "write_indices": np.zeros(1, np.int64), **caches})
row = config.head_dim * 4
new = {(h * CAPACITY + PROMPT) * row // PAGE for h in range(config.kv_heads)}
allowed = new if sys.argv[1] == "new rows" else set()
for cache in caches.values():
    base = cache.ctypes.data
    for page in range(cache.nbytes // PAGE):
        writable = mmap.PROT_WRITE if page in allowed else 0
        assert libc.mprotect(base + page * PAGE, PAGE, mmap.PROT_READ | writable) == 0
out = model.run({"ids": np.array([[7]]), "write_indices": np.array([PROMPT]), **caches})
assert all(np.abs(c[:, :, PROMPT]).min() > 0 and not c[:, :, PROMPT + 1 :].any() for c in caches.values())
print("done")
"""


@pytest.mark.parametrize(("writable", "survives"), [("new rows", True), ("nothing", False)])
def test_only_the_new_rows_are_written(writable: str, survives: bool) -> None:
    """One decode step on caches whose pages are read-only except those of the new rows."""
    script = textwrap.dedent(PROTECTED)
    result = subprocess.run([sys.executable, "-c", script, writable], capture_output=True, text=True)
    assert ("done" in result.stdout) == survives, result.stderr
    assert survives or result.returncode < 0  # killed by the write that must have happened
