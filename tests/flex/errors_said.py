"""Check the text of an error."""

from __future__ import annotations

import re

from lowering.errors import InputError


def assert_says(error: InputError, pattern: str) -> None:
    assert re.search(pattern, str(error)), str(error)
    assert not re.search(r"TVM|tirx|FlexAttention-1|BlockStates|lowering\.flex\.\w+ '", str(error)), str(error)
    assert str(error).endswith("."), str(error)
