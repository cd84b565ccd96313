"""The source of a Python package around an artifact: one typed function, named inputs and outputs."""

from __future__ import annotations

import keyword
import re
from collections.abc import Iterable

from ..manifest import Argument, Manifest, TensorSpec, arguments

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
    takes = [a for a in arguments(manifest.inputs, manifest.input_lists) if a.kind != "none"]
    gives = arguments(manifest.outputs, manifest.output_lists)
    inputs, outputs = (identifiers(a.name for a in each) for each in (takes, gives))
    taken = [_escaped(str(a)) + _donated(manifest, a) for a in takes]
    given = [_escaped(str(a)) for a in gives]
    fields = [f'    {name}: {_hint(a)}\n    """{said}"""' for name, a, said in zip(outputs, gives, given)]
    named = zip(inputs, takes, taken)
    what = ["Runs the model; arrays have these types and shapes:\n"]
    what += [f"    {said if name == t.name else f'{name}, input {said}'}" for name, t, said in named]
    return _TEMPLATE.format(
        summary="\n".join([*(f"* input {said}" for said in taken), *(f"* output {said}" for said in given)]),
        artifact=ARTIFACT,
        fields="\n".join(["", *fields]),
        parameters=", ".join(f"{name}: {_hint(a)}" for name, a in zip(inputs, takes)),
        what="\n".join(what),
        inputs="\n".join(f"            {a.name!a}: {name}," for name, a in zip(inputs, takes)),
        outputs="\n".join(f"        {name}=outputs[{a.name!a}]," for name, a in zip(outputs, gives)),
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


def _hint(argument: Argument) -> str:
    hints = list(dict.fromkeys(map(_hint_of_tensor, argument.tensors)))
    if argument.kind == "tensor":
        return hints[0]
    return "None" if argument.kind == "none" else f"list[{' | '.join(hints) or 'Any'}]"


def _hint_of_tensor(tensor: TensorSpec) -> str:
    if tensor.dtype == "string":
        return "NDArray[np.object_]"
    if tensor.dtype == "bool":
        return "NDArray[np.bool_]"
    return f"NDArray[np.{tensor.dtype}]" if _NUMPY.fullmatch(tensor.dtype) else "NDArray[Any]"


def _donated(manifest: Manifest, argument: Argument) -> str:
    output = manifest.donated.get(argument.name)
    return "" if output is None else f"; consumed, its memory becomes that of {_escaped(output)}"


def _escaped(text: str) -> str:
    """Text that may stand in any literal."""
    return text.encode("unicode_escape").decode("ascii").replace('"', '\\"')
