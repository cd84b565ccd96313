"""Inputs that a model rejects: each refusal names the input, the requirement and the actual value."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tvm import relax

import lowering
from lowering.errors import InputError
from lowering.manifest import SlotCaches
from tests.runtime import modules
from tests.support.error_codes import raises

Load = Callable[..., lowering.Model]
ONES = np.ones((2, 3), "f")

REFUSED: list[tuple[dict[str, Any], str]] = [
    ({"x": ONES}, r"input 'y' is missing; the model takes y: float32\[n, m\]\."),
    ({"x": ONES, "z": ONES}, r"there is no input 'z'\. The inputs are x, y"),
    ({"x": ONES, "y": None}, r"input 'y' is missing"),
    ({"x": ONES, "y": ONES, "z": ONES}, r"there is no input 'z'\. The inputs are x, y\."),
    ({"x": ONES, "y": [[1.0]]}, r"input 'y' is a list; pass a NumPy array, or any array with __dlpack__ and dtype\."),
    ({"x": ONES.astype("d"), "y": ONES}, r"input 'x' must be float32, not float64\. Convert it with astype\."),
    ({"x": ONES.astype(">f4"), "y": ONES}, r"input 'x' must be float32, not >f4\."),
    ({"x": ONES[0], "y": ONES}, r"input 'x' must have 2 dimensions, \[n, m\], not 1: its shape is \[3\]\."),
    (
        {"x": ONES, "y": ONES[:1]},
        r"dimension 'n' is 1 in input 'y' \(axis 0\) but 2 in input 'x'; sizes of one name must be equal\.",
    ),
]


@pytest.mark.parametrize(("inputs", "message"), REFUSED)
def test_inputs(model: Load, inputs: dict[str, Any], message: str) -> None:
    module = model("addition")
    for refuse in (module.run, module.bind):
        with pytest.raises(InputError, match=message):
            refuse(inputs)
    # Not either when right shapes were seen before.
    module.run({"x": ONES, "y": ONES})
    with pytest.raises(InputError, match=message):
        module.run(inputs)


def test_graphs_are_for_gpus(model: Load) -> None:
    with raises("cuda_graph.gpu_required"):
        model("addition").bind({"x": ONES, "y": ONES}, graph=True)


def test_static_sizes(model: Load) -> None:
    with raises("input.size_mismatch"):
        model("dense").run({"x": np.ones((2, 63), "f")})


def test_ranges(tmp_path: Path) -> None:
    module = lowering.load(modules.addition(tmp_path / "m", shape=("n",), ranges={"n": (1, 8)}))
    assert module.run({"x": np.ones(8, "f"), "y": np.ones(8, "f")})["z"].sum() == 16
    for size, refuse in itertools.product((0, 9), (module.run, module.bind)):
        with raises("input.dimension_out_of_range"):
            refuse({"x": np.ones(size, "f"), "y": np.ones(size, "f")})


@pytest.mark.parametrize("threads", [0, -1, 1.5, "2", 1025, 2**40])
def test_threads(model: Load, artifact: Callable[..., Path], threads: Any) -> None:
    message = "threads must be a whole number from 1 to 1024, not"
    with pytest.raises(InputError, match=message):
        model("addition").run({"x": ONES, "y": ONES}, threads=threads)
    with pytest.raises(InputError, match=message):
        model("addition").bind({"x": ONES, "y": ONES}, threads=threads)
    with pytest.raises(InputError, match=message):
        lowering.load(artifact("addition"), threads=threads)


def test_numpy_integers_are_numbers(model: Load, artifact: Callable[..., Path]) -> None:
    for two in (np.int64(2), np.uint8(2), np.array(2)):
        assert (model("addition").run({"x": ONES, "y": ONES}, threads=two)["z"] == 2).all()  # type: ignore[arg-type]
        assert (model("addition").bind({"x": ONES, "y": ONES}, threads=two)()["z"] == 2).all()  # type: ignore[arg-type]
        lowering.load(artifact("addition"), threads=two, device=np.int32(0))  # type: ignore[arg-type]
    for device in (-1, 1.0, 2**31):
        with raises("argument.integer_invalid"):
            lowering.load(artifact("addition"), device=device)  # type: ignore[arg-type]


def test_masked_arrays(model: Load) -> None:
    """A masked array would lose its mask; other subclasses of NumPy's arrays have the values in their memory."""
    module = model("addition")
    for masked in (np.ma.masked_equal(ONES, 1), np.ma.array(ONES)):
        for refuse in (module.run, module.bind):
            with raises("input.masked_array"):
                refuse({"x": masked, "y": ONES})
    with raises("input.masked_array"):
        module.bind({"x": ONES, "y": ONES}, {"z": np.ma.array(ONES.copy())})


def test_subclasses_of_arrays(model: Load, tmp_path: Path) -> None:
    class Odd(np.ndarray):
        def __getitem__(self, key: Any) -> Any:
            raise TypeError

    x = np.arange(6, dtype="f").reshape(2, 3)
    mapped = np.memmap(tmp_path / "x", "f", "w+", shape=(2, 3))
    mapped[:] = x
    for other in (np.matrix(x), x.view(Odd), mapped, np.matrix(x.T).T, x.T.copy().view(Odd).T):
        assert (model("addition").run({"x": other, "y": ONES})["z"] == x + 1).all()
    pairs = np.matrix([[1 + 2j, 3j, 4]] * 2)
    assert (model("move", "complex128", "uint64").run({"x": pairs})["y"] == np.asarray(pairs)[:, ::-1]).all()


def test_strings_are_nothing_else(tmp_path: Path) -> None:
    spec = modules.spec("x", "string", "n", storage="int32")
    module = lowering.load(modules.build(tmp_path / "m", [spec], [spec], lambda b, i, w: i))
    for other in (b"bytes", None, 5):
        with raises("input.element_type_unsupported"):
            module.run({"x": np.array(["a", other], object)})
    assert module.run({"x": np.array([np.str_("a")], object)})["x"].tolist() == ["a"]


def test_bound_arrays(model: Load) -> None:
    module = model("addition")
    inputs = {"x": ONES, "y": ONES}
    with raises("input.copy_required"):
        module.bind({"x": np.ones((3, 2), "f").T, "y": ONES})
    with raises("output.name_unknown"):
        module.bind(inputs, {"x": ONES.copy()})
    with raises("input.dtype_mismatch"):
        module.bind(inputs, {"z": np.ones((2, 3))})
    with raises("input.dimension_mismatch"):
        module.bind(inputs, {"z": np.ones((2, 4), "f")})
    with raises("input.copy_required"):
        module.bind(inputs, {"z": np.ones((3, 2), "f").T})
    frozen = ONES.copy()
    frozen.flags.writeable = False
    with raises("input.read_only"):
        module.bind(inputs, {"z": frozen})


def test_sizes_that_do_not_fit_together_inside(model: Load) -> None:
    """A check that only the compiled code can do is an InputError too, and the model runs on."""
    module = model("inside")
    for _ in range(2):
        with raises("run.check_failed"):
            module.run({"x": np.ones(3, "f"), "y": np.ones(4, "f")})
        assert (module.run({"x": np.ones(3, "f"), "y": np.ones(3, "f")})["z"] == 2).all()


def test_bound_lengths_are_those_that_are_read(tmp_path: Path) -> None:
    """The room in slot caches is that of the bound arrays, whatever happens to the caller's dictionary."""
    specs = [modules.spec("x", "int64", "t"), modules.spec("n", "int64")]
    slots = SlotCaches(4, "n", ("x", 0), {}, None)
    out = [modules.spec("y", "int64", "t")]
    folder = modules.build(tmp_path / "m", specs, out, lambda b, i, w: [b.emit(relax.op.add(*i))], slots=slots)
    length, x = np.array(2, "int64"), np.zeros(2, "int64")
    inputs = {"x": x, "n": length}
    call = lowering.load(folder).bind(inputs)
    assert call()["y"].tolist() == [2, 2]
    length[()] = 3
    inputs["n"], inputs["x"] = np.array(0, "int64"), np.zeros(1, "int64")
    x.shape = (1, 2)
    for change in (inputs.clear, lambda: length.setfield(0, "int32")):
        with raises("static_cache.capacity_exceeded"):
            call()
        change()
    length[()] = 1
    assert call()["y"].tolist() == [1, 1]


def test_results_that_do_not_fit_the_bound_array(tmp_path: Path) -> None:
    """The size of a data-dependent output exists only after the call."""
    x_spec = modules.spec("x", "int64", 4)

    def body(builder: relax.BlockBuilder, inputs: list, weights: list) -> list:
        return [builder.emit(relax.op.unique(inputs[0], sorted=True))]

    module = lowering.load(modules.build(tmp_path / "m", [x_spec], [modules.spec("y", "int64", "found")], body))
    x, y = np.array([1, 2, 2, 1]), np.zeros(2, "int64")
    call = module.bind({"x": x}, {"y": y})
    assert call()["y"].tolist() == [1, 2]
    x[0] = 7
    with raises("output.shape_mismatch"):
        call()


@pytest.mark.parametrize(
    "error", [KeyError, AttributeError, MemoryError, OSError, AssertionError, ZeroDivisionError, RecursionError]
)
def test_arrays_whose_own_code_fails(error: type[Exception], model: Load) -> None:
    class Broken:
        __module__ = "numpy"  # to which outputs would go
        dtype, shape = np.dtype("float32"), (2, 3)

        def __dlpack__(self, **options: Any) -> Any:
            raise error("broken")

        def __dlpack_device__(self) -> tuple[int, int]:
            return 1, 0

    module = model("addition")
    for refuse in (module.run, module.bind):
        with raises("input.dlpack_failed"):
            refuse({"x": Broken(), "y": ONES})


def test_outputs_that_are_no_mapping(model: Load) -> None:
    with raises("output.mapping_required"):
        model("addition").bind({"x": ONES, "y": ONES}, [1])  # type: ignore[arg-type]
