"""Dynamic batching: merge concurrent calls of a few rows each into one call of many rows."""

from __future__ import annotations

import queue
import time
from collections.abc import Mapping
from concurrent.futures import Future
from dataclasses import dataclass, field
from functools import partial
from types import TracebackType
from typing import TYPE_CHECKING, Any

import numpy as np

from ..errors import InputError
from ..manifest import Manifest
from .artifact.checks import check_integer, check_threads
from .background import BackgroundThread, Task, Worker, WorkerFuture

if TYPE_CHECKING:
    from .model import Model

Arrays = Mapping[str, Any]


@dataclass
class _BatchRequest:
    """A submitted call. Requests with equal keys can be merged into one call; None cannot be merged with any."""

    inputs: dict[str, Any]
    key: Any
    rows: int
    future: WorkerFuture
    since: float = field(default_factory=time.monotonic)


class Batching:
    """A model whose concurrent calls are merged into batches.

    A request waits until `most` rows are pending, or the oldest request has waited `wait` seconds. Then all pending
    requests that agree in every size except the first become one call, in submission order. Every input and output must
    have the same symbolic dimension first, the batch, and nowhere else, and no input may be donated. By using this
    class you assert that a row of the results depends only on the same row of the inputs: this cannot be checked.

    The results of one call are slices of one array. A request that makes its call fail fails alone: the others run
    again one by one. Use the object in a `with` statement, or call `close`, which waits for all submitted requests.
    """

    def __init__(self, model: Model, most: int = 32, wait: float = 0.002, threads: int | None = None) -> None:
        """Start batching calls of a model.

        Args:
            model: The model to call.
            most: Largest number of rows in a call, at least 1.
            wait: Longest time in seconds that a request waits for others, at least 0.
            threads: Number of threads of a call, as for `Model.run`.

        Raises:
            InputError: The model lacks a batch dimension, or an argument is out of range.
        """
        self.batch = _find_batch_dimension(model.manifest)
        max_rows = check_integer(most, "most", 1, 2**31)
        if not 0 <= wait < float("inf"):
            raise InputError(
                "argument.number_invalid", f"wait must be a number of seconds of at least 0, not {wait!r}."
            )
        max_rows = min(max_rows, model.manifest.ranges.get(self.batch, (1, max_rows))[1])
        self._names = [spec.name for spec in model.inputs]
        self._background = BackgroundThread(
            "Batching", _RequestGrouper(model, max_rows, wait, check_threads(threads)).tasks
        )

    def submit(self, inputs: Arrays) -> Future[dict[str, Any]]:
        """Queue a call, and return a future of its outputs by name.

        Args:
            inputs: NumPy arrays by input name. They must not be modified before the future is done.

        Returns:
            A future of the outputs by name. It raises whatever `Model.run` raises.

        Raises:
            InputError: An array is not a NumPy array, or this object is closed.
        """
        for name, array in inputs.items():
            if not isinstance(array, np.ndarray):
                raise InputError(
                    "batching.array_type_unsupported",
                    f"input '{name}' is a {type(array).__name__}: pass a NumPy array.",
                )
        arrays, key = dict(inputs), self._read_key(inputs)
        return self._background.submit(lambda answer: _BatchRequest(arrays, *key, answer))

    def run(self, inputs: Arrays) -> dict[str, Any]:
        """Return the outputs by name, after waiting for them."""
        return self.submit(inputs).result()

    def close(self) -> None:
        """Wait for all submitted requests."""
        self._background.close()

    def __enter__(self) -> Batching:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _read_key(self, inputs: Arrays) -> tuple[Any, int]:
        """Return the key that requests of one call must share, and the number of rows."""
        arrays = [inputs[name] for name in self._names if name in inputs]
        rows = {int(array.shape[0]) if array.ndim else -1 for array in arrays}
        if len(inputs) != len(self._names) or len(arrays) != len(inputs) or len(rows) > 1 or -1 in rows:
            return None, 1  # the model's own error is precise
        return tuple((array.dtype, array.shape[1:]) for array in arrays), rows.pop()


class _RequestGrouper:
    """Merges pending requests into calls, and calls into tasks that each set one future."""

    def __init__(self, model: Model, max_rows: int, max_wait: float, threads: int | None) -> None:
        self._model, self._max_rows, self._max_wait, self._threads = model, max_rows, max_wait, threads

    def tasks(self, first: _BatchRequest, worker: Worker) -> list[Task]:
        group = [r for r in self._collect_group(first, worker) if r.future.set_running_or_notify_cancel()]
        if len(group) > 1:
            try:
                outputs = self._run_batch(group)
            except BaseException:  # one of them is the cause: run each alone
                pass
            else:
                return [partial(r.future.set_result, answer) for r, answer in zip(group, outputs)]
        return [partial(r.future.compute, self._model.run, r.inputs, self._threads) for r in group]

    def _collect_group(self, first: _BatchRequest, worker: Worker) -> list[_BatchRequest]:
        """Return the requests to merge with the first one, which is included."""
        group, rows = [first], first.rows
        while first.key is not None and rows < self._max_rows:
            try:
                candidate = worker.take(first.since + self._max_wait - time.monotonic())
            except queue.Empty:
                break
            if candidate is None or candidate.key != first.key or rows + candidate.rows > self._max_rows:
                worker.put_back(candidate)
                break
            group.append(candidate)
            rows += candidate.rows
        return group

    def _run_batch(self, group: list[_BatchRequest]) -> list[dict[str, Any]]:
        inputs = {name: np.concatenate([request.inputs[name] for request in group]) for name in group[0].inputs}
        outputs = self._model.run(inputs, self._threads)
        ends = np.cumsum([request.rows for request in group])
        begins = [0, *ends[:-1]]
        return [{name: array[a:b] for name, array in outputs.items()} for a, b in zip(begins, ends)]


def _find_batch_dimension(manifest: Manifest) -> str:
    """Return the dimension that every input and output has first, and nowhere else.

    Raises InputError if there is none.
    """
    lists = (*manifest.input_lists, *manifest.output_lists)
    if lists:
        raise InputError(
            "batching.list_unsupported",
            f"'{lists[0].name}' is a list of arrays or None, and batching concatenates arrays only. "
            "Call `run` instead.",
        )
    tensors = (*manifest.inputs, *manifest.outputs)
    leading_dims = {tensor.dims[0] if tensor.dims else None for tensor in tensors}
    batch = leading_dims.pop() if len(leading_dims) == 1 else None
    if not isinstance(batch, str) or any(batch in map(str, tensor.dims[1:]) for tensor in tensors):
        specs_text = "; ".join(map(str, tensors))
        raise InputError(
            "batching.dimension_missing",
            f"no symbolic dimension is the first one, and only that, of every input and output: {specs_text}. "
            "Call `run` instead.",
        )
    if manifest.donated:
        raise InputError(
            "batching.inputs_donated",
            f"inputs are donated ({', '.join(manifest.donated)}), and a merged call copies its inputs. "
            "Compile the model without donate.",
        )
    return batch
