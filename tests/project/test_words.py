"""The words to avoid do not come back."""

from __future__ import annotations

from tests.project import words

# What `python -m tests.project.words` counts; lower it as words go.
MOST = 1_600


def test_words_to_avoid_do_not_grow_in_number() -> None:
    assert sum(words.count(path).total() for path in words.sources()) <= MOST


def test_what_counts() -> None:
    text = "# Of sums, two products and a dot product behind it\nfound = codes\n"
    counts = words.count_text(text, is_python=True)
    assert {term: number for term, number in counts.items() if number} == {
        "matmul": 1, "accumulator": 1, "quantized value": 1, "after, before": 1, "names that say nothing": 1,
        "What, Who, That, Of": 1,
    }  # fmt: skip
