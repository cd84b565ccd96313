"""Symbolic sizes that the user fixes, and declared ones that say nothing."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import onnx
import onnx_ir as ir
import pytest

import lowering
from lowering.commands.cli import main
from tests.support.error_codes import raises

# Doubled where the batch is 1.
BRANCHES = """<ir_version: 10, opset_import: ["" : 21]>
g (float[batch, tokens] x) => (float[batch, tokens] y) {
    s = Shape<start=0, end=1>(x) one = Constant<value_ints=[1]>() e = Equal(s, one) c = Squeeze(e)
    y = If(c) <
        then_branch = then () => (float[batch, tokens] a) { a = Add(x, x) },
        else_branch = other () => (float[batch, tokens] b) { b = Identity(x) }
    >
}"""

X = np.arange(6, dtype=np.float32)


def branches() -> onnx.ModelProto:
    return onnx.parser.parse_model(BRANCHES)


def test_a_fixed_size_is_a_number_and_decides_branches() -> None:
    model = ir.from_proto(branches())
    compiled = lowering.compile(model, dims={"batch": 1, "tokens": (1, 6)})
    assert compiled.manifest.inputs[0].dims == compiled.manifest.outputs[0].dims == (1, "tokens")
    assert compiled.manifest.ranges == {"batch": (1, 1), "tokens": (1, 6)}
    assert len(compiled.manifest.calls) == 1
    np.testing.assert_array_equal(compiled.run({"x": X[None]})["y"], X[None] * 2)
    with raises("input.size_mismatch"):
        compiled.run({"x": X.reshape(2, 3)})
    dims = [str(dim) for dim in model.graph.inputs[0].shape or ()]
    assert dims == ["batch", "tokens"], "the caller's model stays"


def test_equal_bounds_are_a_number() -> None:
    compiled = lowering.compile(branches(), dims={"batch": (1, 1)})
    assert compiled.manifest.inputs[0].dims == (1, "tokens")
    assert compiled.manifest.ranges == {"batch": (1, 1)}


def test_a_fixed_size_keeps_its_name(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A declaration that repeats a size changes nothing; another size makes another model."""
    compiled = lowering.compile(branches(), dims={"batch": 2})
    compiled.save(tmp_path / "out")
    bench, inspect = (["bench", str(tmp_path / "out"), "--seconds", "0"], ["inspect", str(tmp_path / "out")])
    assert main([*bench, "--dim", "tokens=3", "--dim", "batch=2"]) == 0
    assert main([*inspect, "--html", str(tmp_path / "page.html"), "--dim", "batch=2"]) == 0
    assert main(inspect) == 0 and "Legal sizes: batch: 2\n" in capsys.readouterr().out
    text = r"dimension 'batch' was compiled with the static size 2, and 1 was given: .* --dim batch=1\."
    with pytest.raises(lowering.InputError, match=text):
        lowering.bench(compiled, {"tokens": 3, "batch": 1})
    with pytest.raises(lowering.InputError, match=text):
        lowering.verify(branches(), sizes={"batch": 1}, artifact=compiled)
    assert main([*inspect, "--html", str(tmp_path / "page.html"), "--dim", "batch=1"]) == 1
    with raises("dims.name_unknown"):
        lowering.bench(compiled, {"tokens": 3, "bach": 2})


def test_other_sizes_take_the_other_branch() -> None:
    compiled = lowering.compile(branches(), dims={"batch": np.int64(2)})  # type: ignore[dict-item]
    np.testing.assert_array_equal(compiled.run({"x": X.reshape(2, 3)})["y"], X.reshape(2, 3))
    free = lowering.compile(branches())
    for batch in (1, 2):
        x = X.reshape(batch, -1)
        np.testing.assert_array_equal(free.run({"x": x})["y"], x * (3 - batch))


def test_a_model_that_needs_a_number_can_be_given_one() -> None:
    model = onnx.parser.parse_model(
        """<ir_version: 10, opset_import: ["" : 23]>
        g (float[B, H, S, 8] q, float[B, H, S, 8] k) => (float[B, H, S, 8] y) { y = Attention(q, k, k) }"""
    )
    assert not lowering.check(model).ok
    assert lowering.check(model, dims={"H": 2}).ok
    q = np.ones((1, 2, 3, 8), np.float32)
    np.testing.assert_allclose(lowering.compile(model, dims={"H": 2}).run({"q": q, "k": q})["y"], q)


@pytest.mark.parametrize("dims", [{"bach": 1}, {"bach": (1, 2)}])
def test_unknown_names_are_refused(dims: dict[str, int]) -> None:
    with raises("dims.name_unknown"):
        lowering.compile(branches(), dims=dims)


@pytest.mark.parametrize("size", [-1, 2**63, 1.5, "1"])
def test_no_sizes_are_refused(size: object) -> None:
    with raises("argument.integer_invalid"):
        lowering.compile(branches(), dims={"batch": size})  # type: ignore[dict-item]


def test_on_the_command_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "m.onnx"
    onnx.save(branches(), path)
    command = ["compile", str(path), "-o", str(tmp_path / "out"), "--dim", "batch=1", "--dim", "tokens=1..6"]
    assert main(command) == 0
    assert "x: float32[1, 'tokens']" in capsys.readouterr().out.replace('"', "'").replace("(", "[").replace(")", "]")
    assert main(["check", str(path), "--dim", "batch=2"]) == 0


@pytest.mark.parametrize("unknown", [-1, "", "?", "None"])
def test_sizes_that_say_nothing(unknown: int | str) -> None:
    """As a name they would make both sizes equal."""
    model = onnx.parser.parse_model(
        """<ir_version: 10, opset_import: ["" : 21]>
        g (float[a, b] x) => (float[a, b] y) { t = Neg(x) y = Neg(t) }"""
    )
    for value in (*model.graph.input, *model.graph.output):
        for dim in value.type.tensor_type.shape.dim:
            if isinstance(unknown, int):
                dim.dim_value = unknown
            else:
                dim.dim_param = unknown
    x = X.reshape(2, 3)
    np.testing.assert_array_equal(lowering.compile(model).run({"x": x})["y"], x)


def test_dimensions_are_called_as_the_model_calls_them(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Names that are not identifiers, as exporters of other frameworks write them; two of them would become equal."""
    names = ["p2o.DynamicDimension.0", "p2o_DynamicDimension_0", 'a "b"']
    x, y = (onnx.helper.make_tensor_value_info(name, 1, names) for name in "xy")
    twice = onnx.helper.make_tensor_value_info("z", 1, [None, None, None])
    nodes = [onnx.helper.make_node("Relu", ["x"], ["y"]), onnx.helper.make_node("Concat", ["x", "x"], ["z"], axis=0)]
    opset = onnx.helper.make_opsetid("", 20)
    graph = onnx.helper.make_graph(nodes, "g", [x], [y, twice])
    proto = onnx.helper.make_model(graph, opset_imports=[opset], ir_version=10)
    model = lowering.compile(proto, dims={names[0]: (1, 5), names[2]: 3})
    assert model.manifest.inputs[0].dims == (names[0], names[1], 3)
    assert model.manifest.outputs[1].dims == (f"{names[0]} * 2", names[1], 3)
    with raises("input.dimension_out_of_range"):
        model.run({"x": np.zeros((7, 2, 3), np.float32)})
    lowering.compile(proto).save(tmp_path / "out")
    sizes = [f"--dim={name}={size}" for name, size in zip(names, (2, 3, 4))]
    assert main(["bench", str(tmp_path / "out"), "--seconds", "0", *sizes]) == 0
    assert main(["bench", str(tmp_path / "out"), "--seconds", "0", *sizes[1:]]) == 1
    assert "p2o.DynamicDimension.0" in capsys.readouterr().err
