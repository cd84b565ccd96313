"""Operators of strings: of constants, at run time where equality is enough, and otherwise rejected with a reason."""

from __future__ import annotations

from typing import Any

import numpy as np
import onnx
import onnxruntime
import pytest
from onnx import TensorProto, helper, numpy_helper

import lowering
from lowering.errors import NodeError
from tests.ops.expectations import make_model
from tests.support.error_codes import raises


def make_texts(*values: Any) -> np.ndarray:
    return np.array(values, object)


def make_operator(
    name: str,
    inputs: list[np.ndarray],
    constant: bool,
    y_rank: int = 1,
    y_type: int = TensorProto.STRING,
    **attributes: Any,
) -> tuple[onnx.ModelProto, dict[str, np.ndarray]]:
    """Return a model of one node and its feeds."""
    names = [f"x{k}" for k in range(len(inputs))]
    outputs = [helper.make_tensor_value_info("y", y_type, [f"y{k}" for k in range(y_rank)])]
    if name == "StringSplit":
        outputs.append(helper.make_tensor_value_info("z", TensorProto.INT64, [f"z{k}" for k in range(y_rank - 1)]))
    node = helper.make_node(name, names, [output.name for output in outputs], **attributes)
    kinds = [TensorProto.STRING if a.dtype == object else helper.np_dtype_to_tensor_dtype(a.dtype) for a in inputs]
    infos = [
        helper.make_tensor_value_info(
            n, kind, [f"{n}{k}" if n == "x0" and name != "StringNormalizer" else d for k, d in enumerate(a.shape)]
        )
        for n, kind, a in zip(names, kinds, inputs)
    ]
    constants = [numpy_helper.from_array(a, n) for n, a in zip(names, inputs)]
    proto = make_model([node], [] if constant else infos, outputs, 22, constants if constant else [])
    return proto, {} if constant else dict(zip(names, inputs))


CONSTANTS: dict[str, tuple[str, list[np.ndarray], dict[str, Any], list[Any]]] = {
    "concat": ("StringConcat", [make_texts("a", "é", ""), make_texts("x", "", "")], {}, [["ax", "é", ""]]),
    "concat broadcast": ("StringConcat", [make_texts(["a"], ["b"]), make_texts("1", "2")], {},
                         [[["a1", "a2"], ["b1", "b2"]]]),
    "split": ("StringSplit", [make_texts("a b  c", "", "d")], {},
              [[["a", "b", "c"], ["", "", ""], ["d", "", ""]], [3, 0, 1]]),
    "split by": ("StringSplit", [make_texts("a,b,,c", "d")], {"delimiter": ",", "maxsplit": 2},
                 [[["a", "b", ",c"], ["d", "", ""]], [3, 1]]),
    "match": ("RegexFullMatch", [make_texts("abc", "ab", "abcd")], {"pattern": "ab.?"}, [[True, True, False]]),
    "normalize": ("StringNormalizer", [make_texts("Monday", "the", "The")],
                  {"stopwords": ["the"], "case_change_action": "UPPER"}, [["MONDAY"]]),
    "normalize case": ("StringNormalizer", [make_texts(["The", "the", "B"])],
                       {"stopwords": ["the"], "case_change_action": "LOWER", "is_case_sensitive": 1}, [[["the", "b"]]]),
    "normalize away": ("StringNormalizer", [make_texts("a")], {"stopwords": ["A"]}, [[""]]),
}  # fmt: skip


@pytest.mark.parametrize("form", CONSTANTS)
def test_constants(form: str) -> None:
    name, inputs, attributes, want = CONSTANTS[form]
    kind = TensorProto.BOOL if name == "RegexFullMatch" else TensorProto.STRING
    proto, _ = make_operator(name, inputs, True, np.ndim(want[0]), kind, **attributes)
    results = lowering.compile(proto).run({})
    for array, expected in zip(results.values(), want, strict=True):
        assert np.asarray(array).tolist() == expected


STOPS = ["the", "a", ""]


@pytest.mark.parametrize("x", [
    make_texts("the", "b", "The", "a"), make_texts("the"), make_texts("b", "c"), make_texts(["a", "x", "the", "x"]),
    make_texts(["", "a"]),
], ids=str)  # fmt: skip
@pytest.mark.parametrize("stopwords", [[], STOPS], ids=["none", "some"])
def test_stopwords_of_run(x: np.ndarray, stopwords: list[str]) -> None:
    attributes = {"stopwords": stopwords, "is_case_sensitive": 1} if stopwords else {}
    proto, feeds = make_operator("StringNormalizer", [x], False, x.ndim, **attributes)
    (expected,) = onnxruntime.InferenceSession(proto.SerializeToString()).run(None, feeds)
    actual = np.asarray(lowering.compile(proto).run(feeds)["y"])
    assert actual.shape == np.shape(expected) and actual.tolist() == np.asarray(expected).tolist()


@pytest.mark.parametrize(
    ("name", "count", "attributes"),
    [
        ("StringConcat", 2, {}),
        ("StringSplit", 1, {}),
        ("RegexFullMatch", 1, {"pattern": "a"}),
        ("StringNormalizer", 1, {"case_change_action": "LOWER"}),
        ("StringNormalizer", 1, {"stopwords": ["a"]}),
    ],
)
def test_letters_of_run_are_refused(name: str, count: int, attributes: dict[str, Any]) -> None:
    kind, rank = (TensorProto.BOOL if name == "RegexFullMatch" else TensorProto.STRING), 1 + (name == "StringSplit")
    proto, _ = make_operator(name, [make_texts("a", "b")] * count, False, rank, kind, **attributes)
    with raises("node.string_at_run_time"):
        lowering.compile(proto)


@pytest.mark.parametrize(
    ("name", "attributes", "words"),
    [
        ("StringNormalizer", {"case_change_action": "TITLE"}, "case_change_action is 'TITLE'"),
        ("RegexFullMatch", {"pattern": "("}, "not a regular expression"),
    ],
)
def test_refusals(name: str, attributes: dict[str, Any], words: str) -> None:
    proto, _ = make_operator(name, [make_texts("a")], True, **attributes)
    with pytest.raises(NodeError, match=words):
        lowering.compile(proto)


# -- TfIdfVectorizer --------------------------------------------------------------------------------------------------

INTEGERS = {
    "pool_int64s": [2, 3, 5, 4, 5, 6, 7, 8, 6, 7],
    "ngram_counts": [0, 4],
    "ngram_indexes": [0, 1, 2, 3, 4, 5, 6],
}
TRIGRAMS = {"pool_int64s": [1, 2, 1, 2, 1, 2, 3], "ngram_counts": [0, 2, 4], "ngram_indexes": [3, 0, 1, 3]}
WORDS = {"pool_strings": ["a", "b", "the", "a", "a", "the"], "ngram_counts": [0, 2], "ngram_indexes": [1, 0, 3, 2]}
X = np.array([[1, 1, 3, 3, 3, 7], [8, 6, 7, 5, 6, 8]])
GRAMS = {"min_gram_length": 1, "max_gram_length": 2}

COUNTED: dict[str, tuple[np.ndarray, dict[str, Any]]] = {
    "rows": (X, {**INTEGERS, **GRAMS, "mode": "TF", "max_skip_count": 0}),
    "skips": (X, {**INTEGERS, **GRAMS, "mode": "TF", "max_skip_count": 5}),
    "bigrams alone": (
        X.astype(np.int32), {**INTEGERS, **GRAMS, "min_gram_length": 2, "mode": "TF", "max_skip_count": 1},
    ),
    "one row": (X[1], {**INTEGERS, **GRAMS, "mode": "IDF", "max_skip_count": 3, "weights": [0.5, 2, 3, 4, 5, 6, 7]}),
    "weighed": (X, {**INTEGERS, **GRAMS, "mode": "TFIDF", "max_skip_count": 3, "weights": [0.5, 2, 3, 4, 5, 6, 7]}),
    "trigrams": (
        np.array([[1, 2, 3, 1, 2, 3, 1], [1, 1, 2, 2, 3, 3, 9]]),
        {**TRIGRAMS, "min_gram_length": 2, "max_gram_length": 3, "mode": "TF", "max_skip_count": 2},
    ),
    "short": (np.array([[1]]), {**TRIGRAMS, **GRAMS, "mode": "IDF", "max_skip_count": 2}),
    "tokens": (make_texts("the", "a", "b", "a", "the", "é"), {**WORDS, **GRAMS, "mode": "TF", "max_skip_count": 1}),
    "rows of tokens": (
        make_texts(["the", "a"], ["a", "a"]),
        {**WORDS, **GRAMS, "mode": "TFIDF", "max_skip_count": 0, "weights": [1, 2, 3, 4.5]},
    ),
}  # fmt: skip


@pytest.mark.parametrize("form", COUNTED)
def test_ngrams(form: str) -> None:
    x, attributes = COUNTED[form]
    proto, feeds = make_operator("TfIdfVectorizer", [x], False, x.ndim, TensorProto.FLOAT, **attributes)
    (want,) = onnxruntime.InferenceSession(proto.SerializeToString()).run(None, feeds)
    np.testing.assert_array_equal(np.asarray(lowering.compile(proto).run(feeds)["y"]), want)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"mode": "XF"}, "attribute mode is 'XF'"),
        ({"pool_strings": ["a"]}, "one of the attributes pool_int64s and pool_strings"),
        ({"ngram_counts": [0, 99]}, "ngram_counts is"),
        ({"ngram_indexes": [1]}, "ngram_indexes has 1 elements"),
        ({"ngram_indexes": [0, 1, 2, 3, 4, 5, 2**40]}, "needs a result of 1099511627777 elements"),
        ({"max_skip_count": -1}, "max_skip_count is -1"),
        ({"min_gram_length": 3}, "min_gram_length and max_gram_length are 3 and 2"),
        ({"weights": [1.0]}, "attribute weights has 1 elements, for 7 n-grams"),
    ],
)
def test_pools_that_do_not_fit(change: dict[str, Any], words: str) -> None:
    attributes = {**INTEGERS, **GRAMS, "mode": "TFIDF", "max_skip_count": 0, **change}
    proto, _ = make_operator("TfIdfVectorizer", [X], False, 2, TensorProto.FLOAT, **attributes)
    with pytest.raises(NodeError, match=words):
        lowering.compile(proto)
