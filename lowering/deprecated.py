"""Deprecated public names of version 0.1, which work for one more series (docs/versions.md).

Python warns with DeprecationWarning, the command line with a line on standard error; either names the replacement. JSON
documents have renamed fields under both names.
"""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from typing import Any

COMMANDS = {"quantise": "quantize"}
"""Old names of commands, with the new ones."""

FIELDS = {"quantized": "quantised", "matmuls": "products", "fix": "mend", "float64": "truth", "best": "settled"}
"""New names of fields in JSON that commands print, with the old ones."""


REFERENCES = ("reference", "onnxruntime")
"""Values of `against`, which was the second parameter of `verify`."""


def read_reference(value: str) -> Any:
    """Return the second argument of `verify` as `against`, with a warning."""
    warnings.warn(f"verify(model, against={value!r}): against is a keyword now.", DeprecationWarning, stacklevel=3)
    return value


def renamed_attribute(module: str, name: str, renamed: Mapping[str, str], attributes: Mapping[str, Any]) -> Any:
    """Return the attribute of a module that `name` was renamed to, with a warning.

    Raises:
        AttributeError: No attribute had that name.
    """
    if name not in renamed:
        raise AttributeError(f"module '{module}' has no attribute '{name}'")
    new_name = renamed[name]
    warnings.warn(f"{module}.{name} is now {module}.{new_name}.", DeprecationWarning, stacklevel=3)
    return attributes[new_name]


def with_old_fields(document: Any) -> Any:
    """Return a JSON document whose objects have renamed fields under both names."""
    if isinstance(document, Mapping):
        document_fields = {name: with_old_fields(value) for name, value in document.items()}
        return {**document_fields, **{FIELDS[name]: value for name, value in document_fields.items() if name in FIELDS}}
    return [with_old_fields(item) for item in document] if isinstance(document, (list, tuple)) else document
