"""Which modules of this project each package may import; docs/reference/import_rules.md shows it."""

from __future__ import annotations

# Prefixes of modules that nothing in a folder may import: the compiler asks `schedules` by its package interface.
FORBIDDEN = {"lowering": ("schedules.cpu", "schedules.cuda")}

# Modules that may import each other inside functions, with the reason.
CYCLES = {
    frozenset(
        f"lowering.runtime{name}" for name in ("", ".model", ".artifact.foreign", ".artifact.pickling")
    ): "a pickled model names the function that opens it",
}

# Package -> (modules of this project that it may import, whether it may import tvm)
RULES = {
    "lowering/runtime": (
        {
            "lowering.runtime",
            "lowering.arithmetic",
            "lowering.errors",
            "lowering.machine",
            "lowering.manifest",
            "lowering.notebook",
        },
        False,
    ),
    "lowering/packaging": (
        {
            "lowering.packaging",
            "lowering.runtime",
            "lowering.machine",
            "lowering.manifest",
            "lowering.errors",
            "lowering.version",
        },
        False,
    ),
    "lowering/diagnosis": ({"lowering.diagnosis", "lowering.cache_folder", "lowering.machine"}, False),
    "lowering/graph": (
        {
            "lowering.graph",
            "lowering.arithmetic",
            "lowering.choices",
            "lowering.chunks",
            "lowering.errors",
            "lowering.manifest",
            "lowering.scratch",
            "lowering.runtime.artifact.checks",
        },
        False,
    ),
    "lowering/importing": (
        {
            "lowering.importing",
            "lowering.graph",
            "lowering.tensorir",
            "lowering.arithmetic",
            "lowering.choices",
            "lowering.chunks",
            "lowering.errors",
            "lowering.manifest",
            "lowering.scratch",
        },
        True,
    ),
    "lowering/emission": (
        {
            "lowering.emission",
            "lowering.importing",
            "lowering.passes",
            "lowering.tensorir",
            "lowering.arithmetic",
            "lowering.errors",
            "lowering.manifest",
            "lowering.version",
        },
        True,
    ),
    "lowering/tuning_records": (
        {
            "lowering.tuning_records",
            "lowering.attention",
            "lowering.measuring",
            "lowering.target",
            "lowering.tensorir",
            "lowering.records",
            "lowering.errors",
            "schedules",
        },
        True,
    ),
    "lowering/tensorir": ({"lowering.tensorir", "lowering.records"}, True),
    "lowering/profiling": (
        {
            "lowering.profiling",
            "lowering.runtime",
            "lowering.machine",
            "lowering.manifest",
            "lowering.notebook",
            "lowering.arithmetic",
            "lowering.errors",
            "lowering.units",
        },
        False,
    ),
    "lowering/checking": (
        {
            "lowering.checking",
            "lowering.deprecated",
            "lowering.choices",
            "lowering.compiling",
            "lowering.fusion",
            "lowering.graph",
            "lowering.importing",
            "lowering.ops",
            "lowering.profiling",
            "lowering.runtime",
            "lowering.serving",
            "lowering.machine",
            "lowering.manifest",
            "lowering.notebook",
            "lowering.errors",
            "lowering.version",
        },
        False,
    ),
    "lowering/reporting": (
        {
            "lowering.reporting",
            "lowering.about",
            "lowering.arithmetic",
            "lowering.compiling.dump_folder",
            "lowering.attention",
            "lowering.profiling",
            "lowering.runtime",
            "lowering.machine",
            "lowering.manifest",
            "lowering.records",
            "lowering.errors",
            "lowering.units",
            "schedules",
        },
        False,
    ),
    "lowering/measuring": ({"lowering.measuring", "lowering.runtime", "lowering.records", "lowering.errors"}, False),
    "lowering/fleet": (
        {"lowering.fleet", "lowering.machine", "lowering.measuring", "lowering.runtime", "lowering.errors"},
        True,
    ),
    "lowering/attention": (
        {"lowering.attention", "lowering.arithmetic", "lowering.records", "lowering.tensorir"},
        True,
    ),
    "lowering/serving": ({"lowering.serving", "lowering.manifest", "lowering.errors"}, False),
    "lowering/functions": (
        {
            "lowering.functions",
            "lowering.ops",
            "lowering.importing.checks",
            "lowering.compiling",
            "lowering.runtime",
            "lowering.errors",
        },
        True,
    ),
    "lowering/flex": (
        {
            "lowering.cache_folder",
            "lowering.deprecated",
            "lowering.flex",
            "lowering.attention.record.alibi",
            "lowering.attention.expr.node",
            "lowering.attention.flex_node",
            "lowering.compiling.compiler",
            "lowering.machine",
            "lowering.runtime",
            "lowering.errors",
        },
        False,
    ),
    "schedules": (
        {
            "schedules",
            "lowering.attention",
            "lowering.records",
            "lowering.tensorir",
        },
        True,
    ),
    "lowering/fusion": (
        {"lowering.errors", "lowering.fusion", "lowering.graph.loading.legality", "lowering.graph.rewriting"},
        False,
    ),
    "lowering/ops": (
        {
            "lowering.ops",
            "lowering.importing",
            "lowering.graph.loading.legality",
            "lowering.graph.experts.mixture",
            "lowering.attention",
            "lowering.tensorir",
            "lowering.arithmetic",
            "lowering.choices",
            "lowering.chunks",
            "lowering.errors",
            "lowering.scratch",
        },
        True,
    ),
}
