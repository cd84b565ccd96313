"""Error texts for failures inside a call: the virtual machine's own errors name registers."""

from __future__ import annotations

import re

_MEMORY = re.compile(r"storage allocation failure, attempted to allocate (\d+)|bad_alloc|out of memory", re.IGNORECASE)

_NO_MEMORY = (
    "a tensor inside it would need more memory than there is, or have a negative size. Make the inputs smaller; "
    "if sizes are the contents of an input, check those."
)


def describe_failure(error: Exception) -> str:
    """Return the text of a virtual machine's error for the caller of a model.

    Checks (checks.c) and the assertions of kernels raise ValueError, whose text is returned as it is.
    """
    if isinstance(error, ValueError):
        return str(error)
    if _MEMORY.search(str(error)):
        return _NO_MEMORY
    return "a kernel failed on them; the cause of this error has the details (-v on the command line)."
