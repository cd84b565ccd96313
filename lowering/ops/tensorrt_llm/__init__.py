"""GptAttention of the domain tensorrt_llm: TensorRT-LLM's gpt_attention as an ONNX operator.

Names, layouts and formulas are those of tensorrt_llm.functional.gpt_attention (https://github.com/NVIDIA/TensorRT-LLM);
docs/serving.md describes each argument. The data flows through:

    settings.py    the attributes
    requests.py    the rows and keys of each request and beam, as a few int64 tables
    rotary.py      cosine and sine by row
    rows.py        queries, keys and values of this call, in the layout of the attention kernel
    cache.py       the cache as a CacheLayout, and its update
    scores.py      biases that are added to scores, and masks
    gpt_attention.py   the operator: its attentions over sets of keys, and their merge
"""

from __future__ import annotations

DOMAIN = "tensorrt_llm"
