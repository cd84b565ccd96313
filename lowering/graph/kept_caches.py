"""What a decoder keeps between its calls: caches of slots, states, and which inputs tokens and masks go to.

Whatever an exporter wrote its caches by, the compiled decoder is told of them in the same words (`DecoderSpec`).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace

import onnx_ir as ir

from ..fusion.matching import dims, operand
from ..fusion.sizes import InferSizesPass
from ..manifest import DecoderSpec, SlotCaches
from .cache_forms import drop_unused_inputs, grows
from .roles import Roles, find_roles
from .scattered_caches import check_capacity, find_scattered_caches
from .states import States, find_states
from .static_cache import LENGTH, use_static_caches


@dataclass(frozen=True)
class KeptCaches:
    """donated: output by input, of caches that are written in place."""

    donated: dict[str, str] = field(default_factory=dict)
    slots: SlotCaches | None = None
    decoder: DecoderSpec | None = None

    @property
    def called(self) -> set[str]:
        """Names of the inputs that change from call to call."""
        names = set(self.donated)
        if (slots := self.slots) is not None:
            names |= {slots.length, *([] if slots.tokens is None else slots.tokens[:1])}
        if (spec := self.decoder) is not None:
            names |= {spec.ids, spec.mask, spec.positions, *spec.per_token, spec.starts, spec.ends, *spec.states} - {""}
        return names


def keep_caches(model: ir.Model, capacity: int | None, donated: Mapping[str, str]) -> KeptCaches:
    """Rewrite growing caches of a model that `unify_caches` has been through for `capacity` tokens.

    Without a capacity the model stays as it is: only one that writes its own caches, all of which are donated, is a
    decoder then. Raises ModelError for a model that keeps nothing, or caches of another capacity.
    """
    if capacity is None and not donated:
        return KeptCaches()
    InferSizesPass()(model)
    scattered = find_scattered_caches(model)
    if scattered is not None and (capacity is not None or scattered.caches.keys() <= donated.keys()):
        if capacity is not None:
            check_capacity(scattered, capacity)
        names = {*scattered.caches, *scattered.caches.values(), scattered.starts, scattered.ends}
        spec = _decoder_of(model, names, scattered.capacity, scattered.starts, scattered.ends)
        return KeptCaches(scattered.caches, None, spec)
    if capacity is None:
        return KeptCaches()
    values = [value for node in model.graph if grows(node) for value in (operand(node, 0), node.outputs[0])]
    caches = {str(value.name) for value in values}
    spec = _decoder_of(model, caches, capacity)
    if spec.states and not caches:
        return KeptCaches({}, None, spec)
    static = use_static_caches(model, capacity, Roles(spec.ids, spec.mask, spec.positions))
    drop_unused_inputs(model, rank=4)
    slots = SlotCaches(capacity, LENGTH, static.tokens, static.rings, static.rows)
    return KeptCaches(static.caches, slots, replace(spec, most=spec.most or static.rows))


def _decoder_of(model: ir.Model, kept: set[str], capacity: int, starts: str = "", ends: str = "") -> DecoderSpec:
    roles = find_roles(model, Roles(""), kept)
    ids = next((value for value in model.graph.inputs if value.name == roles.ids), None)
    used = {*kept, roles.ids, roles.mask, roles.positions, *roles.per_token}
    states = States({}) if ids is None else find_states(model, used, *dims(ids)[:2])
    most = 1 if states.one_token else None
    return DecoderSpec(
        capacity, roles.ids, roles.mask, roles.positions, roles.per_token, states.by_input, starts, ends, most
    )
