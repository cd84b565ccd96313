"""Which random cases cover which feature of the serving operators on which target.

`python tests/serving/coverage_of_serving.py` writes docs/serving.md: the cases of the tests, every one of which follows
from a seed.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from pathlib import Path

import cache_attention_cases
import gpt_attention_cases
from gpt_case_features import DOMAINS, NA, TRAPS

PAGE = Path(__file__).resolve().parents[2] / "docs" / "serving.md"
TEXT = PAGE.with_name("serving_operators.md")

# Seed, configurations and calls of each, by test.
GPT = {"CPU": (0, 7, 20), "CPU, long": (1, 200, 10), "CUDA": (2, 2, 2), "CUDA, long": (3, 40, 2)}
PPL = {"CPU": (0, 7, 12), "CPU, long": (1, 200, 10), "CUDA": (2, 1, 2), "CUDA, long": (3, 20, 2)}

# What a call says of each feature of the cases.
ARGUMENTS = {
    "dtype": "qkv", "heads": "num_heads, num_kv_heads", "head_size": "hidden_size_per_head", "rows": "qkv",
    "parts": "qkv", "qkv_bias": "qkv_bias", "phase": "host_request_types",
    "chunks": "host_past_key_value_lengths", "cache": "past_key_value, use_cache", "pool": "host_kv_cache_pool_mapping",
    "holder": "host_kv_cache_pool_pointers", "offsets_rank": "kv_cache_block_offsets",
    "entries": "kv_cache_block_offsets", "tokens_per_block": "past_key_value", "layer": "layer_idx",
    "quantised": "kv_cache_quant_mode", "scales": "kv_orig_quant_scale, kv_quant_orig_scale",
    "attend_current_unquantised": "attend_current_unquantised", "fp8_context_fmha": "use_fp8_context_fmha",
    "window": "host_max_attention_window_sizes", "windows_per_layer": "host_max_attention_window_sizes",
    "sinks": "host_sink_token_length", "sink_form": "host_sink_token_length", "one_more_block": "use_one_more_block",
    "streamingllm": "streamingllm", "beams": "cache_indirection", "long_lengths": "sequence_length",
    "mask": "mask_type", "mask_form": "attention_mask, attention_packed_mask",
    "homo_head_pattern": "block_sparse_homo_head_pattern", "tp": "tp_size, tp_rank",
    "position": "position_embedding_type", "scaling": "rotary_embedding_scale_type",
    "rope_config": "rope_scaling_config", "table": "rotary_inv_freq, rotary_cos_sin",
    "rotary_dim": "rotary_embedding_dim", "relative_bias": "relative_attention_bias, max_distance",
    "relative_dtype": "relative_attention_bias", "slopes": "alibi_slopes", "logn": "logn_scaling",
    "softcap": "attn_logit_softcapping_scale", "q_scaling": "q_scaling", "cross": "do_cross_attention",
    "cross_rows": "cross_kv, encoder_input_lengths", "fp8_output": "attention_output_orig_quant_scale",
    "compat": "trt_mmha_compat", "splits": "multi_block_mode", "lengths_dtype": "sequence_length",
    "names": "enumerations by name", "redundant": "host_context_lengths, max_context_length",
    "poison_invisible": "NaN in what masks hide",
}  # fmt: skip


def gpt_counts(seed: int, configurations: int, calls: int) -> Counter[tuple[str, str]]:
    """Calls by feature and value."""
    found: Counter[tuple[str, str]] = Counter()
    for case in gpt_attention_cases.cases(seed, configurations):
        for name in DOMAINS:
            found[name, str(getattr(case, name))] += calls
        for trap in TRAPS:
            if dict(gpt_attention_cases.FEATURES)[f"trap: {trap}"](case):
                found["trap", trap] += calls
    return found


def ppl_counts(operator: str, seed: int, configurations: int, calls: int) -> Counter[tuple[str, str]]:
    found: Counter[tuple[str, str]] = Counter()
    for case in cache_attention_cases.cases(seed, configurations, operator):
        for name, value in case.features().items():
            found[name, str(value)] += calls
    return found


def table(first: str, rows: Iterable[tuple[str, str, list[int]]], columns: Iterable[str]) -> list[str]:
    heads = list(columns)
    lines = [f"| {first} | value | {' | '.join(heads)} |", "|---" * (len(heads) + 2) + "|"]
    for name, value, counts in rows:
        lines.append(f"| {name} | {value} | {' | '.join(str(n) if n else '-' for n in counts)} |")
    return lines


def page() -> str:
    gpt = [gpt_counts(*run) for run in GPT.values()]
    values = [(name, str(value)) for name, domain in DOMAINS.items() for value in domain if value != NA]
    rows = [(f"`{ARGUMENTS[name]}`", f"{name}: {value}", [c[name, value] for c in gpt]) for name, value in values]
    rows += [("several at once", trap, [c["trap", trap] for c in gpt]) for trap in TRAPS]
    lines = [TEXT.read_text().rstrip(), "", "## What the tests cover", "", *HEADER, "", "### gpt_attention", ""]
    lines += table("argument", rows, GPT)
    for operator in cache_attention_cases.INPUTS:
        ppl = [ppl_counts(operator, *run) for run in PPL.values()]
        known = sorted({key for counts in ppl for key in counts})
        lines += ["", f"### {operator}", ""]
        lines += table("feature", [(f"`{n}`", v, [c[n, v] for c in ppl]) for n, v in known], PPL)
    return "\n".join([*lines, ""])


HEADER = (
    "A number says how many random calls had the feature; every two features that go together meet in the long runs",
    "(`-m slow`). Attention is compared with float64, codes and scales bit for bit. `CUDA` is the emulator of",
    "`tests/cuda_emulation`, which runs whole artifacts on the CPU; what its few cases leave out shares the record and",
    "the kernels with what they have ([The record, field by field](records.md)). This page is written by",
    "`python tests/serving/coverage_of_serving.py`, from `docs/serving_operators.md` and the seeds of the tests.",
)

if __name__ == "__main__":
    PAGE.write_text(page())
    print(f"wrote {PAGE}")
