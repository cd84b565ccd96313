"""Arrays in, arrays out: kinds, element types, memory."""

from __future__ import annotations

import ctypes
import gc
import sys
from collections.abc import Callable

import array_api_strict as xp
import ml_dtypes
import numpy as np
import pytest
from tvm import relax

import lowering
from lowering.errors import InputError
from tests.runtime import modules
from tests.support.error_codes import raises

# Two libraries' dtypes with one hash meet in a dictionary.
pytestmark = pytest.mark.filterwarnings("ignore:You are comparing a array_api_strict dtype")

Load = Callable[..., lowering.Model]

# Name, storage type.
TYPES = [
    *((t, t) for t in ("float16", "float32", "float64", "bool", "int8", "int16", "int32", "int64")),
    *((t, t) for t in ("uint8", "uint16", "uint32", "uint64", "bfloat16")),
    *((f"float8_{t}", "uint8") for t in ("e4m3fn", "e4m3fnuz", "e5m2", "e5m2fnuz", "e8m0fnu")),
    *(("int2", "int8"), ("uint2", "uint8"), ("int4", "int8"), ("uint4", "uint8"), ("float4_e2m1fn", "uint8")),
    *(("complex64", "uint64"), ("complex128", "uint64")),
]


def random(dtype: str, shape: tuple[int, ...]) -> np.ndarray:
    numbers = np.random.default_rng(0).integers(0, 7, shape)
    return (numbers + 1j * numbers if dtype.startswith("complex") else numbers).astype(dtype)


def same(a: np.ndarray, b: np.ndarray) -> bool:
    return a.dtype == b.dtype and a.shape == b.shape and a.tobytes() == b.tobytes()


@pytest.mark.parametrize(("dtype", "storage"), TYPES)
def test_every_element_type(model: Load, dtype: str, storage: str) -> None:
    module = model("move", dtype, storage)
    x = random(dtype, (4, 3))
    assert same(module.run({"x": x})["y"], x[:, ::-1])
    # Read-only, strided, empty; x must stay as it is.
    frozen = x.copy()
    frozen.flags.writeable = False
    assert same(module.run({"x": frozen})["y"], x[:, ::-1])
    assert same(module.run({"x": x[::2, ::-1]})["y"], x[::2])
    assert same(module.run({"x": np.asfortranarray(x)})["y"], x[:, ::-1])
    assert same(module.run({"x": x[:0]})["y"], x[:0])
    assert same(x, frozen)


def test_strings(tmp_path: modules.Path) -> None:
    folder = modules.build(
        tmp_path / "m",
        [modules.spec("x", "string", "n", storage="int32")],
        [modules.spec("y", "string", "n", storage="int32"), modules.spec("c", "string", storage="int32")],
        lambda b, i, w: [b.emit(relax.op.maximum(i[0], relax.const(0, "int32"))), b.emit(relax.const(1, "int32"))],
        strings=("zero", "one"),
    )
    module = lowering.load(folder)
    for x in (np.array(["new", "one", "new", "zero"], object), np.array(["a", "b"]), np.array([], object)):
        outputs = module.run({"x": x})
        assert outputs["y"].dtype == object and outputs["y"].tolist() == x.tolist()
        assert outputs["c"].shape == () and outputs["c"].item() == "one"
    with raises("input.dtype_mismatch"):
        module.run({"x": np.zeros(2)})
    with raises("input.copy_required"):
        module.bind({"x": np.array(["a"], object)})


def test_run_call_and_symbolic_sizes(model: Load) -> None:
    module = model("addition")
    assert str(module) == "Model(x: float32[n, m], y: float32[n, m] -> z: float32[n, m])"
    for n, m in ((3, 5), (1, 1), (3, 5), (64, 33), (0, 4), (4, 0)):
        x, y = np.random.default_rng(n).standard_normal((2, n, m)).astype("f")
        np.testing.assert_array_equal(module.run({"y": y, "x": x})["z"], x + y)
        np.testing.assert_array_equal(module(x=x, y=y)["z"], x + y)


def test_scalars_of_numpy_are_arrays(model: Load) -> None:
    z = model("addition", "float64", ()).run({"x": np.float64(2.5), "y": np.array(1.0)})["z"]
    assert isinstance(z, np.ndarray) and z.shape == () and z == 3.5


def address(array: np.ndarray) -> int:
    return array.__array_interface__["data"][0]


@pytest.mark.parametrize(("dtype", "storage"), [("float32", "float32"), ("bfloat16", "bfloat16"), ("int4", "int8")])
def test_contiguous_inputs_are_used_in_place(model: Load, dtype: str, storage: str) -> None:
    """Whatever their alignment, writable or not; strided ones are copied."""
    module = model("addresses", dtype, storage)
    for offset in range(4):
        x = np.zeros(100, dtype)[offset : offset + 40].reshape(5, 8)
        assert module.run({"x": x})["at"] == address(x)
        assert module.bind({"x": x})()["at"] == address(x)
        x.flags.writeable = False
        assert module.run({"x": x})["at"] == address(x)
        assert module.bind({"x": x})()["at"] == address(x)
        assert module.run({"x": x.T})["at"] != address(x)


def test_misaligned_elements_are_copied(model: Load) -> None:
    x = np.frombuffer(bytes(4 * 6 + 1), "f", 6, offset=1).reshape(2, 3)
    assert model("addresses").run({"x": x})["at"] % 4 == 0


def test_outputs_own_their_memory(artifact: Callable) -> None:
    module = lowering.load(artifact("addition"))
    x = np.ones((200, 300), "f")
    z = module.run({"x": x, "y": x})["z"]
    again = module.run({"x": z, "y": z})["z"]
    assert z.flags.writeable
    z[:] = 7
    del module
    gc.collect()
    assert (again == 4).all() and (x == 1).all()


def test_shared_memory_is_given_back_as_copies(model: Load) -> None:
    """An input, a weight, a constant, or one value as several outputs: writing to an output changes nothing else."""
    module = model("shared")
    x = np.full(4, 5, "f")
    first = module.run({"x": x})
    for array in first.values():
        array += 100
    assert (x == 5).all() and (first["y"] == 95).all() and (first["again"] == 95).all()
    second = {name: array.tolist() for name, array in module.run({"x": x}).items()}
    expected = {"same": [5] * 4, "w": [0, 1, 2, 3], "y": [-5] * 4, "again": [-5] * 4, "constant": [9] * 4}
    assert second == expected


def test_weights_are_not_written_to(model: Load, artifact: Callable) -> None:
    module = model("dense")
    before = (artifact("dense") / "weights.bin").read_bytes()
    x = np.ones((2, 64), "f")
    w = np.frombuffer(before, "f", 64 * 32).reshape(64, 32)
    b = np.frombuffer(before, "f", 32, module.manifest.weights[1].offset)
    np.testing.assert_allclose(module.run({"x": x})["y"], np.maximum(x @ w + b, 0), rtol=1e-5)
    assert (artifact("dense") / "weights.bin").read_bytes() == before


def test_bind(model: Load) -> None:
    module = model("addition")
    x, y = np.ones((4, 8), "f"), np.ones((4, 8), "f")
    y.flags.writeable = False
    call = module.bind({"x": x, "y": y})
    first = call()["z"]
    x[:] = 5
    second = call()["z"]
    assert (first == 2).all() and (second == 6).all()

    out = np.zeros((4, 8), "f")
    call = module.bind({"x": x, "y": y}, {"z": out})
    assert call()["z"] is out and (out == 6).all()
    # The result may go where an input came from: x = x + y, again and again.
    call = module.bind({"x": x, "y": y}, {"z": x}, threads=1)
    call(), call()
    assert (x == 7).all()


def test_save(model: Load, tmp_path: modules.Path) -> None:
    module = model("dense")
    module.save(tmp_path / "copy")
    x = np.ones((1, 64), "f")
    np.testing.assert_array_equal(lowering.load(tmp_path / "copy").run({"x": x})["y"], module.run({"x": x})["y"])


class TestAnotherLibrary:
    """array-api-strict has arrays that are not NumPy's and know DLPack, and nothing else."""

    @pytest.mark.parametrize("dtype", ["float32", "bool", "int64", "uint8", "complex64"])
    def test_in_kind(self, model: Load, dtype: str) -> None:
        x = np.arange(12).reshape(4, 3).astype(dtype)
        y = model("move", dtype, dict(TYPES)[dtype]).run({"x": xp.asarray(x)})["y"]
        assert isinstance(y, type(xp.asarray(x))) and same(np.asarray(y), x[:, ::-1])

    def test_mixed_with_numpy(self, model: Load) -> None:
        x = np.ones((2, 3), "f")
        assert isinstance(model("addition").run({"x": x, "y": xp.asarray(x)})["z"], type(xp.asarray(x)))

    def test_refusals(self, model: Load) -> None:
        module, x = model("addition"), np.ones((2, 3), "f")
        with raises("input.dtype_mismatch"):
            module.run({"x": x, "y": xp.ones((2, 3), dtype=xp.float64)})
        with raises("input.dimension_mismatch"):
            module.run({"x": x, "y": xp.ones((2, 4), dtype=xp.float32)})


@pytest.mark.slow
class TestTorch:
    """Needs torch, which is not among the packages of the tests."""

    @pytest.fixture(autouse=True)
    def _torch(self) -> None:
        self.torch = pytest.importorskip("torch")

    @pytest.mark.parametrize(
        "dtype", ["float32", "bool", "int64", "bfloat16", "float8_e4m3fn", "complex64", "complex128"]
    )
    def test_torch_in_torch_out(self, model: Load, dtype: str) -> None:
        torch = self.torch
        module = model("move", dtype, dict(TYPES)[dtype])
        x = torch.arange(12).reshape(4, 3).to(getattr(torch, dtype))
        y = module.run({"x": x})["y"]
        assert y.dtype == x.dtype and torch.equal(y.to(torch.complex128), x.to(torch.complex128).flip(1))
        strided = module.run({"x": x.T.contiguous().T})["y"]
        assert strided.dtype == x.dtype and torch.equal(strided.to(torch.complex128), y.to(torch.complex128))
        assert module.run({"x": x[:0]})["y"].shape == (0, 3)

    def test_lazy_bits(self, model: Load) -> None:
        """Tensors whose memory contains the negated or conjugated values."""
        torch = self.torch
        x = torch.complex(torch.arange(6.0).reshape(2, 3), torch.arange(1.0, 7.0).reshape(2, 3))
        negative = x.conj().imag
        assert negative.is_neg() and x.conj().is_conj()
        z = model("addition").run({"x": negative, "y": torch.zeros(2, 3)})["z"]
        assert torch.equal(z, -torch.arange(1.0, 7.0).reshape(2, 3))
        y = model("move", "complex64", "uint64").run({"x": x.conj()})["y"]
        assert torch.equal(y, x.conj().resolve_conj().flip(1))
        contiguous = torch._neg_view(torch.ones(2, 3))
        assert contiguous.is_neg() and contiguous.is_contiguous()
        with pytest.raises(InputError, match="input 'x' has its negative or conjugate bit set, but a bound call reads"):
            model("addition").bind({"x": contiguous, "y": torch.zeros(2, 3)})
        past = torch._neg_view(torch.zeros(2, 3, 4))
        inputs = {"new": np.ones((2, 4), "f"), "index": np.zeros(2, "int64")}
        with pytest.raises(InputError, match="input 'past' has its negative or conjugate bit set, but it is donated"):
            model("cache").run({"past": past, **inputs})

    def test_tensors_without_memory(self, model: Load) -> None:
        torch, x = self.torch, self.torch.ones(2, 3)
        with torch._subclasses.FakeTensorMode():
            fake = torch.ones(2, 3)
        message = r"input 'x' (cannot be read|is a \w+ that has no memory|is a \w+, which computes)"
        for odd in (x.to_sparse(), x.to_mkldnn(), torch._efficientzerotensor((2, 3)), fake, x.to("meta")):
            with pytest.raises(InputError, match=message) as caught:
                model("addition").run({"x": odd, "y": x})
            assert "\n" not in str(caught.value)
        masked = torch.masked.masked_tensor(x, x > 2)
        with pytest.raises(InputError, match="input 'x' is a MaskedTensor, which computes what it holds"):
            model("addition").run({"x": masked, "y": x})
        assert (model("addition").run({"x": torch.nn.Parameter(x), "y": x})["z"] == 2).all()

    def test_bytes_for_types_torch_lacks(self, model: Load) -> None:
        x = self.torch.arange(6, dtype=self.torch.int8).reshape(2, 3)
        assert self.torch.equal(model("move", "int4", "int8").run({"x": x})["y"], x.flip(1))

    def test_mixed_with_numpy(self, model: Load) -> None:
        x, y = np.ones((2, 3), "f"), self.torch.ones(2, 3)
        assert isinstance(model("addition").run({"x": x, "y": y})["z"], self.torch.Tensor)

    def test_refusals(self, model: Load) -> None:
        torch, module, x = self.torch, model("addition"), np.ones((2, 3), "f")
        with pytest.raises(InputError, match=r"input 'y' must be float32, not float64"):
            module.run({"x": x, "y": torch.ones(2, 3, dtype=torch.float64)})
        with pytest.raises(InputError, match=r"dimension 'm' is 4 in input 'y' \(axis 1\) but 3 in input 'x'"):
            module.run({"x": x, "y": torch.ones(2, 4)})
        with pytest.raises(InputError, match=r"input 'y' cannot be read through DLPack: "):
            module.run({"x": x, "y": torch.ones(2, 3, device="meta")})


class Foreign:
    """An array of a library that knows DLPack but no from_dlpack."""

    __module__ = "foreign_library"

    def __init__(self, array: np.ndarray) -> None:
        self._array = array
        self.dtype, self.shape = array.dtype, array.shape

    def __dlpack__(self, **options: object) -> object:
        return self._array.__dlpack__(**options)

    def __dlpack_device__(self) -> tuple[int, int]:
        return self._array.__dlpack_device__()


class OnDevice(Foreign):
    """Says that its memory is a CUDA device's."""

    __module__ = "foreign_library"

    def __dlpack__(self, **options: object) -> object:
        capsule = self._array.__dlpack__()
        pointer = ctypes.PYFUNCTYPE(ctypes.c_void_p, ctypes.py_object, ctypes.c_char_p)(
            ("PyCapsule_GetPointer", ctypes.pythonapi)
        )
        # DLTensor: data, device type (2 is CUDA), ...
        ctypes.c_int32.from_address(pointer(capsule, b"dltensor") + 8).value = 2
        return capsule


def test_arrays_elsewhere_are_refused(model: Load, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, Foreign.__module__, np)
    x = np.ones((2, 3), "f")
    with raises("input.device_mismatch"):
        model("addition").run({"x": x, "y": OnDevice(x)})


def test_arrays_without_a_way_back_are_refused(model: Load) -> None:
    x = np.ones((2, 3), "f")
    with raises("output.library_unsupported"):
        model("addition").run({"x": x, "y": Foreign(x)})


def test_read_only_arrays_of_other_libraries(model: Load, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, Foreign.__module__, np)
    x = np.ones((2, 3), "f")
    x.flags.writeable = False
    assert (model("addition").run({"x": Foreign(x), "y": Foreign(x)})["z"] == 2).all()
    past = np.zeros((2, 3, 4), "f")
    past.flags.writeable = False
    inputs = {"new": np.ones((2, 4), "f"), "index": np.zeros(2, "int64")}
    with raises("input.read_only"):
        model("cache").run({"past": Foreign(past), **inputs})


def test_types_are_spelled_as_ml_dtypes_does() -> None:
    for name, _ in TYPES:
        assert np.dtype(getattr(ml_dtypes, name, name)).name == name
