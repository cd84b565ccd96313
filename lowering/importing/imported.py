"""What an import gives: a model in Relax, and what it is called outside."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import tvm

from ..manifest import ListSpec
from .expected_sizes import Linear
from .origins import Origins
from .quantized import Quantized
from .values import Shape


@dataclass(frozen=True)
class Port:
    """An input or output of the model: its ONNX name, element type and shape, whose sizes the model calls dims."""

    name: str
    dtype: str
    shape: Shape
    dims: tuple[int | str, ...]


@dataclass
class Imported:
    """A model in Relax, under the conventions of docs/architecture.md."""

    module: tvm.IRModule
    weights: dict[str, np.ndarray | Quantized]
    inputs: list[Port]
    outputs: list[Port]
    output_lists: list[ListSpec]
    strings: list[str]
    warnings: list[str]
    origins: Origins
    assertions: dict[str, str]  # what the user reads when one fails, by the names of its variable
    derived: dict[str, Linear]  # sizes of inputs that follow from others
