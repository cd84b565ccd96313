"""What a decoder is given once per sequence, such as an encoder's output, and what its setup makes of that."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import TYPE_CHECKING, Any

import numpy as np

from ..errors import InputError
from ..manifest import SOURCE_LENGTHS, Manifest, TensorSpec
from .decoder_rows import gathered
from .inputs import Port, plain_array
from .strings import Dictionary
from .tensors import Tensor

if TYPE_CHECKING:
    from .model import Model


class Sources:
    """Arrays for the inputs that are the same in every call, where the model runs.

    Sequences may share the row of a source, as beams do: `rows`, int [batch], says which row each sequence reads. Of
    arrays with a row for each source, one for each sequence is made as long as several share one.
    """

    def __init__(self, model: Model, given: Mapping[str, Any], batch: int | str) -> None:
        """Run the setup. batch is the first size of what has a row for each sequence.

        The setup does not run where all that it would give is given. Raises InputError for arrays that it does not
        take, and for lengths that its keys do not have.
        """
        arrays = {name: _placed(model, name, array) for name, array in given.items()}
        specs = {spec.name: spec for spec in model.inputs}
        if model.setup is not None:
            inputs = {spec.name: arrays[spec.name] for spec in model.setup.inputs if spec.name in arrays}
            if not _gives_all(model.manifest, given):
                arrays = model.setup.run(inputs) | arrays
            if SOURCE_LENGTHS in given.keys() & {spec.name for spec in model.setup.outputs}:
                _check_lengths(model, arrays)
        arrays = {name: array for name, array in arrays.items() if name in specs}
        self._given = self._arrays = arrays
        self._by_row = [name for name in arrays if name in specs and specs[name].dims[:1] == (batch,)]
        counts = {name: next(iter(arrays[name].shape), 1) for name in self._by_row}  # a number is refused by the model
        if len(set(counts.values())) > 1:
            texts = ", ".join(f"'{name}' {count}" for name, count in counts.items())
            raise InputError(f"arrays of the sources have rows for different numbers of them: {texts}. Give one each.")
        self._count = next(iter(counts.values()), 0)
        self._rows = np.arange(self._count)

    def of(self, batch: int) -> dict[str, Any]:
        """Return the arrays for so many sequences; those of one source stand side by side.

        Raises InputError where sources cannot be shared equally.
        """
        if self._by_row and len(self._rows) != batch:
            if not self._count or batch % self._count:
                raise InputError(
                    f"'{self._by_row[0]}' has {self._count} rows for {batch} sequences. Give a row for each sequence, "
                    "or for each group of as many sequences."
                )
            self._take(np.arange(self._count).repeat(batch // self._count))
        return self._arrays

    def reorder(self, rows: np.ndarray) -> None:
        """Let each sequence b read the source that rows[b] read."""
        if self._by_row and (self._rows[rows] != self._rows).any():
            self._take(self._rows[rows])

    def reset(self) -> None:
        """Forget which sequence reads which source."""
        self._arrays, self._rows = self._given, np.arange(self._count)

    def _take(self, rows: np.ndarray) -> None:
        self._rows = rows
        self._arrays = self._given | {name: gathered(self._given[name], rows) for name in self._by_row}


def fixed_inputs(manifest: Manifest, filled: Collection[str]) -> list[TensorSpec]:
    """Return the inputs of a decoder, and of its setup, that are the same in every call and that nobody computes.

    filled are the names of those that hold tokens, their mask and their positions.
    """
    spec, setup = manifest.decoder, manifest.setup
    assert spec is not None
    known = {*manifest.donated, *spec.states, spec.starts, spec.ends, *filled}
    known |= set() if manifest.slots is None else {manifest.slots.length}
    inputs, outputs = ((), ()) if setup is None else (setup.inputs, setup.outputs)
    known |= {tensor.name for tensor in outputs}
    others = {tensor.name: tensor for tensor in (*manifest.inputs, *inputs) if tensor.name not in known}
    return list(others.values())


def check_fixed(manifest: Manifest, filled: Collection[str], given: Collection[str]) -> None:
    """Raise InputError for a name that is not one of `fixed_inputs` or made by the setup, and for one that is missing.

    Inputs of the setup may be missing where all that it would give is given.
    """
    needed = [spec.name for spec in fixed_inputs(manifest, filled)]
    made = [] if manifest.setup is None else [spec.name for spec in manifest.setup.outputs]
    unknown = [name for name in given if name not in needed and name not in made]
    if unknown:
        takes = ", ".join([*needed, *made]) or "nothing: the decoder fills all inputs itself"
        raise InputError(f"'{unknown[0]}' is not an input to pass in `fixed`, which takes {takes}.")
    inputs = {spec.name for spec in manifest.inputs}
    missing = [name for name in needed if name not in given and (name in inputs or not _gives_all(manifest, given))]
    if missing:
        raise InputError(f"a decoder cannot know input '{missing[0]}': pass its array in `fixed`.")


def _gives_all(manifest: Manifest, given: Collection[str]) -> bool:
    """Whether all that the decoder reads of its setup is given."""
    assert manifest.setup is not None
    inputs = {spec.name for spec in manifest.inputs}
    return all(spec.name in given for spec in manifest.setup.outputs if spec.name in inputs)


def _check_lengths(model: Model, arrays: Mapping[str, Any]) -> None:
    """Raise InputError for numbers of keys that sources do not have."""
    assert model.setup is not None
    made = [arrays[spec.name] for spec in model.setup.outputs if spec.name in arrays]
    keys = max((array.shape[2] for array in made if len(array.shape) == 4), default=0)
    lengths = arrays[SOURCE_LENGTHS]
    if isinstance(lengths, Tensor) and model.gpu is not None:
        lengths = np.from_dlpack(model.gpu.to_host(lengths))
    lengths = plain_array(lengths, f"'{SOURCE_LENGTHS}'")
    if lengths.dtype.kind not in "iu" or ((lengths < 0) | (lengths > keys)).any():
        raise InputError(
            f"'{SOURCE_LENGTHS}' must be integers from 0 to {keys}, as many keys as sources have, not {lengths.dtype} "
            f"{lengths.tolist()}."
        )


def _placed(model: Model, name: str, array: Any) -> Any:
    """Return an array of an input in the memory of the GPU, if the model runs on one."""
    if not hasattr(array, "__dlpack__"):  # a list, or a type that DLPack does not know
        array = np.asarray(array)
    parts = [model] if model.setup is None else [model, model.setup]
    part = next((part for part in parts if any(spec.name == name for spec in part.inputs)), None)
    if model.gpu is None or part is None:
        return array
    spec = next(spec for spec in part.inputs if spec.name == name)
    port = Port(spec, "input", part.manifest.ranges, gpu=model.gpu.number)
    return model.gpu.place([port], [port.accept(array, {}, Dictionary(part.manifest.strings))], in_place=False)[0]
