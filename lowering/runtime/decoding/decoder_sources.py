"""Inputs that a decoder gets once per sequence, such as an encoder's output, and the outputs of its setup."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import TYPE_CHECKING, Any

import numpy as np

from ...errors import InputError
from ...manifest import SOURCE_LENGTHS, Manifest, TensorSpec
from ..arrays.inputs import InputPort, to_numpy_array
from ..arrays.strings import StringTable
from ..arrays.tensors import Tensor
from .decoder_rows import gather_rows

if TYPE_CHECKING:
    from ..model import Model


class DecoderSources:
    """Arrays for the inputs that are equal in every call, on the device that runs the model.

    Sequences may share the row of a source, as beams do: `rows`, int [batch], is the source row that each sequence
    reads. While sequences share rows, arrays with a row per source are expanded to a row per sequence.
    """

    def __init__(self, model: Model, fixed: Mapping[str, Any], batch: int | str) -> None:
        """Run the setup. `batch` is the first dimension of inputs that have a row for each sequence.

        The setup is skipped if `fixed` has all arrays that the setup would compute. Raises InputError for arrays that
        it does not accept, and for lengths beyond the number of its keys.
        """
        arrays = {name: _import_to_device(model, name, array) for name, array in fixed.items()}
        specs = {spec.name: spec for spec in model.inputs}
        if model.setup is not None:
            inputs = {spec.name: arrays[spec.name] for spec in model.setup.inputs if spec.name in arrays}
            if not _covers_setup_outputs(model.manifest, fixed):
                arrays = model.setup.run(inputs) | arrays
            if SOURCE_LENGTHS in fixed.keys() & {spec.name for spec in model.setup.outputs}:
                _check_lengths(model, arrays)
        arrays = {name: array for name, array in arrays.items() if name in specs}
        self._sources = self._arrays = arrays
        self._by_row = [name for name in arrays if name in specs and specs[name].dims[:1] == (batch,)]
        counts = {name: next(iter(arrays[name].shape), 1) for name in self._by_row}  # scalars are rejected by the model
        if len(set(counts.values())) > 1:
            texts = ", ".join(f"'{name}' {count}" for name, count in counts.items())
            raise InputError(
                "decoder.source_count_mismatch",
                f"arrays of the sources have different numbers of rows: {texts}. Give each a row for each source.",
            )
        self._count = next(iter(counts.values()), 0)
        self._rows = np.arange(self._count)

    def get_arrays(self, batch: int) -> dict[str, Any]:
        """Return the arrays for a number of sequences. Sequences of one source are adjacent.

        Raises InputError if sources cannot be shared equally.
        """
        if self._by_row and len(self._rows) != batch:
            if not self._count or batch % self._count:
                raise InputError(
                    "decoder.source_rows_not_divisible",
                    f"'{self._by_row[0]}' has {self._count} rows for {batch} sequences. Give a row for each sequence, "
                    "or for each group of equally many sequences.",
                )
            self._select_rows(np.arange(self._count).repeat(batch // self._count))
        return self._arrays

    def reorder(self, rows: np.ndarray) -> None:
        """Let each sequence b read the source of sequence rows[b]."""
        if self._by_row and (self._rows[rows] != self._rows).any():
            self._select_rows(self._rows[rows])

    def reset(self) -> None:
        """Discard the assignment of sequences to sources."""
        self._arrays, self._rows = self._sources, np.arange(self._count)

    def _select_rows(self, rows: np.ndarray) -> None:
        self._rows = rows
        self._arrays = self._sources | {name: gather_rows(self._sources[name], rows) for name in self._by_row}


def list_fixed_inputs(manifest: Manifest, filled: Collection[str]) -> list[TensorSpec]:
    """Return the inputs of a decoder and its setup that are equal in every call and not computed.

    filled are the names of the inputs for tokens, their mask and their positions.
    """
    spec, setup = manifest.decoder, manifest.setup
    assert spec is not None
    filled_or_computed = {*manifest.donated, *spec.states, spec.starts, spec.ends, *filled}
    filled_or_computed |= set() if manifest.slots is None else {manifest.slots.length}
    inputs, outputs = ((), ()) if setup is None else (setup.inputs, setup.outputs)
    filled_or_computed |= {tensor.name for tensor in outputs}
    remaining = {tensor.name: tensor for tensor in (*manifest.inputs, *inputs) if tensor.name not in filled_or_computed}
    return list(remaining.values())


def check_fixed_inputs(manifest: Manifest, filled: Collection[str], fixed: Collection[str]) -> None:
    """Raise InputError for an unknown name and for a missing one.

    Valid names are those of `list_fixed_inputs` and of the setup's outputs. Inputs of the setup may be missing if
    `fixed` covers all outputs of the setup.
    """
    required = [spec.name for spec in list_fixed_inputs(manifest, filled)]
    setup_outputs = [] if manifest.setup is None else [spec.name for spec in manifest.setup.outputs]
    unknown = [name for name in fixed if name not in required and name not in setup_outputs]
    if unknown:
        accepted = ", ".join([*required, *setup_outputs]) or "nothing: the decoder fills all inputs itself"
        raise InputError(
            "decoder.fixed_name_unknown", f"'{unknown[0]}' is not an input to pass in `fixed`, which takes {accepted}."
        )
    inputs = {spec.name for spec in manifest.inputs}
    missing = [
        name
        for name in required
        if name not in fixed and (name in inputs or not _covers_setup_outputs(manifest, fixed))
    ]
    if missing:
        raise InputError(
            "decoder.fixed_missing", f"the decoder does not compute input '{missing[0]}': pass its array in `fixed`."
        )


def _covers_setup_outputs(manifest: Manifest, names: Collection[str]) -> bool:
    """Return whether the names cover every output of the setup that the decoder reads."""
    assert manifest.setup is not None
    inputs = {spec.name for spec in manifest.inputs}
    return all(spec.name in names for spec in manifest.setup.outputs if spec.name in inputs)


def _check_lengths(model: Model, arrays: Mapping[str, Any]) -> None:
    """Raise InputError for lengths beyond the number of keys of the sources."""
    assert model.setup is not None
    setup_arrays = [arrays[spec.name] for spec in model.setup.outputs if spec.name in arrays]
    keys = max((array.shape[2] for array in setup_arrays if len(array.shape) == 4), default=0)
    lengths = arrays[SOURCE_LENGTHS]
    if isinstance(lengths, Tensor) and model.gpu is not None:
        lengths = np.from_dlpack(model.gpu.to_host(lengths))
    lengths = to_numpy_array(lengths, f"'{SOURCE_LENGTHS}'")
    if lengths.dtype.kind not in "iu" or ((lengths < 0) | (lengths > keys)).any():
        raise InputError(
            "decoder.source_lengths_invalid",
            f"'{SOURCE_LENGTHS}' must be integers from 0 to {keys}, as many keys as sources have, not {lengths.dtype} "
            f"{lengths.tolist()}.",
        )


def _import_to_device(model: Model, name: str, array: Any) -> Any:
    """Return the array of an input in the GPU's memory if the model runs on a GPU."""
    if not hasattr(array, "__dlpack__"):  # a list, or a type without DLPack
        array = np.asarray(array)
    models = [model] if model.setup is None else [model, model.setup]
    owner = next((owner for owner in models if any(spec.name == name for spec in owner.inputs)), None)
    if model.gpu is None or owner is None:
        return array
    spec = next(spec for spec in owner.inputs if spec.name == name)
    port = InputPort(spec, "input", owner.manifest.ranges, gpu=model.gpu.number)
    return model.gpu.move_to_device(
        [port], [port.accept(array, {}, StringTable(owner.manifest.strings))], in_place=False
    )[0]
