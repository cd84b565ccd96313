"""Calls of gpt_attention with a window or an attribute that is out of range, unknown or refused."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np

from tests.serving.gpt_attention.gpt_call_drawing import Drawing
from tests.serving.gpt_attention.gpt_case_features import ALIBI, DOMAINS
from tests.serving.gpt_attention.gpt_malformed_types import CACHED, SELF, Blame, Defect, replace_arguments

# windows


def _window_of(value: int) -> Any:
    def corrupt(drawing: Drawing) -> Blame:
        sizes = drawing.arguments["host_max_attention_window_sizes"]
        sizes[drawing.case.layer % len(sizes)] = value
        return ("host_max_attention_window_sizes",), ()

    return corrupt


def _sinks_fill(drawing: Drawing) -> Blame:
    sizes = drawing.arguments["host_max_attention_window_sizes"]
    window = int(sizes[drawing.case.layer % len(sizes)])
    drawing.arguments["host_sink_token_length"] = drawing.array([window + drawing.number(0, 2)])
    return ("host_sink_token_length", "host_max_attention_window_sizes"), ()


def _beams_in_window(drawing: Drawing) -> Blame:
    longest = max(drawing.lengths.total)
    if longest == 1:
        return None
    drawing.arguments["host_max_attention_window_sizes"] = drawing.array([longest - 1])
    wrong = tuple(b for b, length in enumerate(drawing.lengths.total) if length == longest)
    return ("host_max_attention_window_sizes", "cache_indirection"), wrong


def _windows() -> Iterator[Defect]:
    windowed = {"window": ("wide", "narrow"), "sinks": "none"} | SELF
    yield Defect("W < 1", "a window of 0", windowed, _window_of(0))
    yield Defect("W < 1", "a negative window", windowed, _window_of(-3))
    sunk = {"window": ("wide", "narrow"), "sinks": ("zero", "whole blocks", "bubble"), "sink_form": "array"}
    yield Defect("Sk >= W", "sinks fill the window", sunk | SELF, _sinks_fill)
    beams = {"beams": (2, 3), "window": "none", "sinks": "none"} | SELF
    yield Defect("section 6: beams with a window", "beams with a window", beams, _beams_in_window)


# attributes


def _one_bit(drawing: Drawing) -> Blame:
    """Make the two masks disagree about a row and its own key, which every window shows."""
    mask = drawing.arguments["attention_mask"]
    own = 0 if drawing.cross else drawing.lengths.past[0]
    mask[0, own] = not mask[0, own]
    return ("attention_mask", "attention_packed_mask"), ()


def _attributes() -> Iterator[Defect]:
    for factor in (0.0, -1.0):
        yield Defect("q_scaling <= 0", f"q_scaling {factor}", {}, replace_arguments(("q_scaling",), q_scaling=factor))
    name = "attn_logit_softcapping_scale"
    yield Defect("softcap < 0", "softcap -1", {}, replace_arguments((name,), attn_logit_softcapping_scale=-1.0))
    unmasked: dict[str, Any] = {"mask": DOMAINS["mask"][:-1]}
    for mask in (6, "custom_mask"):
        blame = ("mask_type", "attention_mask")
        yield Defect(
            "custom_mask without a mask", f"mask_type {mask!r}", unmasked, replace_arguments(blame, mask_type=mask)
        )
    yield Defect("section 4: both masks must agree", "masks that disagree", {"mask_form": "both"}, _one_bit)
    line = "an unknown enumeration value"
    for argument, values in (
        ("mask_type", (7, -1, "diagonal")),
        ("position_embedding_type", (10, -1, "rope")),
        ("rotary_embedding_scale_type", (7, -1, "ntk")),
    ):
        for value in values:
            features: dict[str, Any] = (
                {"position": ("rope_gptj", "rope_gpt_neox")} if argument.startswith("rotary") else {}
            )
            if argument.startswith("position"):
                features = {"position": "learned_absolute"}
            yield Defect(
                line, f"{argument} {value!r}", unmasked | features, replace_arguments((argument,), **{argument: value})
            )
    yield Defect("an unknown argument", "color", {}, replace_arguments(("color",), color=1), TypeError)


def _refused() -> Iterator[Defect]:
    line = "section 1: refused by name"
    errors = (ValueError, NotImplementedError)
    plain = {"position": "learned_absolute", "redundant": False}
    for value in (7, "chatglm", 9, "mrope"):
        blame = replace_arguments(("position_embedding_type",), position_embedding_type=value)
        yield Defect(line, f"position type {value!r}", plain, blame, errors)
    for value in (6, "mrope"):
        blame = replace_arguments(("rotary_embedding_scale_type",), rotary_embedding_scale_type=value)
        yield Defect(line, f"scale type {value!r}", {"position": ("rope_gptj", "rope_gpt_neox")}, blame, errors)
    for argument, setting in (
        ("vision_start", 1),
        ("vision_length", 4),
        ("spec_decoding_is_generation_length_variable", True),
        ("spec_decoding_max_generation_length", 4),
        ("spec_decoding_generation_lengths", np.ones(1, np.int32)),
        ("spec_decoding_position_offsets", np.zeros((1, 4), np.int32)),
        ("spec_decoding_packed_mask", np.ones((4, 1), np.int32)),
        ("spec_decoding_use", np.ones(1, np.int32)),
        ("mrope_rotary_cos_sin", np.ones((1, 64), np.float32)),
        ("mrope_position_deltas", np.ones((1, 1), np.int32)),
        ("is_mla_enabled_flag", True),
        ("cp_group", [0, 1]),
        ("cp_size", 2),
        ("cp_rank", 1),
        ("skip_attn", np.ones(1, bool)),
    ):
        yield Defect(line, argument, {}, replace_arguments((argument,), **{argument: setting}), errors)


def _biased(drawing: Drawing) -> Blame:
    drawing.arguments["relative_attention_bias"] = np.zeros((drawing.heads, 99, 99), np.float32)
    return ("relative_attention_bias", "do_cross_attention"), ()


def _crossed() -> Iterator[Defect]:
    line = "section 6: errors of cross attention"
    cross = {"cross": ("wide", "narrow"), "position": "learned_absolute"}
    for position in ALIBI:
        blame = replace_arguments(("position_embedding_type", "do_cross_attention"), position_embedding_type=position)
        yield Defect(line, position, cross, blame)
    yield Defect(line, "a relative bias", cross, _biased)
    streaming = replace_arguments(("streamingllm", "do_cross_attention"), streamingllm=True)
    first = {"chunks": "first", "beams": ("none", 1)} | CACHED
    yield Defect(line, "streamingllm", cross | first, streaming)
    streaming = replace_arguments(("streamingllm", "cache_indirection"), streamingllm=True)
    beams = {"beams": (2, 3), "phase": "generation", "sinks": "none"}
    yield Defect("section 5: not with beams", "streamingllm with beams", beams | SELF, streaming)
    buckets = {"relative_bias": "implicit"}
    for value in (1, 2):
        yield Defect(
            "section 4: max_distance <= e",
            "max_distance",
            buckets,
            replace_arguments(("max_distance",), max_distance=value),
        )


ATTRIBUTES: tuple[Defect, ...] = (*_windows(), *_attributes(), *_refused(), *_crossed())
