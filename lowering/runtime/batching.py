"""Dynamic batching: calls of several threads, of a few rows each, become one call of many."""

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
from .background import Answer, Background, Task, Worker
from .checks import checked_threads, whole_number

if TYPE_CHECKING:
    from .model import Model

Arrays = Mapping[str, Any]


@dataclass
class _Request:
    """key is equal for requests that can be one call; None for one that cannot be part of any."""

    inputs: dict[str, Any]
    key: Any
    rows: int
    future: Answer
    since: float = field(default_factory=time.monotonic)


class Batching:
    """A model whose concurrent calls are put together.

    A request waits until `most` rows are there, or the oldest has waited `wait` seconds; then all that wait, and agree
    in all sizes but the first, are one call, in the order in which they came. Every input and output must have the same
    symbolic dimension first, the batch, and nowhere else, and no input may be donated. That a row of the results
    depends on that row of the inputs alone is what you say by using this class: nothing here can know it.

    Results of one call are parts of one array. A request that makes its call fail fails alone. Use it in a `with`
    statement, or call `close`, which waits for what was submitted.
    """

    def __init__(self, model: Model, most: int = 32, wait: float = 0.002, threads: int | None = None) -> None:
        """threads is as for `Model.run`. Raises InputError for a model without such a dimension, and for other numbers
        than most >= 1 and 0 <= wait."""
        self.batch = _batch_dimension(model.manifest)
        most = whole_number(most, "most", 1, 2**31)
        if not 0 <= wait < float("inf"):
            raise InputError(f"wait must be a number of seconds from 0 on, not {wait!r}.")
        most = min(most, model.manifest.ranges.get(self.batch, (1, most))[1])
        self._names = [spec.name for spec in model.inputs]
        self._background = Background("Batching", _Groups(model, most, wait, checked_threads(threads)).tasks)

    def submit(self, inputs: Arrays) -> Future[dict[str, Any]]:
        """A future of the outputs by name, for NumPy's arrays by input name; what `Model.run` raises, it raises.

        The arrays must stay as they are until then. Raises InputError for other arrays, and once closed.
        """
        for name, array in inputs.items():
            if not isinstance(array, np.ndarray):
                raise InputError(f"input '{name}' is a {type(array).__name__}: batching takes NumPy's arrays.")
        arrays, kind = dict(inputs), self._kind(inputs)
        return self._background.submit(lambda answer: _Request(arrays, *kind, answer))

    def run(self, inputs: Arrays) -> dict[str, Any]:
        """The outputs by name, waited for."""
        return self.submit(inputs).result()

    def close(self) -> None:
        """Waits for all that was submitted."""
        self._background.close()

    def __enter__(self) -> Batching:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _kind(self, inputs: Arrays) -> tuple[Any, int]:
        """What a request must share with others to be one call, and its rows."""
        arrays = [inputs[name] for name in self._names if name in inputs]
        rows = {int(array.shape[0]) if array.ndim else -1 for array in arrays}
        if len(inputs) != len(self._names) or len(arrays) != len(inputs) or len(rows) > 1 or -1 in rows:
            return None, 1  # the model says what is wrong
        return tuple((array.dtype, array.shape[1:]) for array in arrays), rows.pop()


class _Groups:
    """Requests that wait become one call, and that tasks: an answer each."""

    def __init__(self, model: Model, most: int, wait: float, threads: int | None) -> None:
        self._model, self._most, self._wait, self._threads = model, most, wait, threads

    def tasks(self, first: _Request, worker: Worker) -> list[Task]:
        group = [r for r in self._group(first, worker) if r.future.set_running_or_notify_cancel()]
        if len(group) > 1:
            try:
                outputs = self._together(group)
            except BaseException:  # one of them is to blame: each for itself
                pass
            else:
                return [partial(r.future.set_result, answer) for r, answer in zip(group, outputs)]
        return [partial(r.future.compute, self._model.run, r.inputs, self._threads) for r in group]

    def _group(self, first: _Request, worker: Worker) -> list[_Request]:
        """The requests that are one call with the first."""
        group, rows = [first], first.rows
        while first.key is not None and rows < self._most:
            try:
                found = worker.take(first.since + self._wait - time.monotonic())
            except queue.Empty:
                break
            if found is None or found.key != first.key or rows + found.rows > self._most:
                worker.put_back(found)
                break
            group.append(found)
            rows += found.rows
        return group

    def _together(self, group: list[_Request]) -> list[dict[str, Any]]:
        inputs = {name: np.concatenate([request.inputs[name] for request in group]) for name in group[0].inputs}
        outputs = self._model.run(inputs, self._threads)
        ends = np.cumsum([request.rows for request in group])
        begins = [0, *ends[:-1]]
        return [{name: array[a:b] for name, array in outputs.items()} for a, b in zip(begins, ends)]


def _batch_dimension(manifest: Manifest) -> str:
    """The dimension that all inputs and outputs have first, and nowhere else. Raises InputError where there is none."""
    lists = (*manifest.input_lists, *manifest.output_lists)
    if lists:
        raise InputError(
            f"'{lists[0].name}' is a list of arrays or None, and calls are joined along one axis of arrays."
        )
    tensors = (*manifest.inputs, *manifest.outputs)
    firsts = {tensor.dims[0] if tensor.dims else None for tensor in tensors}
    batch = firsts.pop() if len(firsts) == 1 else None
    if not isinstance(batch, str) or any(batch in map(str, tensor.dims[1:]) for tensor in tensors):
        said = "; ".join(map(str, tensors))
        raise InputError(f"no symbolic dimension comes first, and only there, in every input and output: {said}.")
    if manifest.donated:
        raise InputError(f"inputs are donated ({', '.join(manifest.donated)}), and a call of several has none of them.")
    return batch
