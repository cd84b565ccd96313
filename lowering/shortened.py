"""Names, and lists of names, shortened to the width of a column."""

from __future__ import annotations

from collections.abc import Sequence

_GAP = ".."


def shorten_middle(text: str, width: int) -> str:
    """Return the text, or its start and end where it is longer than the width: names differ at their ends."""
    if len(text) <= width:
        return text
    available = max(width - len(_GAP), 0)
    end_length = available // 2
    return text[: available - end_length] + _GAP[:width] + (text[-end_length:] if end_length else "")


def shorten_names(names: Sequence[str], width: int | None = None) -> str:
    """Return the first name, shortened to fit, and the number of the others."""
    rest = f" and {len(names) - 1} more" if len(names) > 1 else ""
    first = names[0] if names else ""
    return (first if width is None else shorten_middle(first, max(width - len(rest), 0))) + rest
