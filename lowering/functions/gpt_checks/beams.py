"""Checks of cache_indirection of gpt_attention: the beam that each earlier token after the prompt is read from."""

from __future__ import annotations

import numpy as np

from .rows import QkvShape, RequestLengths
from .settings import CallSettings
from .values import find_first, find_outside, refuse


def check_beams(indirection: np.ndarray, settings: CallSettings, rows: QkvShape, requests: RequestLengths) -> None:
    """Check that the entries of tokens that are read name beams. Other entries are never read."""
    steps = slice(requests.contexts, None)
    prompt, past = requests.prompt[steps], requests.past[steps]
    if settings.is_cross or not len(past):
        return
    if (wrong := (prompt < 0) | (prompt > past)).any():
        b = find_first(wrong)
        refuse(
            "gpt_attention.prompt_length_mismatch",
            f"context_lengths of request {requests.contexts + b} is {prompt[b]}, host_past_key_value_lengths {past[b]}",
            "give the length of its whole prompt, which all its beams share and which lies in the cache",
        )
    oldest = prompt  # the oldest token that is read, apart from the sinks
    if settings.window is not None:
        left = settings.window - settings.sinks - (0 if settings.is_trt_compatible else 1)
        oldest = np.maximum(prompt, past - left)
    end = np.where(oldest < past, past, np.where(prompt < past, np.minimum(settings.sinks, past), 0))
    table = indirection[steps]
    if (wrong := end > table.shape[2]).any():
        b = find_first(wrong)
        refuse(
            "gpt_attention.indirection_too_short",
            f"cache_indirection is for {table.shape[2]} tokens, and request {requests.contexts + b} needs {end[b]}",
            f"make its last axis at least {end.max()} long",
        )
    start, stop = int(prompt.min()), int(end.max())
    if start >= stop:
        return
    foreign = find_outside(table[:, :, start:stop], rows.beams)
    if not foreign.any():
        return
    token = np.arange(start, stop)
    read = (token >= prompt[:, None]) & (token < past[:, None])
    read &= (token < settings.sinks) | (token >= oldest[:, None])
    foreign &= read[:, None]
    if foreign.any():
        b, beam, offset = (int(position) for position in np.argwhere(foreign)[0])
        refuse(
            "gpt_attention.beam_out_of_range",
            f"cache_indirection of request {requests.contexts + b}, beam {beam}, token {start + offset}, is "
            f"{table[b, beam, start + offset]}, and there are {rows.beams} beams",
            f"name a beam from 0 to {rows.beams - 1}",
        )


def find_read_tokens(table: np.ndarray, prompt: np.ndarray, past: np.ndarray) -> np.ndarray:
    """Return bool (requests, beams, tokens): the tokens after the prompt that some beam reads from this one."""
    token = np.arange(table.shape[2])
    read = (token >= prompt[:, None]) & (token < past[:, None])
    return np.stack([(table == beam).any(axis=1) & read for beam in range(table.shape[1])], axis=1)
