"""onnx-lowering: an ahead-of-time compiler for attention in ONNX models.

    import lowering
    module = lowering.compile("model.onnx", donate=("cache_k.*",))
    outputs = module.run({"x": x})
    module.save("out/")
    module = lowering.load("out/")      # needs no compiler

Names are loaded at first use, so that `load` and `run` never import the compiler.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from .machine import get_compiler, runtime_alone
from .version import VERSION

if TYPE_CHECKING:
    from . import flex as flex
    from .checking.check import check as check
    from .checking.verification import verify as verify
    from .compiling.compiler import compile as compile
    from .errors import ArtifactError as ArtifactError
    from .errors import CompilerError as CompilerError
    from .errors import InputError as InputError
    from .errors import LoweringError as LoweringError
    from .errors import ModelError as ModelError
    from .errors import NodeError as NodeError
    from .errors import TargetError as TargetError
    from .flex import FlexModule as FlexModule
    from .flex import compile_flex as compile_flex
    from .flex import flex_attention as flex_attention
    from .functions.gpt_attention import gpt_attention as gpt_attention
    from .graph.paged.serve import Serve as Serve
    from .profiling.benchmark import Profile as Profile
    from .profiling.benchmark import bench as bench
    from .profiling.throughput import Throughput as Throughput
    from .profiling.throughput import throughput as throughput
    from .runtime import Model as Model
    from .runtime import load as load
    from .runtime.batching import Batching as Batching
    from .serving import Batcher as Batcher
    from .serving import PagedKVCache as PagedKVCache
    from .serving import PoolFullError as PoolFullError
    from .serving import RequestError as RequestError
    from .tuning.batches import file_results as file_results
    from .tuning.tune import Tuning as Tuning
    from .tuning.tune import tune as tune

_HOME = {
    "compile": "compiling.compiler",
    "load": "runtime",
    "Model": "runtime",
    "Batching": "runtime.batching",
    "bench": "profiling.benchmark",
    "Profile": "profiling.benchmark",
    "throughput": "profiling.throughput",
    "Throughput": "profiling.throughput",
    "tune": "tuning.tune",
    "Tuning": "tuning.tune",
    "file_results": "tuning.batches",
    "gpt_attention": "functions.gpt_attention",
    "flex_attention": "flex",
    "compile_flex": "flex",
    "FlexModule": "flex",
    "Batcher": "serving",
    "PagedKVCache": "serving",
    "Serve": "graph.paged.serve",
    "PoolFullError": "serving",
    "RequestError": "serving",
    "check": "checking.check",
    "verify": "checking.verification",
    "LoweringError": "errors",
    "ModelError": "errors",
    "NodeError": "errors",
    "TargetError": "errors",
    "ArtifactError": "errors",
    "InputError": "errors",
    "CompilerError": "errors",
}

__version__ = VERSION
__all__ = sorted(_HOME)


def __getattr__(name: str) -> Any:
    if name == "flex":
        return importlib.import_module(".flex", __name__)
    if name not in _HOME:
        raise AttributeError(f"module 'lowering' has no attribute '{name}'")
    try:
        module = importlib.import_module(f".{_HOME[name]}", __name__)
    except ModuleNotFoundError as error:
        if not runtime_alone():
            raise
        raise ModuleNotFoundError(
            f"lowering.{name} needs the compiler, which onnx-lowering-runtime leaves out: {get_compiler()}.",
            name=error.name,
        ) from error
    return getattr(module, name)


def __dir__() -> list[str]:
    return list(__all__)
