"""The source of a Python package around an artifact: one typed function, named inputs and outputs."""

from __future__ import annotations

import keyword
import re
from collections.abc import Iterable

from ..manifest import Manifest, TensorSpec

ARTIFACT = "artifact"
"""Its folder in the package."""

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

# Names of the module, and methods of tuples.
_TAKEN = {"ARTIFACT", "Any", "NDArray", "NamedTuple", "Outputs", "Path", "cache", "lowering", "np", "outputs", "run"}
_TAKEN |= {"count", "index"}
# Element types that NumPy has itself, those of ml_dtypes are of any kind to its type hints.
_NUMPY = re.compile(r"float(16|32|64)|u?int(8|16|32|64)|complex(64|128)")


def source(manifest: Manifest) -> str:
    """The text of the package's __init__.py, in ASCII."""
    inputs, outputs = (identifiers(t.name for t in tensors) for tensors in (manifest.inputs, manifest.outputs))
    taken = [_said(t) + _donated(manifest, t) for t in manifest.inputs]
    given = [_said(t) for t in manifest.outputs]
    fields = [f'    {name}: {_hint(t)}\n    """{said}"""' for name, t, said in zip(outputs, manifest.outputs, given)]
    named = zip(inputs, manifest.inputs, taken)
    what = ["Runs the model; arrays have these types and shapes:\n"]
    what += [f"    {said if name == t.name else f'{name}, input {said}'}" for name, t, said in named]
    return _TEMPLATE.format(
        summary="\n".join([*(f"* input {said}" for said in taken), *(f"* output {said}" for said in given)]),
        artifact=ARTIFACT,
        fields="\n".join(["", *fields]),
        parameters=", ".join(f"{name}: {_hint(t)}" for name, t in zip(inputs, manifest.inputs)),
        what="\n".join(what),
        inputs="\n".join(f"            {t.name!a}: {name}," for name, t in zip(inputs, manifest.inputs)),
        outputs="\n".join(f"        {name}=outputs[{t.name!a}]," for name, t in zip(outputs, manifest.outputs)),
    )


def identifiers(names: Iterable[str]) -> list[str]:
    """For each name an identifier of Python, all different: other characters become `_`."""
    found: list[str] = []
    for name in names:
        plain = re.sub(r"[^0-9A-Za-z]+", "_", name).strip("_")
        if not plain or plain[0].isdigit():
            plain = f"tensor_{plain}".rstrip("_")
        if keyword.iskeyword(plain) or plain in _TAKEN:
            plain += "_"
        ways = (plain, *(f"{plain}_{k}" for k in range(2, len(found) + 3)))
        found.append(next(way for way in ways if way not in found))
    return found


def _hint(tensor: TensorSpec) -> str:
    if tensor.dtype == "string":
        return "NDArray[np.object_]"
    if tensor.dtype == "bool":
        return "NDArray[np.bool_]"
    return f"NDArray[np.{tensor.dtype}]" if _NUMPY.fullmatch(tensor.dtype) else "NDArray[Any]"


def _said(tensor: TensorSpec) -> str:
    return _escaped(str(tensor))


def _donated(manifest: Manifest, tensor: TensorSpec) -> str:
    output = manifest.donated.get(tensor.name)
    return "" if output is None else f"; consumed, its memory becomes that of {_escaped(output)}"


def _escaped(text: str) -> str:
    """Text that may stand in any literal."""
    return text.encode("unicode_escape").decode("ascii").replace('"', '\\"')
