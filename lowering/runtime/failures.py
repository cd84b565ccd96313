"""Error texts for failures inside a call: the virtual machine's own errors name registers."""

from __future__ import annotations

import re

_MEMORY = re.compile(r"storage allocation failure, attempted to allocate (\d+)|bad_alloc|out of memory", re.IGNORECASE)

_CODE = re.compile(r"\[([a-z0-9_]+\.[a-z0-9_]+)\] ")

_NO_MEMORY = (
    "a tensor inside it would need more memory than there is, or have a negative size. Make the inputs smaller; "
    "if sizes are the contents of an input, check those."
)


def describe_failure(error: Exception) -> tuple[str, str]:
    """Return the code and the text of a virtual machine's error for the caller of a model.

    Checks (checks.c) and the assertions of kernels raise ValueError with the text "[code] text".
    """
    if isinstance(error, ValueError):
        code = _CODE.match(str(error))
        return ("run.check_failed", str(error)) if code is None else (code[1], str(error)[code.end() :])
    if _MEMORY.search(str(error)):
        return "run.out_of_memory", _NO_MEMORY
    return (
        "run.kernel_failed",
        "a kernel failed on them; the cause of this error has the details (-v on the command line).",
    )
