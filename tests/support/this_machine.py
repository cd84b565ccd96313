"""The features of this machine's CPU: tests cover every vector width that is here, on whatever machine they run."""

from lowering.target import host_features, resolve

LEVELS = [
    level
    for level in ("x86-64", "x86-64-v3", "x86-64-v4")
    if level == "x86-64" or set(resolve(f"cpu:{level}")[0].cpu_features) <= set(host_features())
]
"""Levels of x86-64 that can be run, narrowest vectors first."""

WIDEST = LEVELS[-1]

TARGETS = ("cpu", *(f"cpu:{level}" for level in LEVELS[1:]))
"""Targets that compile for this machine, and for the levels of x86-64 that it runs."""
