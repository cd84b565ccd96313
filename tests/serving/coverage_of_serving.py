"""The random cases that cover each feature of the serving operators on each target.

`python -m tests.serving.coverage_of_serving` writes docs/serving_coverage.md: the cases of the tests, which follow from
seeds.
"""

from __future__ import annotations

import importlib
import random
from collections import Counter
from collections.abc import Iterable
from dataclasses import asdict, is_dataclass
from pathlib import Path

from tests.serving.cache_attention import cache_attention_cases
from tests.serving.gpt_attention import gpt_attention_cases
from tests.serving.gpt_attention.gpt_case_features import DOMAINS, NA, TRAPS

PAGE = Path(__file__).resolve().parents[2] / "docs" / "serving_coverage.md"

# Seed, configurations and the number of calls of each, by test.
GPT = {"CPU": (0, 4, 20), "CPU, long": (1, 200, 10), "CUDA": (2, 2, 2), "CUDA, long": (3, 40, 2)}
PPL = {"CPU": (0, 4, 12), "CPU, long": (1, 200, 10), "CUDA": (2, 1, 2), "CUDA, long": (3, 20, 2)}

# Modules of tests with RUNS and with cases `drawn` from a number, by operator.
MICROSOFT = {
    "PagedAttention": "test_paged_attention",
    "DecoderMaskedMultiHeadAttention, MultiHeadAttention over caches with room": "test_decoder_attention",
    "GroupQueryAttention over codes": "test_quantized_caches",
}

# The arguments of a call that express each feature of the cases.
ARGUMENTS = {
    "dtype": "qkv", "heads": "num_heads, num_kv_heads", "head_size": "hidden_size_per_head", "rows": "qkv",
    "parts": "qkv", "qkv_bias": "qkv_bias", "phase": "host_request_types",
    "chunks": "host_past_key_value_lengths", "cache": "past_key_value, use_cache", "pool": "host_kv_cache_pool_mapping",
    "holder": "host_kv_cache_pool_pointers", "offsets_rank": "kv_cache_block_offsets",
    "entries": "kv_cache_block_offsets", "tokens_per_block": "past_key_value", "layer": "layer_idx",
    "quantized": "kv_cache_quant_mode", "scales": "kv_orig_quant_scale, kv_quant_orig_scale",
    "attend_current_unquantized": "attend_current_unquantized", "fp8_context_fmha": "use_fp8_context_fmha",
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


# Features without random cases: the tests on the CPU, and on the emulated GPU or the reason why there are none.
_DECODERS, _ON_GPU = "serving/test_served_decoders.py", "cuda/models/test_models.py::test_a_served_decoder"
_HOST, _UNREAD = "the same code, on the host", "the host does not read a GPU's tables"
OTHERS = [
    ("exports of 12 architectures, packed and ragged", f"{_DECODERS}::test_exports_of_every_architecture", _ON_GPU),
    ("windows, soft caps, masks as rules of positions", f"{_DECODERS}::test_packed_requests_equal_each_alone", _ON_GPU),
    ("int8 cache of a served decoder", f"{_DECODERS}::test_int8_cache", _ON_GPU),
    ("only blocks of the requests are written", f"{_DECODERS}::test_only_own_blocks_are_written", _ON_GPU),
    ("tables of any numbers stay inside", f"{_DECODERS}::test_hostile_tables_stay_inside",
     "cuda/attention/test_microsoft.py::test_equals_the_reference"),
    ("wrong tables are refused", f"{_DECODERS}::test_tables_that_do_not_fit", _UNREAD),
    ("states of linear attention", "serving/test_served_states.py::test_linear_attention_of_packed_requests",
     "cuda/attention/test_linear.py::test_packed_sequences"),
    ("states of convolutions", "serving/test_served_states.py::test_convolutions_of_packed_requests",
     "cuda/models/test_exported_decoders.py::test_served"),
    ("saved and loaded", f"{_DECODERS}::test_a_served_model_is_saved_and_loaded", _HOST),
    ("Batcher", "serving/test_batcher.py::test_every_request_gets_what_it_gets_alone", _ON_GPU),
    ("prefixes are shared", "serving/test_batcher.py::test_equal_beginnings_share_blocks", _HOST),
    ("PagedKVCache, any history", "serving/test_paged_cache_histories.py::test_histories", _HOST),
    ("KV write: bias, rotation and quantization at once",
     "attention/test_kv_write.py::test_writes_new_rows_and_nothing_else",
     "cuda/attention/test_kv_write_kernels.py::test_writes_new_rows_and_nothing_else"),
    ("layers share a cache", "serving/test_written_inputs.py::test_layers_share_a_cache", _HOST),
    ("checks in compiled models", "serving/test_compiled_checks.py::test_illegal_tables_are_refused", _UNREAD),
]  # fmt: skip


def list_other_tests() -> list[str]:
    """Return the table of other tests; raise LookupError for a test that does not exist."""
    lines = ["| feature | CPU | CUDA |", "|---|---|---|"]
    for feature, *where in OTHERS:
        cells = []
        for test in where:
            path, separator, name = test.partition("::")
            if separator and f"def {name}(" not in (PAGE.parents[1] / "tests" / path).read_text():
                raise LookupError(f"{path} has no {name}")
            cells.append(f"`tests/{test}`" if separator else test)
        lines.append(f"| {feature} | {' | '.join(cells)} |")
    return lines


def count_gpt(seed: int, configurations: int, calls: int) -> Counter[tuple[str, str]]:
    """Count calls by feature and value."""
    counts: Counter[tuple[str, str]] = Counter()
    for case in gpt_attention_cases.cases(seed, configurations):
        for name in DOMAINS:
            counts[name, str(getattr(case, name))] += calls
        for trap in TRAPS:
            if dict(gpt_attention_cases.FEATURES)[f"trap: {trap}"](case):
                counts["trap", trap] += calls
    return counts


def count_ppl(operator: str, seed: int, configurations: int, calls: int) -> Counter[tuple[str, str]]:
    counts: Counter[tuple[str, str]] = Counter()
    for case in cache_attention_cases.cases(seed, configurations, operator):
        for name, value in case.features().items():
            counts[name, str(value)] += calls
    return counts


def count_microsoft(module: str) -> list[Counter[tuple[str, str]]]:
    tests = importlib.import_module(f"tests.ops.microsoft.{module}")
    counts = []
    for run in GPT:
        numbers, calls = tests.RUNS[run]
        count: Counter[tuple[str, str]] = Counter()
        for number in numbers:
            case = tests.drawn(random.Random(number))
            for name, value in (asdict(case) if is_dataclass(case) else case).items():
                count[name, str(value)] += calls
        counts.append(count)
    return counts


def make_feature_table(counts: list[Counter[tuple[str, str]]], runs: Iterable[str]) -> list[str]:
    keys = sorted({key for count in counts for key in count})
    return make_table("feature", [(f"`{name}`", value, [c[name, value] for c in counts]) for name, value in keys], runs)


def make_table(first: str, rows: Iterable[tuple[str, str, list[int]]], columns: Iterable[str]) -> list[str]:
    heads = list(columns)
    lines = [f"| {first} | value | {' | '.join(heads)} |", "|---" * (len(heads) + 2) + "|"]
    for name, value, counts in rows:
        lines.append(f"| {name} | {value} | {' | '.join(str(n) if n else '-' for n in counts)} |")
    return lines


def make_page() -> str:
    gpt = [count_gpt(*run) for run in GPT.values()]
    values = [(name, str(value)) for name, domain in DOMAINS.items() for value in domain if value != NA]
    rows = [(f"`{ARGUMENTS[name]}`", f"{name}: {value}", [c[name, value] for c in gpt]) for name, value in values]
    rows += [("several at once", trap, [c["trap", trap] for c in gpt]) for trap in TRAPS]
    lines = ["# What the tests of serving cover", "", *HEADER, "", "## gpt_attention", ""]
    lines += make_table("argument", rows, GPT)
    for operator in cache_attention_cases.INPUTS:
        ppl = [count_ppl(operator, *run) for run in PPL.values()]
        lines += ["", f"## {operator}", "", *make_feature_table(ppl, PPL)]
    for operator, module in MICROSOFT.items():
        lines += ["", f"## com.microsoft {operator}", "", *make_feature_table(count_microsoft(module), GPT)]
    lines += ["", "## Whole decoders, caches and checks", "", *list_other_tests()]
    return "\n".join([*lines, ""])


HEADER = (
    "A number says how many random calls had the feature; every two features that go together meet in the long runs",
    "(`-m slow`). Attention is compared with float64, codes and scales bit for bit. `CUDA` is the emulator of",
    "`tests/cuda_emulation`, which runs whole artifacts on the CPU; what its few cases leave out shares the record and",
    "the kernels with what they have ([The record, field by field](records.md)). This page is written by",
    "`python -m tests.serving.coverage_of_serving` from the seeds of the tests; [serving.md](serving.md) says what",
    "each feature is.",
)

if __name__ == "__main__":
    PAGE.write_text(make_page())
    print(f"wrote {PAGE}")
