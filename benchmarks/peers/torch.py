"""PyTorch: scaled_dot_product_attention, and compiled FlexAttention where a rule hides pairs or changes scores."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
import torch
import torch._inductor.config
from torch.nn import functional
from torch.nn.attention.flex_attention import create_block_mask, flex_attention

from ..cases.attention import AttentionCase
from ..cases.caches import ScatterCase
from ..cases.case import Arrays, Case
from ..cases.computed_masks import ComputedMaskCase
from ..cases.exported import ExportCase
from ..cases.flex import FlexCase
from ..cases.matmul import BatchedCase, MatmulCase
from ..cases.published import PublishedCase
from ..cases.transformers import BertCase, LlamaCase
from . import Contender, Form
from .torch_flex import flex_forms


class Peer:
    def __init__(self, threads: int) -> None:
        self._threads = threads
        torch._inductor.config.compile_threads = 1  # no pool of compilers while calls are timed

    def forms(self, case: Case) -> dict[str, Form]:
        """Eager, and compiled where that is worth its while."""
        makers: dict[str, Callable[[], Contender]] = {}
        if isinstance(case, AttentionCase):
            if not case.softcap:
                makers["SDPA"] = partial(self._sdpa, case)
            computed = isinstance(case, ComputedMaskCase)
            decode = case.S == 1 and case.dtype == "f32"
            if case.softcap or case.window is not None or case.end == "ragged" or decode or computed:
                makers["FlexAttention"] = partial(self._flex, case)
        elif isinstance(case, FlexCase):
            return flex_forms(case, self._threads)
        elif isinstance(case, MatmulCase):
            makers = {"linear": partial(self._linear, case, True), "matmul": partial(self._linear, case, False)}
        elif isinstance(case, BatchedCase):
            x, y = (tensor_of(array) for array in case.feeds().values())
            makers["matmul"] = lambda: self._contender(lambda: x @ y)
        elif isinstance(case, ScatterCase):
            makers["index_put_"] = partial(self._scatter, case)
        elif isinstance(case, LlamaCase) and case.accuracy_level:
            return {}
        elif isinstance(case, (BertCase, LlamaCase)):
            makers = {"eager": partial(self._module, case, False), "compiled": partial(self._module, case, True)}
        elif isinstance(case, ExportCase) and not isinstance(case, PublishedCase):
            makers["eager"] = partial(self._export, case)
        return {name: Form(make, self._threads) for name, make in makers.items()}

    def _contender(self, call: Callable[[], Any], names: tuple[str, ...] = ("Y",)) -> Contender:
        """Results are a tuple of tensors, or one."""

        def on_threads() -> Any:
            torch.set_num_threads(self._threads)
            with torch.inference_mode():
                return call()

        def answers(result: Any) -> Arrays:
            results = result if isinstance(result, tuple) else (result,)
            return {name: array_of(x) for name, x in zip(names, results)}

        return Contender(on_threads, answers)

    def _sdpa(self, case: AttentionCase) -> Contender:
        feeds, seen, bias = case.feeds(), case.visible(), case.bias()
        q, k, v = (tensor_of(feeds[name]) for name in "QKV")
        # SDPA's causal mask is aligned at the first key.
        causal = case.causal and not case.end and case.window is None and not case.mask
        what = seen if bias is None else bias
        mask = None if causal or what is None else tensor_of(what)
        attend, gqa = functional.scaled_dot_product_attention, case.Hq != case.Hkv
        return self._contender(lambda: attend(q, k, v, attn_mask=mask, is_causal=causal, enable_gqa=gqa))

    def _flex(self, case: AttentionCase) -> Contender:
        feeds, lengths = case.feeds(), tensor_of(case.lengths())
        q, k, v = (tensor_of(feeds[name]) for name in "QKV")
        table = tensor_of(case.visible()) if isinstance(case, ComputedMaskCase) else None
        hidden = table is not None or case.causal or case.window is not None or case.end == "ragged"

        def rule(b: Any, h: Any, i: Any, j: Any) -> Any:
            if table is not None:
                return table[0, 0, i, j]
            position = i + (lengths[b] - case.S if case.end else 0)
            seen = j <= (position if case.causal else case.T)
            if case.end == "ragged":
                seen = seen & (j < lengths[b])
            return seen if case.window is None else seen & (j >= position - case.window)

        def capped(score: Any, b: Any, h: Any, i: Any, j: Any) -> Any:
            return case.softcap * torch.tanh(score / case.softcap)

        torch.set_num_threads(self._threads)
        batches = case.B if case.end == "ragged" else None
        blocks = create_block_mask(rule, batches, None, case.S, case.T, device="cpu") if hidden else None
        attend = torch.compile(flex_attention, dynamic=False)
        options: Any = {
            "score_mod": capped if case.softcap else None,
            "block_mask": blocks,
            "enable_gqa": case.Hq != case.Hkv,
        }
        return self._contender(lambda: attend(q, k, v, **options))

    def _linear(self, case: MatmulCase, transposed: bool) -> Contender:
        """With weights [N, K] as layers keep them, or [K, N]."""
        arrays = {name: tensor_of(array) for name, array in (case.feeds() | case.weights()).items()}
        x, b, r = arrays["x"], arrays.get("b"), arrays.get("r")
        weights = [
            arrays[name].T.contiguous() if transposed else arrays[name] for name in ("w", "w3") if name in arrays
        ]

        def matmul(w: torch.Tensor) -> torch.Tensor:
            if transposed:
                return functional.linear(x, w, b)
            return x @ w if b is None else torch.addmm(b, x, w)

        def call() -> torch.Tensor:
            y = matmul(weights[0])
            if case.form == "gelu":
                return functional.gelu(y)
            if case.form == "SwiGLU":
                return functional.silu(y) * matmul(weights[1])
            return y if r is None else r + y

        return self._contender(call)

    def _scatter(self, case: ScatterCase) -> Contender:
        cache, update, indices = (tensor_of(array) for array in case.feeds().values())
        batch = torch.arange(case.B)
        row = update[:, :, 0]

        def call() -> torch.Tensor:
            cache[batch, :, indices] = row
            return cache

        return self._contender(call, ("present_cache",))

    def _module(self, case: BertCase | LlamaCase, compiled: bool) -> Contender:
        from . import torch_models

        torch.set_num_threads(self._threads)
        forward = torch_models.bert(case) if isinstance(case, BertCase) else torch_models.llama(case)
        if compiled:
            forward = torch.compile(forward, dynamic=False)
        return self._contender(forward, ("hidden" if isinstance(case, BertCase) else "logits",))

    def _export(self, case: ExportCase) -> Contender:
        from . import torch_exports

        return self._contender(*torch_exports.forward(case))


def tensor_of(array: np.ndarray) -> torch.Tensor:
    """The array's memory as a tensor."""
    if array.dtype.name == "bfloat16":
        return torch.from_numpy(array.view(np.int16)).view(torch.bfloat16)
    return torch.from_numpy(np.ascontiguousarray(array))


def array_of(tensor: torch.Tensor) -> np.ndarray:
    return (tensor.float() if tensor.dtype == torch.bfloat16 else tensor).numpy()
