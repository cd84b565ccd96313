"""Attention nodes of a model: the operation, the chosen kernel with reasons, and the visited key tiles."""

from __future__ import annotations

import ast
import dataclasses
import json
from collections.abc import Iterator, Mapping
from typing import Any

from schedules import CONSIDERED

from ..attention.record.cache_layout import CacheLayout, Whole
from ..attention.record.formula import Formula
from ..attention.record.problem import ATTRIBUTE, AttentionProblem, Mask, Window
from ..manifest import Manifest
from .block_map import read_geometry, read_max_decode_rows, render_block_map
from .dump import CompilationDump
from .elements import Child, E, Node, make_details, make_facts, make_note, make_table
from .formula_text import format_formula
from .script import KernelCall, MainFunction, ModuleScript, UnknownSizeError, evaluate_size
from .sizes import ChosenSizes

_MAX_MAPS = 4  # block maps of one kernel
_DEFAULT_SIZE = 256  # rows or keys whose number does not follow from the sizes


def render_attentions(manifest: Manifest, dump: CompilationDump, sizes: ChosenSizes) -> Iterator[Node]:
    script = dump.read_script("schedule")
    kernels = [kernel for kernel in manifest.kernels if script.read_attribute(kernel.name, ATTRIBUTE) is not None]
    if not kernels:
        yield make_note("The model has no attention.")
    for kernel in kernels:
        yield from _render_kernel(kernel.name, manifest, dump, script, sizes)


def read_choice(script: ModuleScript, kernel: str) -> dict[str, Any]:
    """Return the record of the scheduling of a function; {} where no rule considered it."""
    return json.loads(script.read_attribute(kernel, CONSIDERED) or "{}")


def render_tiles(chosen: Mapping[str, Any] | None) -> Iterator[Node]:
    """Yield the tiles of a choice, one table for each range of sizes with tiles of its own."""
    match chosen:
        case {"variant": name, "tiles": tiles}:
            rows = [
                (option, ", ".join(f"{k} {v}" for k, v in fields.items() if v is not None))
                for option, fields in tiles.items()
            ]
            yield make_table((f"kernels of variant '{name}'", "tiles"), rows)
        case {"most": max_rows, "small": small, "large": large}:
            yield E("p", f"For sizes of up to {max_rows}:")
            yield from render_tiles(small)
            yield E("p", f"For sizes above {max_rows}:")
            yield from render_tiles(large)
        case {"otherwise": otherwise}:
            yield E("p", "At the tuned sizes by a schedule of MetaSchedule's; elsewhere:")
            yield from render_tiles(otherwise)


def _render_kernel(
    name: str, manifest: Manifest, dump: CompilationDump, script: ModuleScript, sizes: ChosenSizes
) -> Iterator[Node]:
    problem = AttentionProblem.from_json(script.read_attribute(name, ATTRIBUTE) or "")
    calls = [call for call in manifest.calls if call.kernel == name]
    nodes = list(dict.fromkeys(node for call in calls for node in call.nodes))
    yield E("h3", E("code", name))
    first, count = ", ".join(nodes[:3]), len(calls)
    yield E(
        "p",
        f"{count} call{'s' if count > 1 else ''}: {first}{f' and {len(nodes) - 3} more' if len(nodes) > 3 else ''}.",
    )
    yield make_facts(_describe_problem(problem))
    yield make_details("The record as it is", E("pre", json.dumps(json.loads(problem.to_json()), indent=1)))
    yield from _render_choice(problem, read_choice(script, name))
    yield from _render_block_maps(name, problem, read_choice(script, name).get("chosen"), manifest, dump, sizes)


def _describe_problem(p: AttentionProblem) -> Iterator[tuple[str, Child]]:
    groups = f", {p.group} share a key/value head" if p.group > 1 else ""
    yield "Heads", f"{p.q_heads} of queries, {p.kv_heads} of keys and values{groups}"
    value = f", of values {p.v_head_dim}" if p.v_head_dim != p.head_dim else ""
    yield "Size of a head", f"{p.head_dim}{value}"
    sizes = {"batch": p.batch, "query rows": p.q_len, "keys": p.kv_len}
    yield "Sizes", ", ".join(f"{name} {'symbolic' if size is None else size}" for name, size in sizes.items())
    values = f", V {p.v_dtype}" if p.v_dtype != p.dtype else ""
    yield "Types", f"{p.dtype}{values}; softmax and sums {p.acc_dtype}"
    yield "Query rows", "packed, one batch behind the other" if p.is_ragged else f"axes {p.row_axes}"
    yield "Keys and values", "; ".join(_describe_layout(p.layout))
    yield "Visible keys", "; ".join(_describe_visible_keys(p)) or "all"
    if isinstance(p.mask, Mask):
        dims = ", ".join("?" if dim is None else str(dim) for dim in p.mask.dims)
        yield (
            "Mask",
            f"a tensor {p.mask.dtype}[{dims}], {'selects' if p.mask.dtype == 'bool' else 'is added to scores'}",
        )
    elif isinstance(p.mask, Formula):
        how = "visible where" if p.mask.dtype == "bool" else "added to scores:"
        yield "Mask", E("span", f"no tensor, {how} ", E("code", format_formula(p.mask.value)))
    else:
        yield "Mask", "none"
    scale = "a run-time value" if p.scale is None else f"{p.scale:g}"
    cap = f", soft cap {p.softcap:g}" if p.softcap else ""
    change = None if p.score is None else E("span", ", then ", E("code", format_formula(p.score.value)))
    yield "Score", E("span", f"scale {scale}{cap}", change)
    extra_outputs = {
        "a sink": p.sink,
        f"scores (mode {p.qk_mode})": p.qk_mode is not None,
        "log-sum-exp": p.lse,
        "maxima": p.max,
    }
    if any(extra_outputs.values()):
        yield "Also", ", ".join(name for name, is_present in extra_outputs.items() if is_present)


def _describe_layout(layout: CacheLayout) -> Iterator[str]:
    yield f"axes {layout.axes}"
    if layout.is_joint:
        yield "one buffer for both"
    for name, option in (
        ("slots", layout.slots),
        ("ring", layout.ring),
        ("beams", layout.beams),
        ("codes", layout.quantization),
    ):
        if option is not None and option != Whole():
            fields = (f"{field} {value}" for field, value in dataclasses.asdict(option).items() if value is not None)
            yield f"{name}: {' '.join([type(option).__name__.lower(), ', '.join(fields)]).strip()}"


def _describe_visible_keys(p: AttentionProblem) -> Iterator[str]:
    if p.lengths:
        yield "of each batch the first lengths[b]"
    window: Window | None = p.window
    if window is None:
        return
    row_position = {"zero": "i", "past": "i + past", "lengths": "i + lengths[b] - rows", "behind": "i + lengths[b]"}[
        window.offset
    ]
    ends = "j" if window.left is None else f"{row_position} - {window.left} <= j"
    ends += "" if window.right is None else f" <= {row_position}{f' + {window.right}' if window.right else ''}"
    yield f"row i sees key j where {ends}"
    if window.sinks:
        yield f"and the first {window.sinks} keys"
    if window.free:
        yield "the rows of the first free_batches batches see all"


def _render_choice(problem: AttentionProblem, choice: Mapping[str, Any]) -> Iterator[Node]:
    variants = choice.get("variants", [])
    if not variants:
        yield E("p", "No kernel of ours takes it: it runs as plain loops, which are right for every record.")
    elif len(variants) == 1:
        yield E("p", f"Variant '{variants[0]}' is the only one.")
    else:
        yield E("p", f"Variants, the best first: {', '.join(variants)}. Without tuning the first is taken.")
    yield from render_tiles(choice.get("chosen"))
    max_rows = read_max_decode_rows(problem, choice.get("chosen"))
    if max_rows:
        yield E("p", f"Up to {max_rows} query row{'s' if max_rows > 1 else ''} go by 'decode', more by 'prefill'.")
    rejected = choice.get("rejected", {})
    if rejected:
        yield E("p", "Rejection:")
        rows = ((kernel, "; ".join(needs)) for kernel, needs in rejected.items())
        yield make_table(("kernel", "needs that do not hold"), rows)
    else:
        yield E("p", "No kernel rejected.")


def _render_block_maps(
    name: str, problem: AttentionProblem, chosen: Any, manifest: Manifest, dump: CompilationDump, sizes: ChosenSizes
) -> Iterator[Node]:
    try:
        main = dump.read_script("lower_call_tir").main
        calls = [call for call in main.calls() if call.kernel == name]
    except UnknownSizeError:
        yield make_note("There is no block map, as the dump's main function cannot be read.")
        return
    settings: dict[tuple[Any, ...], tuple[int, int, dict[str, int]]] = {}
    for call in calls:
        rows, keys, scalars = _read_call_sizes(problem, call, main, sizes.map_names(manifest, main))
        settings.setdefault((rows, keys, *scalars.items()), (rows, keys, scalars))
    for rows, keys, scalars in list(settings.values())[:_MAX_MAPS]:
        tiles = read_geometry(problem, chosen, rows)
        if tiles is None:
            yield make_note("The kernel that runs has no tiles of rows and keys, so that there is no block map.")
            return
        yield from render_block_map(problem, tiles, rows, keys, scalars)
        if problem.lengths or problem.is_ragged or problem.layout.is_mapped:
            yield make_note("Drawn for one batch whose keys fill their cache; a run visits those that lengths count.")


def _read_call_sizes(
    problem: AttentionProblem, call: KernelCall, main: MainFunction, sizes: Mapping[str, int]
) -> tuple[int, int, dict[str, int]]:
    """Return query rows, keys and integers of a call; defaults where they do not follow from the sizes."""
    arguments = dict(zip(problem.parameters(), call.arguments))
    scalars: dict[str, int] = {}
    for scalar in problem.scalars():
        try:
            scalars[scalar] = evaluate_size(arguments[scalar], sizes)
        except (UnknownSizeError, KeyError):
            continue

    def read_axis_size(buffer: str, axes: str) -> int:
        argument = arguments.get(buffer)
        dims = main.read_shape(argument.id) if isinstance(argument, ast.Name) else None
        try:
            return evaluate_size(dims[axes.index("t")], sizes) if dims else _DEFAULT_SIZE
        except (UnknownSizeError, IndexError):
            return _DEFAULT_SIZE

    rows = problem.q_len if problem.q_len is not None else scalars.get("most_rows")
    keys = problem.kv_len if problem.kv_len is not None else scalars.get("most_keys")
    if rows is None:
        rows = _DEFAULT_SIZE if problem.is_ragged else read_axis_size("q", problem.row_axes)
    if keys is None:
        keys = (
            _DEFAULT_SIZE
            if problem.layout.is_mapped
            else read_axis_size("kv" if problem.layout.is_joint else "k", problem.layout.axes)
        )
    return rows, keys, scalars
