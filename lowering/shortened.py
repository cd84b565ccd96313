"""Names, and lists of names, in the width of a column."""

from __future__ import annotations

from collections.abc import Sequence

_GAP = ".."


def cut_middle(text: str, width: int) -> str:
    """Return the text, or its beginning and its end where it is longer than the width: names differ at their ends."""
    if len(text) <= width:
        return text
    left = max(width - len(_GAP), 0)
    back = left // 2
    return text[: left - back] + _GAP[:width] + (text[-back:] if back else "")


def first_and_more(names: Sequence[str], width: int | None = None) -> str:
    """Return the first of some names, cut to fit, and how many more there are."""
    rest = f" and {len(names) - 1} more" if len(names) > 1 else ""
    first = names[0] if names else ""
    return (first if width is None else cut_middle(first, max(width - len(rest), 0))) + rest
