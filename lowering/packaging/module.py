"""Source of the Python package of an artifact: one typed function, with named inputs and outputs."""

from __future__ import annotations

import keyword
import re
from collections.abc import Iterable

from ..manifest import Argument, Manifest, TensorSpec, arguments

ARTIFACT = "artifact"
"""The artifact's folder in the package."""

_TEMPLATE = '''\
"""A compiled ONNX model.

{summary}
"""

from __future__ import annotations

from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

import lowering
import numpy as np
from numpy.typing import NDArray

ARTIFACT = Path(__file__).parent / "{artifact}"
"""For lowering.load, which also binds arrays, decodes and takes arrays of other libraries."""


class Outputs(NamedTuple):
    """What the model gives."""
{fields}


def run({parameters}) -> Outputs:
    """{what}

    Raises lowering.InputError for arrays that the model does not take.
    """
    outputs = _model().run(
        {{
{inputs}
        }}
    )
    return Outputs(
{outputs}
    )


@cache
def _model() -> Any:
    """The model, loaded at the first call."""
    return lowering.load(ARTIFACT)
'''

# Names of the module, and of tuple methods.
_RESERVED = {"ARTIFACT", "Any", "NDArray", "NamedTuple", "Outputs", "Path", "cache", "lowering", "np", "outputs", "run"}
_RESERVED |= {"count", "index"}
# Element types of NumPy; its type hints do not support those of ml_dtypes.
_NUMPY = re.compile(r"float(16|32|64)|u?int(8|16|32|64)|complex(64|128)")


def generate_module(manifest: Manifest) -> str:
    """Return the text of the package's __init__.py, in ASCII."""
    model_inputs = [a for a in arguments(manifest.inputs, manifest.input_lists) if a.kind != "none"]
    model_outputs = arguments(manifest.outputs, manifest.output_lists)
    inputs, outputs = (make_identifiers(a.name for a in items) for items in (model_inputs, model_outputs))
    input_texts = [_escape(str(a)) + _describe_donation(manifest, a) for a in model_inputs]
    output_texts = [_escape(str(a)) for a in model_outputs]
    fields = [
        f'    {name}: {_make_hint(a)}\n    """{text}"""' for name, a, text in zip(outputs, model_outputs, output_texts)
    ]
    triples = zip(inputs, model_inputs, input_texts)
    lines = ["Runs the model; arrays have these types and shapes:\n"]
    lines += [f"    {text if name == t.name else f'{name}, input {text}'}" for name, t, text in triples]
    return _TEMPLATE.format(
        summary="\n".join(
            [*(f"* input {text}" for text in input_texts), *(f"* output {text}" for text in output_texts)]
        ),
        artifact=ARTIFACT,
        fields="\n".join(["", *fields]),
        parameters=", ".join(f"{name}: {_make_hint(a)}" for name, a in zip(inputs, model_inputs)),
        what="\n".join(lines),
        inputs="\n".join(f"            {a.name!a}: {name}," for name, a in zip(inputs, model_inputs)),
        outputs="\n".join(f"        {name}=outputs[{a.name!a}]," for name, a in zip(outputs, model_outputs)),
    )


def make_identifiers(names: Iterable[str]) -> list[str]:
    """Return a unique Python identifier for each name: other characters become `_`."""
    unique_names: list[str] = []
    for name in names:
        plain = re.sub(r"[^0-9A-Za-z]+", "_", name).strip("_")
        if not plain or plain[0].isdigit():
            plain = f"tensor_{plain}".rstrip("_")
        if keyword.iskeyword(plain) or plain in _RESERVED:
            plain += "_"
        candidates = (plain, *(f"{plain}_{k}" for k in range(2, len(unique_names) + 3)))
        unique_names.append(next(candidate for candidate in candidates if candidate not in unique_names))
    return unique_names


def _make_hint(argument: Argument) -> str:
    hints = list(dict.fromkeys(map(_make_tensor_hint, argument.tensors)))
    if argument.kind == "tensor":
        return hints[0]
    return "None" if argument.kind == "none" else f"list[{' | '.join(hints) or 'Any'}]"


def _make_tensor_hint(tensor: TensorSpec) -> str:
    if tensor.dtype == "string":
        return "NDArray[np.object_]"
    if tensor.dtype == "bool":
        return "NDArray[np.bool_]"
    return f"NDArray[np.{tensor.dtype}]" if _NUMPY.fullmatch(tensor.dtype) else "NDArray[Any]"


def _describe_donation(manifest: Manifest, argument: Argument) -> str:
    output = manifest.donated.get(argument.name)
    return "" if output is None else f"; consumed, its memory becomes that of {_escape(output)}"


def _escape(text: str) -> str:
    """Return text that is legal in any string literal."""
    return text.encode("unicode_escape").decode("ascii").replace('"', '\\"')
