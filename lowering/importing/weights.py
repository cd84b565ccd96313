"""The numbers of a model: small ones are constants of its code, large ones weights, which are parameters behind the
inputs."""

from __future__ import annotations

import numpy as np
from tvm import relax

from .quantized import Quantized

# Constants below this many bytes are embedded in the code, where TVM can fold them.
_EMBED_BYTES = 256

# Elements that tell most weights of one shape apart.
_FIRST = 16


class Weights:
    """The weights of one import: the variables of all, in order, and by name what they hold."""

    def __init__(self) -> None:
        self.variables: list[relax.Var] = []
        self._arrays: dict[str, np.ndarray] = {}
        self._quantized: dict[str, Quantized] = {}
        # By element type, shape and first bytes.
        self._alike: dict[tuple[str, tuple[int, ...], bytes], list[relax.Var]] = {}

    def copy(self) -> Weights:
        """Return a copy, to which weights can be added by itself."""
        other = Weights()
        other.variables, other._arrays, other._quantized = (
            list(self.variables),
            dict(self._arrays),
            dict(self._quantized),
        )
        other._alike = {key: list(alike) for key, alike in self._alike.items()}
        return other

    @property
    def contents(self) -> dict[str, np.ndarray | Quantized]:
        return {**self._arrays, **self._quantized}

    def numbers(self, array: np.ndarray) -> relax.Expr:
        """A constant, or a weight."""
        # TVM cannot load a module that holds an empty constant.
        if 0 < array.nbytes <= _EMBED_BYTES:
            return relax.const(np.asarray(array, order="C"), array.dtype.name)
        # Exporters write tied weights twice. Bytes are compared only where the first ones agree: whatever is read of a
        # mapped file takes time and memory.
        alike = self._alike.setdefault((array.dtype.name, array.shape, array.flat[:_FIRST].tobytes()), [])
        for known in alike:
            if _same_bytes(self._arrays[known.name], array):
                return known
        name = f"weight_{len(self._arrays)}"
        self._arrays[name] = array
        alike.append(self._variable(name, array.shape, array.dtype.name))
        return alike[-1]

    def quantized(self, matrix: Quantized) -> relax.Var:
        name = f"quantized_{len(self._quantized)}"
        self._quantized[name] = matrix
        return self._variable(name, matrix.shape, matrix.dtype.name)

    def _variable(self, name: str, shape: tuple[int, ...], dtype: str) -> relax.Var:
        self.variables.append(relax.Var(name, relax.TensorType(shape, dtype)))
        return self.variables[-1]


def _same_bytes(a: np.ndarray, b: np.ndarray) -> bool:
    """Whether arrays of one type and shape hold the same bits, NaNs and signed zeros included."""
    return np.array_equal(a.view(f"u{a.itemsize}"), b.view(f"u{b.itemsize}"))
