"""Every attention of a model: what it computes, which kernel was chosen and why, and what of the keys it visits."""

from __future__ import annotations

import ast
import dataclasses
import json
from collections.abc import Iterator, Mapping
from typing import Any

from schedules import CONSIDERED

from ..attention.cache_layout import CacheLayout, Whole
from ..attention.formula import Formula
from ..attention.problem import ATTRIBUTE, AttentionProblem, Mask, Window
from ..manifest import Manifest
from .block_map import block_map, geometry, most_decoded
from .dump import Dump
from .elements import Child, E, Node, facts, folded, note, table
from .formula_text import formula_text
from .script import Call, Main, Script, Unknown, number
from .sizes import ChosenSizes

_MOST_MAPS = 4  # of one kernel
_TAKEN = 256  # rows or keys, where sizes do not tell how many there are


def attentions(manifest: Manifest, dump: Dump, sizes: ChosenSizes) -> Iterator[Node]:
    script = dump.script("schedule")
    kernels = [kernel for kernel in manifest.kernels if script.attribute(kernel.name, ATTRIBUTE) is not None]
    if not kernels:
        yield note("The model has no attention.")
    for kernel in kernels:
        yield from _kernel(kernel.name, manifest, dump, script, sizes)


def choice_of(script: Script, kernel: str) -> dict[str, Any]:
    """What was noted when a function was scheduled; {} where no rule had anything to do with it."""
    return json.loads(script.attribute(kernel, CONSIDERED) or "{}")


def tiles_table(chosen: Mapping[str, Any] | None) -> Iterator[Node]:
    """The tiles of a choice, one table for each size at which another is taken."""
    match chosen:
        case {"variant": name, "tiles": tiles}:
            rows = [
                (part, ", ".join(f"{k} {v}" for k, v in fields.items() if v is not None))
                for part, fields in tiles.items()
            ]
            yield table((f"kernels of variant '{name}'", "tiles"), rows)
        case {"most": most, "small": small, "large": large}:
            yield E("p", f"For sizes of up to {most}:")
            yield from tiles_table(small)
            yield E("p", f"For sizes above {most}:")
            yield from tiles_table(large)
        case {"otherwise": otherwise}:
            yield E("p", "At the tuned sizes by a schedule of MetaSchedule's; elsewhere:")
            yield from tiles_table(otherwise)


def _kernel(name: str, manifest: Manifest, dump: Dump, script: Script, sizes: ChosenSizes) -> Iterator[Node]:
    problem = AttentionProblem.from_json(script.attribute(name, ATTRIBUTE) or "")
    calls = [call for call in manifest.calls if call.kernel == name]
    nodes = list(dict.fromkeys(node for call in calls for node in call.nodes))
    yield E("h3", E("code", name))
    first, count = ", ".join(nodes[:3]), len(calls)
    yield E(
        "p",
        f"{count} call{'s' if count > 1 else ''}: {first}{f' and {len(nodes) - 3} more' if len(nodes) > 3 else ''}.",
    )
    yield facts(_record(problem))
    yield folded("The record as it is", E("pre", json.dumps(json.loads(problem.to_json()), indent=1)))
    yield from _chosen(problem, choice_of(script, name))
    yield from _maps(name, problem, choice_of(script, name).get("chosen"), manifest, dump, sizes)


def _record(p: AttentionProblem) -> Iterator[tuple[str, Child]]:
    groups = f", {p.group} share a key/value head" if p.group > 1 else ""
    yield "Heads", f"{p.q_heads} of queries, {p.kv_heads} of keys and values{groups}"
    value = f", of values {p.v_head_dim}" if p.v_head_dim != p.head_dim else ""
    yield "Size of a head", f"{p.head_dim}{value}"
    sizes = {"batch": p.batch, "query rows": p.q_len, "keys": p.kv_len}
    yield "Sizes", ", ".join(f"{name} {'symbolic' if size is None else size}" for name, size in sizes.items())
    values = f", V {p.v_dtype}" if p.v_dtype != p.dtype else ""
    yield "Types", f"{p.dtype}{values}; softmax and sums {p.acc_dtype}"
    yield "Query rows", "packed, one batch behind the other" if p.packed else f"axes {p.row_axes}"
    yield "Keys and values", "; ".join(_layout(p.layout))
    yield "Visible keys", "; ".join(_visible(p)) or "all"
    if isinstance(p.mask, Mask):
        dims = ", ".join("?" if dim is None else str(dim) for dim in p.mask.dims)
        yield (
            "Mask",
            f"a tensor {p.mask.dtype}[{dims}], {'selects' if p.mask.dtype == 'bool' else 'is added to scores'}",
        )
    elif isinstance(p.mask, Formula):
        how = "visible where" if p.mask.dtype == "bool" else "added to scores:"
        yield "Mask", E("span", f"no tensor, {how} ", E("code", formula_text(p.mask.value)))
    else:
        yield "Mask", "none"
    scale = "a run-time value" if p.scale is None else f"{p.scale:g}"
    cap = f", soft cap {p.softcap:g}" if p.softcap else ""
    change = None if p.score is None else E("span", ", then ", E("code", formula_text(p.score.value)))
    yield "Score", E("span", f"scale {scale}{cap}", change)
    also = {
        "a sink": p.sink,
        f"scores (mode {p.qk_mode})": p.qk_mode is not None,
        "log-sum-exp": p.lse,
        "maxima": p.max,
    }
    if any(also.values()):
        yield "Also", ", ".join(name for name, there in also.items() if there)


def _layout(layout: CacheLayout) -> Iterator[str]:
    yield f"axes {layout.axes}"
    if layout.joint:
        yield "one buffer for both"
    for name, part in (
        ("slots", layout.slots),
        ("ring", layout.ring),
        ("beams", layout.beams),
        ("codes", layout.codec),
    ):
        if part is not None and part != Whole():
            fields = (f"{field} {value}" for field, value in dataclasses.asdict(part).items() if value is not None)
            yield f"{name}: {' '.join([type(part).__name__.lower(), ', '.join(fields)]).strip()}"


def _visible(p: AttentionProblem) -> Iterator[str]:
    if p.lengths:
        yield "of each batch the first lengths[b]"
    window: Window | None = p.window
    if window is None:
        return
    at = {"zero": "i", "past": "i + past", "lengths": "i + lengths[b] - rows", "behind": "i + lengths[b]"}[
        window.offset
    ]
    ends = "j" if window.left is None else f"{at} - {window.left} <= j"
    ends += "" if window.right is None else f" <= {at}{f' + {window.right}' if window.right else ''}"
    yield f"row i sees key j where {ends}"
    if window.sinks:
        yield f"and the first {window.sinks} keys"
    if window.free:
        yield "the rows of the first free_batches batches see all"


def _chosen(problem: AttentionProblem, choice: Mapping[str, Any]) -> Iterator[Node]:
    found = choice.get("variants", [])
    if not found:
        yield E("p", "No kernel of ours takes it: it runs as plain loops, which are right for every record.")
    elif len(found) == 1:
        yield E("p", f"Variant '{found[0]}' is the only one.")
    else:
        yield E("p", f"Variants, the best first: {', '.join(found)}. Without tuning the first is taken.")
    yield from tiles_table(choice.get("chosen"))
    most = most_decoded(problem, choice.get("chosen"))
    if most:
        yield E("p", f"Up to {most} query row{'s' if most > 1 else ''} go by 'decode', more by 'prefill'.")
    rejected = choice.get("rejected", {})
    if rejected:
        yield E("p", "Rejection:")
        rows = ((kernel, "; ".join(needs)) for kernel, needs in rejected.items())
        yield table(("kernel", "needs that do not hold"), rows)
    else:
        yield E("p", "No kernel rejected.")


def _maps(
    name: str, problem: AttentionProblem, chosen: Any, manifest: Manifest, dump: Dump, sizes: ChosenSizes
) -> Iterator[Node]:
    try:
        main = dump.script("lower_call_tir").main
        calls = [call for call in main.calls() if call.kernel == name]
    except Unknown:
        yield note("There is no block map, as the dump's main function cannot be read.")
        return
    settings: dict[tuple[Any, ...], tuple[int, int, dict[str, int]]] = {}
    for call in calls:
        rows, keys, scalars = _sizes(problem, call, main, sizes.of(manifest, main))
        settings.setdefault((rows, keys, *scalars.items()), (rows, keys, scalars))
    for rows, keys, scalars in list(settings.values())[:_MOST_MAPS]:
        tiles = geometry(problem, chosen, rows)
        if tiles is None:
            yield note("The kernel that runs has no tiles of rows and keys, so that there is no block map.")
            return
        yield from block_map(problem, tiles, rows, keys, scalars)
        if problem.lengths or problem.packed or problem.layout.mapped:
            yield note("Drawn for one batch whose keys fill their cache; a run visits those that lengths count.")


def _sizes(
    problem: AttentionProblem, call: Call, main: Main, sizes: Mapping[str, int]
) -> tuple[int, int, dict[str, int]]:
    """Query rows and keys of a call, and its integers; where they do not follow from sizes, usual ones."""
    arguments = dict(zip(problem.parameters(), call.arguments))
    scalars: dict[str, int] = {}
    for scalar in problem.scalars():
        try:
            scalars[scalar] = number(arguments[scalar], sizes)
        except (Unknown, KeyError):
            continue

    def along(buffer: str, axes: str) -> int:
        argument = arguments.get(buffer)
        dims = main.shape(argument.id) if isinstance(argument, ast.Name) else None
        try:
            return number(dims[axes.index("t")], sizes) if dims else _TAKEN
        except (Unknown, IndexError):
            return _TAKEN

    rows = problem.q_len if problem.q_len is not None else scalars.get("most_rows")
    keys = problem.kv_len if problem.kv_len is not None else scalars.get("most_keys")
    if rows is None:
        rows = _TAKEN if problem.packed else along("q", problem.row_axes)
    if keys is None:
        keys = _TAKEN if problem.layout.mapped else along("kv" if problem.layout.joint else "k", problem.layout.axes)
    return rows, keys, scalars
