"""C identifiers and literals for names and texts of a model, which may contain any characters."""

from __future__ import annotations

import re
from collections.abc import Iterable

_KEYWORDS = frozenset(
    re.findall(
        r"\w+",
        "alignas alignof and and_eq asm auto bitand bitor bool break case catch char char8_t char16_t char32_t "
        "class co_await co_return co_yield compl concept const const_cast consteval constexpr constinit continue "
        "decltype default delete do double dynamic_cast else enum explicit export extern false float for friend "
        "goto if inline int long mutable namespace new noexcept not not_eq nullptr operator or or_eq private "
        "protected public register reinterpret_cast requires restrict return short signed sizeof static "
        "static_assert static_cast struct switch template this thread_local throw true try typedef typeid typename "
        "typeof union unsigned using virtual void volatile wchar_t while xor xor_eq linux unix i386 errno NULL "
        "offsetof",
    )
)
"""Keywords of C and C++, and macros of common compilers and headers."""

_OF_STDINT = re.compile(
    r"u?int\w*_t|U?INT\w*|SIZE_MAX|size_t|ptrdiff_t|PTRDIFF_\w+|S?W?CHAR\w*|WINT_\w+|SIG_ATOMIC_\w+"
)


def choose_names(names: Iterable[str], taken: Iterable[str] = ()) -> list[str]:
    """Return a distinct C identifier for each name: the name itself if possible.

    Other characters than letters, digits and _ become _, and names that are equal then get numbers.
    """
    used, chosen = {*_KEYWORDS, *taken}, []
    for name in names:
        base = re.sub(r"[^A-Za-z0-9_]", "_", name)
        if not base or base[0].isdigit() or base.startswith("_") or _OF_STDINT.fullmatch(base):
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
