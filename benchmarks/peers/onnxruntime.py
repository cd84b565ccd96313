"""ONNX Runtime: the case's own model, and where they say the same thing its operators of `com.microsoft`."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import onnx
import onnxruntime as ort

from ..cases.attention import AttentionCase
from ..cases.case import Arrays, Case
from ..cases.linear import LinearCase
from ..cases.published import PublishedCase
from ..cases.transformers import LlamaCase
from . import Contender, Form, llama_forms, microsoft

_CPU = ["CPUExecutionProvider"]


class Peer:
    def __init__(self, threads: int) -> None:
        self._threads = threads

    def forms(self, case: Case) -> dict[str, Form]:
        """Return the model as callers run it; with outputs bound to the caches they update; and its own operators."""
        if isinstance(case, LlamaCase) and case.accuracy_level:
            return {"MatMulNBits": self._form(lambda: self._bound(*llama_forms.few_bits(case), case.in_place))}
        if isinstance(case, PublishedCase):
            return {"bound": self._form(lambda: self._bound(case.model(), case.feeds(), {}))}
        forms = {"model": self._form(lambda: self._run(case.model(), case.feeds()))}
        if case.in_place:
            forms["in place"] = self._form(lambda: self._bound(case.model(), case.feeds(), case.in_place))
        if isinstance(case, AttentionCase):
            for name, build in microsoft.OPERATORS.items():
                special = build(case)
                if special is not None:
                    forms[name] = self._form(partial(self._special, special))
        if isinstance(case, LinearCase):
            forms["com.microsoft"] = self._form(lambda: self._run(case.model("com.microsoft"), case.feeds()))
        if isinstance(case, LlamaCase):
            forms["grown cache"] = self._form(lambda: self._run(*llama_forms.grown(case)))
            forms["GroupQueryAttention"] = self._form(
                lambda: self._bound(*llama_forms.group_query(case), case.in_place)
            )
        return forms

    def _form(self, make: Callable[[], Contender]) -> Form:
        return Form(make, self._threads)

    def _session(self, model: onnx.ModelProto, feeds: Arrays) -> ort.InferenceSession:
        """With the sizes of the feeds, so that nothing is left to find out in each call."""
        options = ort.SessionOptions()
        options.intra_op_num_threads = self._threads
        options.log_severity_level = 4
        for value in model.graph.input:
            for dim, size in zip(value.type.tensor_type.shape.dim, feeds[value.name].shape):
                if dim.dim_param:
                    options.add_free_dimension_override_by_name(dim.dim_param, size)
        return ort.InferenceSession(model.SerializeToString(), options, _CPU)

    def _run(self, model: onnx.ModelProto, feeds: Arrays) -> Contender:
        session = self._session(model, feeds)
        names = [output.name for output in session.get_outputs()]
        return Contender(lambda: session.run(None, feeds), lambda results: dict(zip(names, results)))

    def _bound(self, model: onnx.ModelProto, feeds: Arrays, in_place: Mapping[str, str]) -> Contender:
        """Outputs that take over an input are bound to its memory."""
        session = self._session(model, feeds)
        binding = session.io_binding()
        values = {name: ort.OrtValue.ortvalue_from_numpy(array) for name, array in feeds.items()}
        names = [output.name for output in session.get_outputs()]
        for name, value in values.items():
            binding.bind_ortvalue_input(name, value)
        for name in names:
            if name in in_place:
                binding.bind_ortvalue_output(name, values[in_place[name]])
            else:
                binding.bind_output(name)

        def call() -> Any:
            session.run_with_iobinding(binding)
            return binding

        return Contender(call, lambda bound: dict(zip(names, (value.numpy() for value in bound.get_outputs()))))

    def _special(self, special: microsoft.Special) -> Contender:
        contender = self._bound(special.model, special.feeds, special.in_place)
        return Contender(contender.call, lambda bound: special.answers(contender.answers(bound)["output"]))
