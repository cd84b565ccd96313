"""Compiled models, which any number of threads may run at once."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from concurrent.futures import Future
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import tvm_ffi

from ..errors import ArtifactError
from ..manifest import FILE, MODEL, Manifest, TensorSpec, arguments
from .arrays.inputs import Sizes
from .arrays.outputs import detect_array_kind
from .arrays.strings import StringTable
from .arrays.tensors import Tensor
from .artifact.copies import copy_artifact
from .artifact.files import ArtifactFiles
from .artifact.folders import replace_folder
from .artifact.pickling import pack_model, unpack_model
from .artifact.signature import SigningKey, sign
from .artifact.weights import ModelWeights
from .background import BackgroundThread, WorkerFuture
from .bound_call import bind_arrays
from .decoding.decoder import Decoder
from .devices import Gpu
from .executor import Arrays, ModelExecutor, check_input_names
from .library import Instrument, ModelLibrary


class Model:
    """A loaded artifact (`lowering.load`).

    Arrays are NumPy arrays, or arrays of any library with DLPack. They are in CPU memory or, for a model on a GPU, in
    that GPU's memory; arrays elsewhere are copied. Outputs are returned in the kind and memory of the first input that
    is not a NumPy array, and otherwise as NumPy arrays. Inputs are read in place at any alignment. Only strided arrays
    and strings are copied. Outputs are new arrays that own their memory. The exception is an output that takes over a
    donated input's memory: it is the array object that the caller passed. Any number of threads may run one model at
    the same time.

    An input or output that is a sequence in the ONNX model is a list of arrays. Its length is fixed when the model is
    compiled. An optional one without an element is None. `inputs` and `outputs` name the tensors of lists, by which
    they can be passed one by one: x[0], x[1].

    `setup` is the model that a decoder with an encoder's output runs once per sequence. Its outputs are inputs of this
    model, by name. It is None for all other models.
    """

    def __init__(
        self,
        files: ArtifactFiles,
        manifest: Manifest,
        library: ModelLibrary,
        weights: memoryview,
        threads: int | None = None,
        setup: Model | None = None,
    ) -> None:
        self.manifest = manifest
        self.setup = setup
        self._files = files
        self._library = library
        self.gpu = None if library.gpu is None else Gpu(library.gpu)
        self._weights = ModelWeights(weights, manifest, self.gpu)
        self._threads = manifest.threads if threads is None else threads
        self._executor = ModelExecutor(manifest, library, self._weights, self.gpu, self._threads)
        # The shapes of the last call, which need no second check.
        self._shapes: list[Any] = []
        self._background = BackgroundThread("onnx-lowering", lambda task, _: [task])

    @property
    def inputs(self) -> tuple[TensorSpec, ...]:
        """Name, dtype and dims of every tensor that a call takes, in order."""
        return self.manifest.inputs

    @property
    def outputs(self) -> tuple[TensorSpec, ...]:
        """Name, dtype and dims of every tensor that a call returns, in order."""
        return self.manifest.outputs

    def __repr__(self) -> str:
        input_arguments = arguments(self.inputs, self.manifest.input_lists)
        output_arguments = arguments(self.outputs, self.manifest.output_lists)
        return f"Model({', '.join(map(str, input_arguments))} -> {', '.join(map(str, output_arguments))})"

    def _repr_html_(self) -> str:
        from ..notebook import format_model  # not needed to run models

        return format_model(self.manifest)

    def run(self, inputs: Arrays, threads: int | None = None) -> dict[str, Any]:
        """Run the model on arrays by input name, and return the outputs by name.

        Args:
            inputs: Arrays by input name; lists of arrays for sequences.
            threads: Number of threads for this call. None means the number that the model was loaded with.

        Returns:
            The outputs by name.

        Raises:
            InputError: The model does not take the arrays, which is found before any donated array is written, or their
                sizes do not fit together inside the model.
        """
        executor = self._executor
        inputs = executor.flatten_inputs(inputs)
        strings = executor.new_strings()
        from_dlpack, on_host = detect_array_kind(inputs)
        shapes = [getattr(inputs.get(port.name), "shape", None) for port in executor.ports]
        tensors = executor.accept_inputs(executor.ports, inputs, None if shapes == self._shapes else {}, strings)
        self._shapes = shapes
        threads = executor.choose_threads(threads)
        if self.gpu is None:
            results = executor.run_code(tensors, threads, release=True)
            return executor.deliver_outputs(
                results, executor.index_memory(tensors, inputs), {}, from_dlpack, False, strings
            )
        with self.gpu.use_stream_of(inputs.values()):
            device_tensors = self.gpu.move_to_device(executor.ports, tensors, in_place=False)
            results = executor.run_code(device_tensors, threads, release=True)
            self.gpu.copy_back(executor.ports, tensors, device_tensors)
            return executor.deliver_outputs(
                results, executor.index_memory(device_tensors, inputs), {}, from_dlpack, on_host, strings
            )

    def accept(self, inputs: Arrays) -> dict[str, Any]:
        """Return copies of arrays for some of the inputs, checked as by `run`, for a later call of `run`.

        Args:
            inputs: Arrays for any subset of the inputs, by name. Arrays in a GPU's memory are imported and not copied.

        Raises:
            InputError: The model does not take an array, or a name is not an input.
        """
        inputs = self._executor.flatten_inputs(inputs, is_complete=False)
        check_input_names(inputs, self.manifest.inputs)
        ports, strings = {port.name: port for port in self._executor.ports}, StringTable(self.manifest.strings)
        sizes: Sizes = {}
        return {name: ports[name].snapshot(array, sizes, strings) for name, array in inputs.items()}

    def submit(self, inputs: Arrays, threads: int | None = None) -> Future[dict[str, Any]]:
        """Queue a call of `run`, and return a future of the outputs, or of its exception.

        Submitted calls run one after the other, in that order.

        Args:
            inputs: Arrays by input name. They must not be modified before the call is done.
            threads: Number of threads, as for `run`.

        Returns:
            A future of the outputs by name.
        """

        def task(answer: WorkerFuture) -> Callable[[], None]:
            return lambda: answer.compute(self.run, inputs, threads) if answer.set_running_or_notify_cancel() else None

        return self._background.submit(task)

    def __call__(self, **inputs: Any) -> dict[str, Any]:
        """Run the model with inputs as keyword arguments."""
        return self.run(inputs)

    def bind(
        self, inputs: Arrays, outputs: Arrays | None = None, threads: int | None = None, graph: bool = False
    ) -> Callable[[], dict[str, Any]]:
        """Return a function that runs the model on these arrays, which are checked here only.

        Each call reads the current contents of the arrays. Calls from several threads are as safe as the arrays are.

        Args:
            inputs: Arrays by input name. They must be contiguous. They may be read-only, except for donated ones.
            outputs: Arrays by output name that results are written to. They must be contiguous and writable.
            threads: Number of threads of a call, as for `run`.
            graph: For models on GPUs: the first call becomes a CUDA graph, which all later calls launch. That takes one
                call of the driver instead of one for each kernel. The outputs are then the same arrays in every call.

        Returns:
            A function that returns what `run` returns, with the arrays in `outputs` in place of new ones.

        Raises:
            InputError: An array does not fit. With `graph`, also if sizes or kernels depend on array contents that the
                host reads; then it is raised here or by the first call.
        """
        return bind_arrays(self._executor, inputs, outputs, threads=threads, graph=graph)

    def decoder(self, ids: str = "", mask: str = "", positions: str = "", fixed: Arrays | None = None) -> Decoder:
        """Return a decoder that owns the caches of this model, which was compiled with static_cache.

        Args:
            ids: The input of token ids, int [B, S], or of embeddings, float [B, S, H]. "" finds it by its use. Other
                inputs of that form are values of tokens, too.
            mask: The input of the attention mask, [B, P + S]; "" finds it likewise.
            positions: The input of positions, [B, S]; "" finds it likewise.
            fixed: Arrays for all other inputs, equal in every call, and for those of the setup, which runs here; or all
                outputs of the setup. Each has a row for one sequence, or for a group of adjacent ones. An input
                `source_lengths`, int64 [B], may limit the rows of each source; all rows count without it.

        Raises:
            InputError: The model lacks caches or a named input, or has an input that is none of these.
        """
        return Decoder(self, ids, mask, positions, fixed or {})

    def save(self, folder: str | Path, sign_key: SigningKey | None = None) -> None:
        """Write the artifact to `folder` atomically, even if its original folder has changed.

        Args:
            folder: The folder to write or replace.
            sign_key: Private half of an Ed25519 key: a PEM file, its 32 bytes, or a key of the package `cryptography`.
                It signs the artifact for `load(verify_key=)`. Without a key an existing signature remains.

        Raises:
            ArtifactError: The files were written to since the load, `folder` has other content or cannot be written, or
                this model is a setup.
        """
        if self.manifest.part != MODEL:
            raise ArtifactError("artifact.part_not_standalone", "a setup is part of its decoder: save the decoder.")
        signature = None if sign_key is None else sign(self._files.read(FILE), sign_key)
        with replace_folder(Path(folder)) as new:
            copy_artifact(self._files, self.manifest, new, signature)

    def __copy__(self) -> Model:
        """Return the model itself, which is immutable."""
        return self

    def __deepcopy__(self, memo: Any) -> Model:
        return self

    def __reduce__(self) -> tuple[Callable[..., Model], tuple[Any, ...]]:
        """Pickle all files of the artifact for another process.

        Raises ArtifactError as `save` does.
        """
        if self.manifest.part != MODEL:
            raise ArtifactError("artifact.part_not_standalone", "a setup is part of its decoder: pickle the decoder.")
        return unpack_model, (pack_model(self._files, self.manifest), self._threads, self.gpu.number if self.gpu else 0)

    def to_numpy(self, name: str, array: Any) -> np.ndarray:
        """Return an output as a NumPy array, copied and waited for if it is in a GPU's memory."""
        if self.gpu is None:
            return array
        port = next(port for port in self._executor.outputs if port.name == name)
        return port.deliver(self.gpu.to_host(array), np.from_dlpack, StringTable(self.manifest.strings))

    def wait(self) -> None:
        """Wait until a GPU has finished all calls."""
        if self.gpu is not None:
            self.gpu.wait()

    @contextmanager
    def instrumented(self, instrument: Instrument) -> Iterator[None]:
        """Report each kernel of calls from this thread to `instrument` in the block.

        No other thread may run the model meanwhile.
        """
        with self._executor.use_instrument(instrument):
            yield

    def function(self, name: str) -> tvm_ffi.Function:
        """Return a compiled function by name, for tools."""
        return self._library.function(name)

    def holds(self, tensor: Tensor) -> bool:
        """Return whether a tensor that is an argument of a kernel is a weight."""
        return self._weights.contains(tensor.data_ptr())
