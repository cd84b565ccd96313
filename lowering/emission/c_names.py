"""C identifiers and literals for names and texts of a model, which may contain any characters."""

from __future__ import annotations

import re
from collections.abc import Iterable

_KEYWORDS = frozenset(
    re.findall(
        r"\w+",
        "alignas alignof auto bool break case char class const continue default delete do double else enum explicit "
        "export extern false float for friend goto if inline int long mutable namespace new operator private "
        "protected public register restrict return short signed sizeof static struct switch template this throw true "
        "try typedef typename typeof union unsigned using virtual void volatile wchar_t while and or not xor int8_t "
        "int16_t int32_t int64_t uint8_t uint16_t uint32_t uint64_t size_t NULL",
    )
)
"""Reserved names of C and C++, and types that headers of static objects name."""


def choose_names(names: Iterable[str], taken: Iterable[str] = ()) -> list[str]:
    """Return a distinct C identifier for each name: the name itself if possible.

    Other characters than letters, digits and _ become _, and names that are equal then get numbers.
    """
    used, chosen = {*_KEYWORDS, *taken}, []
    for name in names:
        base = re.sub(r"[^A-Za-z0-9_]", "_", name)
        if not base or base[0].isdigit() or base.startswith("_"):
            base = f"v{base}"
        identifier, number = base, 1
        while identifier in used:
            number += 1
            identifier = f"{base}_{number}"
        used.add(identifier)
        chosen.append(identifier)
    return chosen


def quote(text: str) -> str:
    """Return a C string literal of the text in UTF-8."""
    return f'"{escape(text)}"'


def escape(text: str) -> str:
    """Return ASCII that ends no literal, comment or line: special bytes become `\\nnn`.

    Such an escape takes exactly three octal digits, so that digits may follow it. Question marks begin trigraphs.
    """
    return "".join(chr(b) if 32 <= b < 127 and b not in b'"\\?' else f"\\{b:03o}" for b in text.encode())
