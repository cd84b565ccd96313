"""The cost of writing tensors as expressions is counted in queries, not in time."""

from __future__ import annotations

from typing import Any

import onnx
import pytest
from tvm import tirx
from tvm.ir import prim
from tvm.sym import Analyzer

from lowering.graph.loading.model import load_model
from lowering.importing.importer import import_model
from lowering.ops import lookup
from lowering.passes.graph.elements import ElementExpressions
from lowering.tensorir.expressions import is_float, walk
from lowering.tensorir.facts import Facts


def elements() -> ElementExpressions:
    return ElementExpressions(None, {}, {}, lambda *_: False)


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """Every condition that an analyzer is asked to prove."""
    conditions: list[Any] = []
    prove = Analyzer.can_prove

    def recorded(self: Analyzer, condition: Any, *rest: Any) -> bool:
        conditions.append(condition)
        return bool(prove(self, condition, *rest))

    monkeypatch.setattr(Analyzer, "can_prove", recorded)
    return conditions


def bucket(i: tirx.Var) -> Any:
    """A position by the logarithm of a distance, as relative positions have it."""
    return prim.Cast("int64", tirx.ceil(tirx.log(i.astype("float32")) * tirx.const(3.0, "float32")))


def test_proofs_do_not_look_into_floats(asked: list[Any]) -> None:
    """And prove what they proved: equal numbers stay equal, others are unknown, truth values of floats too."""
    i, j = tirx.Var("i", "int64"), tirx.Var("j", "int64")
    clipped = tirx.min(tirx.max(bucket(i) + 32, 0), 63)
    positive = prim.Select(i.astype("float32") < tirx.const(1.5, "float32"), tirx.const(1, "int64"), j * j + 1)
    facts = Facts()
    assert facts.can_prove(tirx.all(clipped >= 0, clipped < 64))
    assert facts.can_prove(bucket(i) - bucket(i) + 1 > 0)
    assert not facts.can_prove(bucket(i) <= bucket(j))
    assert not facts.can_prove(bucket(i) + 32 <= 63)
    assert not facts.can_prove(positive < 1)
    assert asked and not any(is_float(node) for condition in asked for node in walk(condition))


def test_minima_inside_each_other_are_decided_once(asked: list[Any]) -> None:
    depth = 12
    value: Any = tirx.Var("x", "int64")
    for k in range(depth):
        value = (tirx.max if k % 2 else tirx.min)(value * 2, tirx.Var(f"x{k}", "int64"))
    elements().simplify(value)
    assert 0 < len(asked) <= 2 * depth


def test_what_is_read_twice_is_written_out_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each node reads the one before three times: without what was found before, 3^3 times in all."""
    depth, steps = 3, ["a0 = Identity (x)"]
    for k in range(depth):
        steps.append(f"c{k} = Less (a{k}, zero) d{k} = Add (a{k}, a{k}) a{k + 1} = Where (c{k}, a{k}, d{k})")
    model = onnx.parser.parse_model(f"""<ir_version: 10, opset_import: ["" : 24]>
        g (int64[N] x) => (int64[N] a{depth}) {{ zero = Constant <value_int = 0> () {" ".join(steps)} }}""")
    mod = tirx_of(model)
    main = mod["main"]
    values = {binding.var: binding.value for block in main.body.blocks for binding in block.bindings}
    last = next(value for value in reversed(values) if len(value.ty.shape.values) == 1)
    calls = 0
    produced = ElementExpressions._produced

    def counted(self: ElementExpressions, *arguments: Any) -> Any:
        nonlocal calls
        calls += 1
        return produced(self, *arguments)

    monkeypatch.setattr(ElementExpressions, "_produced", counted)
    i = tirx.Var("i", "int64")
    ElementExpressions(mod, values, {i: last.ty.shape.values[0]}, lambda *_: False).read_element(last, [i])
    assert depth < calls <= 4 * depth


def tirx_of(model: onnx.ModelProto) -> Any:
    """The model as Relax whose operators are kernels."""
    from tvm import relax

    return relax.transform.LegalizeOps()(import_model(load_model(model), lookup).module)


def test_answers_follow_new_facts() -> None:
    """A query that came before a bound was recorded is asked anew."""
    facts, n = Facts(), tirx.Var("n", "int64")
    bounded = n < tirx.const(8, "int64")
    rest = tirx.floormod(n, tirx.const(8, "int64"))
    assert not facts.can_prove(bounded) and not facts.simplify(rest).same_as(n)
    facts.bind(n, 0, tirx.const(8, "int64"))
    assert facts.can_prove(bounded) and facts.simplify(rest).same_as(n)
