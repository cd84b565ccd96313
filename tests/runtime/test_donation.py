"""Donated inputs are written in place, and only when all inputs are right."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any

import array_api_strict as xp
import numpy as np
import pytest
from tvm import relax

import lowering
from lowering.errors import InputError
from tests.runtime import modules
from tests.support.error_codes import raises

Load = Callable[..., lowering.Model]


def inputs(**changed: Any) -> dict[str, Any]:
    arrays = {"past": np.zeros((2, 5, 4), "f"), "new": np.ones((2, 4), "f"), "index": np.array([1, 3])}
    return {**arrays, **changed}


def test_the_update_is_in_place(model: Load) -> None:
    module = model("cache")
    arrays = inputs()
    outputs = module.run(arrays)
    assert outputs["present"] is arrays["past"]
    assert (outputs["total"] == 1).all()
    expected = np.zeros((2, 5, 4), "f")
    expected[0, 1] = expected[1, 3] = 1
    np.testing.assert_array_equal(arrays["past"], expected)

    call = module.bind(arrays)
    arrays["index"][:] = 4
    assert call()["present"] is arrays["past"]
    expected[:, 4] = 1
    np.testing.assert_array_equal(arrays["past"], expected)


def test_an_empty_donated_input_is_given_back(model: Load) -> None:
    arrays = inputs(past=np.zeros((0, 5, 4), "f"), new=np.ones((0, 4), "f"), index=np.zeros(0, "int64"))
    assert model("cache").run(arrays)["present"] is arrays["past"]


def test_arrays_of_another_library(model: Load) -> None:
    arrays = {name: xp.asarray(array) for name, array in inputs().items()}
    assert model("cache").run(arrays)["present"] is arrays["past"]
    assert xp.sum(arrays["past"]) == 8


def shared() -> tuple[np.ndarray, np.ndarray]:
    """Overlapping, not equal: past [2, 5, 4] and new [2, 4] that begins in the middle of it."""
    buffer = np.zeros(100, "f")
    return buffer[:40].reshape(2, 5, 4), buffer[36:44].reshape(2, 4)


def frozen(array: np.ndarray) -> np.ndarray:
    array.flags.writeable = False
    return array


PAST, NEW = shared()
REFUSED = [
    (
        {"past": frozen(np.zeros((2, 5, 4), "f"))},
        r"input 'past' is read-only, but it is donated: its memory becomes output 'present'\. Pass a writable array\.",
    ),
    ({"past": np.zeros((2, 4, 5), "f").swapaxes(1, 2)}, r"input 'past' is not C-contiguous, but it is donated"),
    (
        {"past": np.frombuffer(bytearray(161), "f", 40, offset=1).reshape(2, 5, 4)},
        r"input 'past' is not aligned to its elements, but it is donated",
    ),
    (
        {"past": PAST, "new": NEW},
        r"inputs 'past' and 'new' share memory, but 'past' is donated: its memory becomes output 'present'\.",
    ),
]


@pytest.mark.parametrize(("changed", "message"), REFUSED)
def test_refusals_leave_everything_as_it_was(model: Load, changed: dict[str, Any], message: str) -> None:
    arrays = inputs(**changed)
    before = {name: array.copy() for name, array in arrays.items()}
    for refuse in (model("cache").run, model("cache").bind):
        with pytest.raises(InputError, match=message):
            refuse(arrays)
    for name, array in arrays.items():
        np.testing.assert_array_equal(array, before[name])


@pytest.mark.parametrize("wrong", ["new", "index"])
def test_nothing_is_written_before_all_inputs_are_checked(model: Load, wrong: str) -> None:
    arrays = inputs()
    arrays[wrong] = arrays[wrong].astype("d")
    with raises("input.dtype_mismatch"):
        model("cache").run(arrays)
    assert not arrays["past"].any()


@pytest.fixture(scope="module")
def two(tmp_path_factory: pytest.TempPathFactory) -> lowering.Model:
    """p1 = p + x and q1 = q + x, in place."""

    def body(builder: relax.BlockBuilder, arrays: list, weights: list) -> list:
        function = builder.add_func(modules.add_in_place(8), "add_in_place")
        return [
            builder.emit(relax.op.call_tir_inplace(function, [cache, arrays[2]], [0], out_ty=cache.ty))
            for cache in arrays[:2]
        ]

    names = ["p", "q", "x"]
    specs, out = ([modules.spec(n, "float32", 8) for n in ns] for ns in (names, ["p1", "q1"]))
    folder = tmp_path_factory.mktemp("two") / "m"
    return lowering.load(modules.build(folder, specs, out, body, donated={"p": "p1", "q": "q1"}))


def test_two_donated_inputs(two: lowering.Model) -> None:
    buffer = np.arange(24, dtype="f")
    arrays = {"q": buffer[:8], "x": buffer[8:16], "p": buffer[16:]}
    expected = {"p1": arrays["p"] + arrays["x"], "q1": arrays["q"] + arrays["x"]}
    outputs = two.run(arrays)
    assert outputs["p1"] is arrays["p"] and outputs["q1"] is arrays["q"]
    for name, array in outputs.items():
        np.testing.assert_array_equal(array, expected[name])


@pytest.mark.parametrize(("p", "q", "x"), [(0, 0, 8), (0, 7, 16), (8, 0, 8), (16, 0, 15), (3, 20, 0), (20, 3, 0)])
def test_one_array_twice(two: lowering.Model, p: int, q: int, x: int) -> None:
    """At these offsets of one buffer the same array is donated twice, or donated and also passed as another input."""
    buffer = np.arange(40, dtype="f")
    with raises("donate.memory_shared"):
        two.run({"p": buffer[p : p + 8], "q": buffer[q : q + 8], "x": buffer[x : x + 8]})
    np.testing.assert_array_equal(buffer, np.arange(40))


def test_arrays_that_are_only_read_may_share_memory(model: Load) -> None:
    x = np.ones((2, 3), "f")
    assert (model("addition").run({"x": x, "y": x})["z"] == 2).all()


def test_a_model_does_not_keep_arrays_alive(model: Load) -> None:
    """Neither the caches of a finished generation nor outputs stay alive until the next call."""
    module = model("cache")
    arrays = inputs()
    gone = weakref.ref(arrays["past"])
    outputs = module.run(arrays)
    del arrays, outputs
    assert gone() is None


def bound(p1: np.ndarray, q1: np.ndarray, two: lowering.Model, arrays: dict[str, np.ndarray]) -> dict[str, Any]:
    return two.bind(arrays, {"p1": p1, "q1": q1})()


@pytest.mark.parametrize(("p1", "q1"), [(24, 24), (24, 31), (31, 24), (30, 26)])
def test_bound_outputs_that_share_memory(two: lowering.Model, p1: int, q1: int) -> None:
    buffer = np.arange(48, dtype="f")
    arrays = {"p": buffer[:8], "q": buffer[8:16], "x": buffer[16:24]}
    with raises("output.memory_shared"):
        bound(buffer[p1 : p1 + 8], buffer[q1 : q1 + 8], two, arrays)
    np.testing.assert_array_equal(buffer, np.arange(48))


@pytest.mark.parametrize(("p1", "q1"), [(8, 24), (24, 0), (15, 24), (24, 7), (1, 24)])
def test_outputs_bound_to_donated_memory(two: lowering.Model, p1: int, q1: int) -> None:
    """Memory of another output, or a range of the same memory."""
    buffer = np.arange(48, dtype="f")
    arrays = {"p": buffer[:8], "q": buffer[8:16], "x": buffer[16:24]}
    with raises("output.memory_shared"):
        bound(buffer[p1 : p1 + 8], buffer[q1 : q1 + 8], two, arrays)
    np.testing.assert_array_equal(buffer, np.arange(48))


def test_outputs_bound_to_their_own_inputs(two: lowering.Model) -> None:
    """The arrays that become them anyway, and one that is only read, as long as it was."""
    buffer = np.arange(24, dtype="f")
    arrays = {"p": buffer[:8], "q": buffer[8:16], "x": buffer[16:24]}
    expected = {"p1": arrays["p"] + arrays["x"], "q1": arrays["q"] + arrays["x"]}
    call = two.bind(arrays, {"p1": arrays["p"], "q1": arrays["x"]})
    outputs = call()
    assert outputs["p1"] is arrays["p"] and outputs["q1"] is arrays["x"]
    for name, array in outputs.items():
        np.testing.assert_array_equal(array, expected[name])


def test_an_input_that_is_an_output_and_has_another_bound_to_it(tmp_path: Path) -> None:
    def body(builder: relax.BlockBuilder, arrays: list, weights: list) -> list:
        return [builder.emit(relax.op.add(arrays[0], arrays[0])), arrays[0]]

    specs, out = ([modules.spec(n, "float32", 8) for n in ns] for ns in (["x"], ["double", "same"]))
    model = lowering.load(modules.build(tmp_path / "m", specs, out, body))
    x, same = np.arange(8, dtype="f"), np.zeros(8, "f")
    outputs = model.bind({"x": x}, {"double": x, "same": same})()
    np.testing.assert_array_equal(outputs["double"], 2 * np.arange(8))
    np.testing.assert_array_equal(outputs["same"], np.arange(8))


def test_nothing_is_written_before_all_shapes_are_checked(tmp_path: Path) -> None:
    def body(builder: relax.BlockBuilder, arrays: list, weights: list) -> list:
        return [builder.emit(relax.op.add(arrays[0], arrays[0])) for _ in range(2)]

    x, y, z = (modules.spec(name, "float32", size) for name, size in (("x", "n"), ("y", "n"), ("z", "m")))
    model = lowering.load(modules.build(tmp_path / "m", [x], [y, z], body))
    bound = np.zeros(8, "f")
    with raises("output.shape_mismatch"):
        model.bind({"x": np.ones(8, "f")}, {"y": bound, "z": np.zeros(7, "f")})()
    assert not bound.any()
