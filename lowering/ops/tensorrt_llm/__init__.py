"""GptAttention of the domain tensorrt_llm: TensorRT-LLM's gpt_attention as an ONNX operator.

Names, layouts and formulas are those of tensorrt_llm.functional.gpt_attention
(https://github.com/NVIDIA/TensorRT-LLM); docs/serving.md says what each argument is. The way of the data:

    settings.py    what the attributes say
    requests.py    where the rows and keys of each request and beam are: a handful of int64 tables
    rotary.py      cosine and sine by row
    rows.py        queries, and keys and values of this call, as attention sees them
    cache.py       the cache as a CacheLayout, and its update
    scores.py      what is added to scores, and which keys masks show
    gpt_attention.py   the operator: which attentions over which keys, and how they become one
"""

from __future__ import annotations

import importlib
import pkgutil

DOMAIN = "tensorrt_llm"

for _module in pkgutil.iter_modules(__path__):
    importlib.import_module(f"{__name__}.{_module.name}")
