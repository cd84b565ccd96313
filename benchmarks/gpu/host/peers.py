"""The peers: each backend of PyTorch's scaled_dot_product_attention, compiled FlexAttention, indexed stores,
cuBLAS, and FlashInfer's decoding of one sequence.

A peer makes, from the arrays of a problem, a call that returns the answer.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import scaled_dot_product_attention

from . import attention
from .memory import Torch

Arrays = dict[str, Any]
Peer = Callable[[Arrays], Callable[[], torch.Tensor]]

_BACKENDS = {
    "cudnn": SDPBackend.CUDNN_ATTENTION,
    "flash": SDPBackend.FLASH_ATTENTION,
    "efficient": SDPBackend.EFFICIENT_ATTENTION,
    "math": SDPBackend.MATH,
}


def makers_of(names: tuple[str, ...], problem: Any, memory: Torch, libraries: Mapping[str, Path]) -> dict[str, Peer]:
    """Return the peers of those names; libraries has those that are a library of the bundle."""
    makers: dict[str, Callable[[Any, Torch], Peer]] = {
        **{name: partial(partial, _sdpa, backend) for name, backend in _BACKENDS.items()},
        "flex": _Flex,
        "index": partial(partial, _index),
        "cublas": partial(partial, _cublas),
        "compiled": _compiled,
        "flashinfer": partial(_FlashInfer, libraries.get("flashinfer")),
    }
    return {name: makers[name](problem, memory) for name in names}


def _sdpa(backend: SDPBackend, problem: Any, memory: Torch, arrays: Arrays) -> Callable[[], torch.Tensor]:
    q, k, v = (arrays[name] for name in "qkv")
    window = problem.window
    causal = window is not None and (window.left, window.right, window.offset) == (None, 0, "zero")
    only_causal = causal and problem.mask is None and not problem.lengths
    mask = None if only_causal else _mask(problem, memory, arrays)
    gqa = problem.q_heads != problem.kv_heads

    def call() -> torch.Tensor:
        with sdpa_kernel(backend):
            return scaled_dot_product_attention(
                q, k, v, attn_mask=mask, is_causal=only_causal, scale=problem.scale, enable_gqa=gqa
            )

    return call


def _mask(problem: Any, memory: Torch, arrays: Arrays) -> torch.Tensor | None:
    """Return the tensor mask that SDPA needs: the mask itself, or window and lengths written out."""
    if problem.mask is not None:
        return arrays["mask"]
    if problem.window is None and not problem.lengths:
        return None
    rows, batches = slice(0, arrays["q"].shape[2]), range(arrays["q"].shape[0] if problem.lengths else 1)
    return torch.stack([attention.visible(problem, arrays, memory, b, 0, rows)[0] for b in batches])[:, None]


class _Flex:
    """Compiled FlexAttention. Its block mask is made once: lengths are the same in all input sets.

    It is imported here, as that takes longer than most cases.
    """

    def __init__(self, problem: Any, memory: Torch) -> None:
        import torch._inductor.config
        from torch.nn.attention.flex_attention import flex_attention

        torch._inductor.config.compile_threads = 1  # no pool of compilers while calls are timed
        self._problem, self._memory = problem, memory
        self._attend = torch.compile(flex_attention, dynamic=False)
        self._options: dict[str, Any] | None = None

    def __call__(self, arrays: Arrays) -> Callable[[], torch.Tensor]:
        if self._options is None:
            self._options = self._rules(arrays)
        q, k, v = (arrays[name] for name in "qkv")
        return partial(self._attend, q, k, v, **self._options)

    def _rules(self, arrays: Arrays) -> dict[str, Any]:
        from torch.nn.attention.flex_attention import create_block_mask

        problem, window = self._problem, self._problem.window
        (batch, _, rows, _), keys = arrays["q"].shape, arrays["k"].shape[2]
        lengths = arrays.get("lengths")

        def rule(b: Any, h: Any, i: Any, j: Any) -> Any:
            seen = j >= 0
            if lengths is not None:
                seen = seen & (j < lengths[b])
            if window is not None:
                position = i + arrays["lengths"][b] - rows if window.offset == "lengths" else i
                if window.right is not None:
                    seen = seen & (j <= position + window.right)
                if window.left is not None:
                    seen = seen & (j >= position - window.left)
            return seen

        def capped(score: Any, b: Any, h: Any, i: Any, j: Any) -> Any:
            return problem.softcap * torch.tanh(score / problem.softcap)

        hides = lengths is not None or window is not None
        batches = batch if lengths is not None else None
        device = self._memory.device
        return {
            "score_mod": capped if problem.softcap else None,
            "block_mask": create_block_mask(rule, batches, None, rows, keys, device=device) if hides else None,
            "scale": problem.scale,
            "enable_gqa": problem.q_heads != problem.kv_heads,
        }


class _FlashInfer:
    """FlashInfer's kernel for one sequence, keys and values [heads, keys, D]; it splits keys where it sees fit."""

    LAYOUT = 1  # flashinfer::QKVLayout::kHND
    SCRATCH = 32 << 20  # bytes, as its own Python has
    NO_WINDOW, NO_CAP, NO_ROPE = -1, 0.0, 1.0

    def __init__(self, library: Path | None, problem: Any, memory: Torch) -> None:
        self._library, self._scale = library, problem.scale
        self._scratch = memory.full((self.SCRATCH,), 0, "uint8")

    def __call__(self, arrays: Arrays) -> Callable[[], torch.Tensor]:
        import tvm_ffi

        if self._library is None:
            raise ValueError("the bundle has no library of FlashInfer")
        run = tvm_ffi.load_module(str(self._library))["run"]
        q, k, v, y = (arrays[name] for name in "qkvy")
        if q.shape[0] != 1:
            raise ValueError("it decodes one sequence")
        tensors = [tvm_ffi.from_dlpack(x) for x in (q[0, :, 0], k[0], v[0], self._scratch, y[0, :, 0])]

        def call() -> torch.Tensor:
            run(*tensors, None, self.LAYOUT, self.NO_WINDOW, None, self.NO_CAP, self._scale, self.NO_ROPE, self.NO_ROPE)
            return y

        return call


def _cublas(problem: Any, memory: Torch, arrays: Arrays) -> Callable[[], torch.Tensor]:
    """PyTorch's own matmuls, which are cuBLAS's, with the bias in it; a gate is two of them, and more kernels."""
    return partial(_matmul, problem, *(arrays[name] for name in ("a", *problem.factors)), bias=arrays.get("bias"))


def _compiled(problem: Any, memory: Torch) -> Peer:
    """The same by torch.compile, which puts what is elementwise together."""
    import torch._inductor.config

    torch._inductor.config.compile_threads = 1
    call = torch.compile(partial(_matmul, problem), dynamic=False)
    names = ("a", *problem.factors)
    return lambda arrays: partial(call, *(arrays[name] for name in names), bias=arrays.get("bias"))


def _matmul(problem: Any, a: torch.Tensor, b: torch.Tensor, *up: torch.Tensor, bias: Any) -> torch.Tensor:
    b, *up = (factor.T if problem.transposed else factor for factor in (b, *up))
    if bias is not None:
        return torch.addmm(bias, a, b)
    return torch.nn.functional.silu(a @ b) * (a @ up[0]) if up else a @ b


def _index(problem: Any, memory: Torch, arrays: Arrays) -> Callable[[], torch.Tensor]:
    """The cache in place, by an indexed store."""
    cache, update, first = (arrays[name] for name in ("cache", "update", "write_indices"))
    b = torch.arange(cache.shape[0], device=memory.device)[:, None]
    slots = first[:, None] + torch.arange(update.shape[2], device=memory.device)[None, :]
    rows = update.transpose(1, 2)

    def call() -> torch.Tensor:
        cache[b, :, slots] = rows
        return cache

    return call
