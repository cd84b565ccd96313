"""The caches and states of a decoder between its calls, and the inputs for tokens and masks.

Whatever form an exporter wrote its caches in, the compiled decoder describes them by the same record (`DecoderSpec`).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace

import onnx_ir as ir

from ...manifest import DecoderSpec, SlotCaches
from ..rewriting.matching import dims, operand
from ..rewriting.sizes import InferSizesPass
from .cache_forms import drop_unused_inputs, is_growing_cache
from .roles import InputRoles, find_roles
from .scattered_caches import check_capacity, find_scattered_caches
from .states import DecoderStates, find_states
from .static_cache import PAST_LENGTH, use_static_caches


@dataclass(frozen=True)
class DecoderCaches:
    """The caches of a model; donated: output by input, for caches that are written in place."""

    donated: dict[str, str] = field(default_factory=dict)
    slots: SlotCaches | None = None
    decoder: DecoderSpec | None = None

    @property
    def changing_inputs(self) -> set[str]:
        """Return the names of the inputs that change from call to call."""
        names = set(self.donated)
        if (slots := self.slots) is not None:
            names |= {slots.length, *([] if slots.tokens is None else slots.tokens[:1])}
        if (spec := self.decoder) is not None:
            names |= {spec.ids, spec.mask, spec.positions, *spec.per_token, spec.starts, spec.ends, *spec.states} - {""}
        return names


def convert_caches(model: ir.Model, capacity: int | None, donated: Mapping[str, str]) -> DecoderCaches:
    """Rewrite growing caches of a model that `unify_caches` has processed for `capacity` tokens.

    Without a capacity the model stays as it is. It is then a decoder only if it writes its own caches, all of which are
    donated.

    Raises:
        ModelError: The model has neither caches nor states, or has caches of another capacity.
    """
    if capacity is None and not donated:
        return DecoderCaches()
    InferSizesPass()(model)
    scattered = find_scattered_caches(model)
    if scattered is not None and (capacity is not None or scattered.caches.keys() <= donated.keys()):
        if capacity is not None:
            check_capacity(scattered, capacity)
        names = {*scattered.caches, *scattered.caches.values(), scattered.starts, scattered.ends}
        spec = _describe_decoder(model, names, scattered.capacity, scattered.starts, scattered.ends)
        return DecoderCaches(scattered.caches, None, spec)
    if capacity is None:
        return DecoderCaches()
    values = [value for node in model.graph if is_growing_cache(node) for value in (operand(node, 0), node.outputs[0])]
    caches = {str(value.name) for value in values}
    spec = _describe_decoder(model, caches, capacity)
    if spec.states and not caches:
        return DecoderCaches({}, None, spec)
    static = use_static_caches(model, capacity, InputRoles(spec.ids, spec.mask, spec.positions))
    drop_unused_inputs(model, rank=4)
    slots = SlotCaches(capacity, PAST_LENGTH, static.tokens, static.rings, static.rows)
    return DecoderCaches(static.caches, slots, replace(spec, most=spec.most or static.rows))


def _describe_decoder(
    model: ir.Model, cache_names: set[str], capacity: int, starts: str = "", ends: str = ""
) -> DecoderSpec:
    roles = find_roles(model, InputRoles(""), cache_names)
    ids = next((value for value in model.graph.inputs if value.name == roles.ids), None)
    used = {*cache_names, roles.ids, roles.mask, roles.positions, *roles.per_token}
    states = DecoderStates({}) if ids is None else find_states(model, used, *dims(ids)[:2])
    max_tokens = 1 if states.is_single_token else None
    return DecoderSpec(
        capacity, roles.ids, roles.mask, roles.positions, roles.per_token, states.by_input, starts, ends, max_tokens
    )
