"""C names of the fields of a static object's record of a call."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from .c_model import CModel
from .c_names import choose_names


@dataclass(frozen=True)
class FieldNames:
    """C names of the fields of a call's record.

    Attributes:
        sizes: Those of sizes.
        inputs: Those of inputs.
        outputs: Those of outputs with memory of their own, by the number of the output.
        shapes: Those of the shapes of outputs for which the call allocates memory, by the number of the output.
    """

    sizes: Sequence[str]
    inputs: Sequence[str]
    outputs: Mapping[int, str]
    shapes: Mapping[int, str]


def name_fields(model: CModel) -> FieldNames:
    """Return names of the fields of a call's record."""
    code, manifest = model.code, model.manifest
    inputs = [tensor.name for tensor in manifest.inputs]
    outputs = {number: spec.name for number, spec, _ in model.list_own_outputs()}
    shapes = {number: f"{manifest.outputs[number].name}_shape" for number in code.allocated}
    names = iter(
        choose_names(
            [*code.sizes, *inputs, *outputs.values(), *shapes.values()],
            ("weights", "workspace", "memory", "threads"),
        )
    )
    return FieldNames(
        [next(names) for _ in code.sizes],
        [next(names) for _ in inputs],
        {number: next(names) for number in outputs},
        {number: next(names) for number in shapes},
    )
