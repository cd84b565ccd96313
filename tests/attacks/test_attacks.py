"""Random attacks on every operator: the right answer or a clear error, and no access to foreign memory.

A failing attack is reported with the command that repeats it: `python -m tests.attacks OPERATOR --seed N`.
"""

from __future__ import annotations

import pytest

from lowering.graph.loading.legality import OWN_DOMAIN
from lowering.ops import list_registered

from .campaign import campaign, tabulated, text
from .generators import GENERATORS
from .pool import FINDINGS, Zygote

CALLS = 3

# Findings of campaigns that are fixed.
FOUND = [
    ("", "Cast", 97000013),
    ("", "ConstantOfShape", 96000026),
    ("", "Div", 108),
    ("", "EyeLike", 106),
    ("", "Greater", 97000009),
    ("", "MaxPool", 96000045),
    ("", "Pow", 95000015),
    ("", "QLinearConv", 113),
    ("", "QuantizeLinear", 95000002),
    ("", "QuantizeLinear", 95000003),
    ("", "Shape", 96000010),
    ("", "Slice", 95000002),
    ("", "Split", 90000005),
    ("", "Split", 95000023),
    ("", "SwiGLU", 90000007),
    ("", "Tile", 90000018),
    ("", "Tile", 95000019),
    ("", "Tile", 96000014),
    ("", "Tile", 98000028),
    ("", "TopK", 90000000),
    ("", "TopK", 95000001),
    ("", "Transpose", 96000003),
    ("", "Trilu", 90000004),
    ("com.microsoft", "MultiHeadAttention", 90000021),
    ("com.microsoft", "SkipLayerNormalization", 97000019),
    ("lowering.flex", "FlexAttentionGradient", 102),
]


# No model of one node has them: they take or give sequences or optional values (tests/ops/control/test_sequences.py).
OF_SEQUENCES = {
    ("", op)
    for op in (
        "ConcatFromSequence", "Optional", "OptionalGetElement", "OptionalHasElement", "SequenceAt", "SequenceConstruct",
        "SequenceEmpty", "SequenceErase", "SequenceInsert", "SequenceLength", "SplitToSequence",
    )
}  # fmt: skip

# Operators of strings, which are not arrays of numbers (tests/ops/control/test_strings.py).
OF_STRINGS = {("", op) for op in ("RegexFullMatch", "StringConcat", "StringNormalizer", "StringSplit")}


def test_every_operator_is_attacked() -> None:
    """Operators of the compiler's own domain come in no model; tests/serving/test_served_decoders.py attacks them."""
    assert set(GENERATORS) == {key for key in list_registered() if key[0] != OWN_DOMAIN} - OF_SEQUENCES - OF_STRINGS


@pytest.mark.sampled(6)
@pytest.mark.parametrize("domain, op", sorted(GENERATORS), ids=lambda text: text or "ai.onnx")
def test_operator(zygote: Zygote, domain: str, op: str) -> None:
    _attack(zygote, domain, op, seed=0)


@pytest.mark.parametrize("domain, op, seed", FOUND)
def test_findings(zygote: Zygote, domain: str, op: str, seed: int) -> None:
    _attack(zygote, domain, op, seed)


def _attack(zygote: Zygote, domain: str, op: str, seed: int) -> None:
    outcomes = zygote.attack(domain, op, seed=seed, calls=CALLS)
    assert outcomes, "an attack told nothing"
    findings = [o for o in outcomes if o.kind in FINDINGS]
    assert not findings, "\n".join(map(str, findings))


@pytest.mark.slow
@pytest.mark.timeout(4 * 3600)
def test_ten_thousand_calls() -> None:
    """Half an hour on two cores. `python -m tests.attacks --cases 10000 --first-seed 100` tells on the way."""
    outcomes = list(campaign(sorted(GENERATORS), 10_000, CALLS, first_seed=100))
    print(text(tabulated(outcomes)))
    findings = [o for o in outcomes if o.kind in FINDINGS]
    assert not findings, "\n".join(map(str, findings))
