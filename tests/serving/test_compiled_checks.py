"""OpenPPL's operators, compiled, refuse tables that do not fit, by node, argument and request, and write nothing then.
With checks=False they accept them, and do not write foreign memory (tests/attacks)."""

from __future__ import annotations

import functools
import re
from collections.abc import Callable
from typing import Any, TypeAlias

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper

import lowering
from lowering.errors import InputError
from lowering.importing.checks import OPENPPL
from tests.serving.cache_attention import cache_attention_cases as cases
from tests.serving.cache_attention.test_cache_attention import is_equal_bitwise, make_model
from tests.support.error_codes import raises

Inputs: TypeAlias = "dict[str, np.ndarray]"
# The argument that the error must name, and the requests, one of which it must name; None: no room for the defect.
Blame: TypeAlias = "tuple[str, tuple[int, ...]] | None"
Defect: TypeAlias = Callable[[cases.Case, Inputs], Blame]

AXES = ("plkhd", "lpkhd", "lkphd", "lkhpd")  # of a cache, by its layout: p is the slot


# -- legal calls with one defect each ---------------------------------------------------------------------------------


def count_rows(inputs: Inputs) -> np.ndarray:
    return np.diff(inputs["seqstarts"])


def count_keys(inputs: Inputs) -> np.ndarray:
    return np.diff(inputs["kvstarts"])


def starts_elsewhere(name: str) -> Defect:
    def corrupt(case: cases.Case, inputs: Inputs) -> Blame:
        inputs[name][0] = 1
        return name, (0,)

    return corrupt


def starts_that_decrease(name: str) -> Defect:
    def corrupt(case: cases.Case, inputs: Inputs) -> Blame:
        if len(inputs[name]) < 3:
            return None
        inputs[name][1] = inputs[name][2] + 1
        return name, (1,)

    return corrupt


def other_totals(name: str) -> Defect:
    def corrupt(case: cases.Case, inputs: Inputs) -> Blame:
        inputs[name][-1] += 1
        return name, ()

    return corrupt


def decoding(count: int) -> Defect:
    def corrupt(case: cases.Case, inputs: Inputs) -> Blame:
        inputs["decoding_batches"][...] = count if count < 0 else len(count_rows(inputs)) + count
        return "decoding_batches", ()

    return corrupt


def few_mask_columns(case: cases.Case, inputs: Inputs) -> Blame:
    mask = inputs.get("attn_mask")
    total = int(inputs["kvstarts"][-1])
    if mask is None or mask.ndim < 2 or not mask.size or total < 2:
        return None
    inputs["attn_mask"] = np.ascontiguousarray(mask[..., : total - 1])
    return "attn_mask", ()


def negative_past(case: cases.Case, inputs: Inputs) -> Blame:
    inputs["start_pos"][-1] = -1
    return "start_pos", (len(count_rows(inputs)) - 1,)


def other_past(case: cases.Case, inputs: Inputs) -> Blame:
    inputs["start_pos"][0] += 1
    return "start_pos", (0,)


def endless_past(case: cases.Case, inputs: Inputs) -> Blame:
    """Set a past whose end, after the rows, overflows."""
    inputs["start_pos"][0] = 2**63 - 1
    return "start_pos", (0,)


def longer_than_the_cache(case: cases.Case, inputs: Inputs) -> Blame:
    more = 2**62
    inputs["start_pos"][-1] += more
    inputs["kvstarts"][-1] += more
    return "kvstarts", (len(count_rows(inputs)) - 1,)


def slots_outside(entry: int) -> Defect:
    def corrupt(case: cases.Case, inputs: Inputs) -> Blame:
        with_keys = np.flatnonzero(count_keys(inputs))
        if not len(with_keys):
            return None
        b = int(with_keys[-1])
        inputs["cachestarts"].reshape(len(count_keys(inputs)), -1)[b, 0] = entry
        return "cachestarts", (b,)

    return corrupt


def too_few_pages(case: cases.Case, inputs: Inputs) -> Blame:
    starts = inputs["cachestarts"]
    needed = -(-count_keys(inputs) // case.attribute("page_size"))
    if starts.ndim == 1 or needed.max() < 2:
        return None
    inputs["cachestarts"] = np.ascontiguousarray(starts[:, : needed.max() - 1])
    return "cachestarts", (int(np.argmax(needed)),)


def share_page(writes: bool) -> Defect:
    """Give a request the page of another's new token, to write to or to read only."""

    def corrupt(case: cases.Case, inputs: Inputs) -> Blame:
        rows, keys, past = count_rows(inputs), count_keys(inputs), inputs["start_pos"]
        page = case.attribute("page_size") if case.attribute("cache_mode") else int(keys.max()) + 1
        table = inputs["cachestarts"].reshape(len(keys), -1)
        for first_request in np.flatnonzero(rows):
            for second_request in range(len(keys)):
                at, last = int(past[first_request]) // page, int(keys[second_request]) - 1
                slot = table[first_request, at] + int(past[first_request]) % page
                column = last // page if writes else 0
                read = min(page, keys[second_request] - column * page)
                fits = rows[second_request] if writes else past[second_request] >= page and read > 0
                if first_request == second_request or not fits or slot - table[first_request, at] >= read:
                    continue
                # The slot is the last token's of the other's page, or any slot of it.
                first = slot - last % page if writes else table[first_request, at]
                count = inputs["cache"].shape[AXES[case.attribute("cache_layout")].index("p")]
                if 0 <= first <= count - read:
                    table[second_request, column] = first
                    return "cachestarts", (int(first_request), second_request)
        return None

    return corrupt


STARTS: dict[str, Defect] = {
    "seqstarts from elsewhere": starts_elsewhere("seqstarts"),
    "kvstarts from elsewhere": starts_elsewhere("kvstarts"),
    "seqstarts decrease": starts_that_decrease("seqstarts"),
    "kvstarts decrease": starts_that_decrease("kvstarts"),
    "other rows": other_totals("seqstarts"),
}
KEYS: dict[str, Defect] = {"other keys": other_totals("kvstarts")}
DECODING: dict[str, Defect] = {
    "decoding_batches -1": decoding(-1),
    "decoding_batches beyond": decoding(1),
    "few mask columns": few_mask_columns,
}
SLOTS: dict[str, Defect] = {
    "negative past": negative_past,
    "another past": other_past,
    "an endless past": endless_past,
    "longer than the cache": longer_than_the_cache,
    "a slot in front": slots_outside(-1),
    "a slot after the end": slots_outside(2**62),
    "too few pages": too_few_pages,
    "two write": share_page(writes=True),
    "one reads": share_page(writes=False),
}
OPERATOR_DEFECTS: dict[str, dict[str, Defect]] = {
    "MultiHeadCacheAttention": STARTS | DECODING | SLOTS,
    "KeyValueCache": STARTS | SLOTS,
    "MultiHeadAttention": STARTS | KEYS | DECODING,
}
MODES = [
    *((op, mode) for op in ("MultiHeadCacheAttention", "KeyValueCache") for mode in (0, 1)),
    ("MultiHeadAttention", 0),
]


def choose_case(operator: str, mode: int) -> cases.Case:
    """Return a configuration with that cache_mode and, if possible, a mask."""
    for case in cases.cases(3, 60, operator):
        cached = operator != "MultiHeadAttention"
        masked = operator == "KeyValueCache" or case.mask in ("2-D", "3-D")
        if masked and (not cached or case.attribute("cache_mode") == mode):
            return case
    raise AssertionError("no such case")


@functools.cache
def compile_case(operator: str, mode: int, checks: bool) -> lowering.Model:
    return lowering.compile(make_model(choose_case(operator, mode), functional=False), threads=1, checks=checks)


def corrupt_inputs(operator: str, mode: int, defect: Defect) -> tuple[Inputs, tuple[str, tuple[int, ...]]] | None:
    case = choose_case(operator, mode)
    for seed in range(80):
        inputs = case.arrays(np.random.default_rng(seed))
        blame = defect(case, inputs)
        if blame is not None:
            return inputs, blame
    return None


@pytest.mark.sampled(2)
@pytest.mark.parametrize("operator, mode", MODES)
def test_illegal_tables_are_refused(operator: str, mode: int) -> None:
    case, run = choose_case(operator, mode), compile_case(operator, mode, True).run
    refused = set()
    for name, defect in OPERATOR_DEFECTS[operator].items():
        corrupted = corrupt_inputs(operator, mode, defect)
        if corrupted is None:
            continue
        inputs, (argument, requests) = corrupted
        before = {key: array.copy() for key, array in inputs.items()}
        with pytest.raises(InputError) as caught:
            run(inputs)
        text = str(caught.value)
        assert f".{operator}-1 '{case.name}'" in text and argument in text, (name, text)
        named = {int(number) for number in re.findall(r"request (\d+)", text)}
        assert not requests or named & set(requests), (name, requests, text)
        assert re.search(r": [^:]+: [^:]+\.$", text), text  # the remedy follows the problem
        assert all(is_equal_bitwise(inputs[key], before[key]) for key in inputs), name
        refused.add(name)
    # Without pages there are never too few of them, and requests do not read what only others write.
    assert OPERATOR_DEFECTS[operator].keys() - refused <= (set() if mode else {"too few pages", "one reads"})


@pytest.mark.parametrize("operator, mode", MODES)
def test_a_model_runs_after_an_error(operator: str, mode: int) -> None:
    """Legal calls after an error are answered."""
    case = choose_case(operator, mode)
    corrupted = corrupt_inputs(operator, mode, OPERATOR_DEFECTS[operator]["seqstarts decrease"])
    assert corrupted is not None
    with raises("requests.starts_decreasing"):
        compile_case(operator, mode, True).run(corrupted[0])
    inputs = case.arrays(np.random.default_rng(7))
    expected = cases.compute_expected(case, {key: array.copy() for key, array in inputs.items()})
    results = compile_case(operator, mode, True).run(inputs)
    for name in expected.keys() & results.keys():
        np.testing.assert_allclose(results[name], expected[name], 3e-3, 3e-3)


@pytest.mark.parametrize("operator, mode", MODES)
def test_unchecked_models_accept_all_tables(operator: str, mode: int) -> None:
    for name, defect in OPERATOR_DEFECTS[operator].items():
        corrupted = corrupt_inputs(operator, mode, defect)
        if corrupted is None or name in ("other keys", "longer than the cache"):  # sizes of results
            continue
        compile_case(operator, mode, False).run(corrupted[0])


# -- checks that run once ---------------------------------------------------------------------------------------------


def make_layers(pages: str = "cachestarts") -> onnx.ModelProto:
    """Return two layers over one cache, whose tables are the same except for the pages of the second."""
    ints, floats = TensorProto.INT64, TensorProto.FLOAT
    rows = [("q", floats, ["N", 2, 8]), ("k", floats, ["N", 2, 8]), ("v", floats, ["N", 2, 8])]
    tables = [("seqstarts", ints, ["B1"]), ("kvstarts", ints, ["B1"]), ("cachestarts", ints, ["B", "P"])]
    tables += [("start_pos", ints, ["B"]), *((name, ints, []) for name in ("decoding", "most", "keys"))]
    cache = [("cache", floats, ["T", 2, 2, 2, 8])]
    names = [name for name, _, _ in (*rows, *tables, *cache)]
    if pages not in names:
        tables.append((pages, ints, ["B", "P"]))
    settings = {"num_heads": 2, "head_dim": 8, "num_layer": 2, "cache_mode": 1, "page_size": 4}
    nodes = [
        helper.make_node(
            "MultiHeadCacheAttention",
            [query, *(pages if (layer, name) == (1, "cachestarts") else name for name in names[1:])],
            [result],
            f"layer {layer}",
            domain="opmx.dynamic_batching",
            layer_idx=layer,
            **settings,
        )
        for layer, (query, result) in enumerate((("q", "x"), ("x", "y")))
    ]
    infos = [helper.make_tensor_value_info(*port) for port in (*rows, *tables, *cache)]
    graph = helper.make_graph(nodes, "g", infos, [helper.make_tensor_value_info("y", floats, ["N", 2, 8])])
    opsets = [helper.make_opsetid("", 24), helper.make_opsetid("opmx.dynamic_batching", 1)]
    return helper.make_model(graph, opset_imports=opsets, ir_version=10)


def make_layer_inputs() -> dict[str, Any]:
    rng = np.random.default_rng(0)
    inputs: dict[str, Any] = {name: rng.standard_normal((2, 2, 8)).astype(np.float32) for name in "qkv"}
    inputs |= {"seqstarts": np.arange(3), "kvstarts": np.array([0, 3, 5]), "start_pos": np.array([2, 1])}
    inputs |= {"cachestarts": np.array([[0], [4]]), "decoding": np.array(2), "most": np.array(1), "keys": np.array(3)}
    return inputs | {"cache": np.zeros((8, 2, 2, 2, 8), np.float32)}


def test_layers_share_a_check_that_names_the_first() -> None:
    modules: dict[str, Any] = {}
    run = lowering.compile(make_layers(), dump=modules.__setitem__).run
    assert str(modules["eliminate_dead_code"]["main"]).count(f'"{OPENPPL}"') == 1
    inputs = make_layer_inputs()
    run(inputs)
    before = inputs["cache"].copy()
    inputs["cachestarts"][1, 0] = 1
    with raises("requests.slot_shared"):
        run(inputs)
    assert is_equal_bitwise(inputs["cache"], before)


def test_no_layer_writes_before_the_tables_of_all_were_checked() -> None:
    run = lowering.compile(make_layers("other_pages")).run
    inputs = make_layer_inputs() | {"other_pages": np.array([[0], [5]])}
    before = inputs["cache"].copy()
    with raises("requests.slot_out_of_range"):
        run(inputs | {"other_pages": np.array([[0], [7]])})
    assert is_equal_bitwise(inputs["cache"], before)
    run(inputs)
    assert not is_equal_bitwise(inputs["cache"], before)


class StopError(Exception):
    pass


@pytest.mark.parametrize("target, checks, check_count", [("cpu", True, 1), ("cpu", False, 0), ("cuda:sm_90a", True, 0)])
def test_which_models_check(target: str, checks: bool, check_count: int) -> None:
    """Models without checks do not check, and models for a GPU neither: the host does not read its memory."""

    def dump(name: str, module: Any) -> None:
        if name == "eliminate_dead_code":
            assert str(module["main"]).count(f'"{OPENPPL}"') == check_count
            raise StopError

    with pytest.raises(StopError):
        lowering.compile(make_layers(), target, checks=checks, dump=dump)


def test_checks_is_a_flag() -> None:
    with raises("option.checks_invalid"):
        lowering.compile(make_layers(), checks="no")  # type: ignore[arg-type]
