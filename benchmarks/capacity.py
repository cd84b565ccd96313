"""Does a decode step cost more when the cache has room to grow? `python benchmarks/capacity.py [--json FILE]`

The demo's decoder with donated caches of two capacities, both holding the same number of tokens, in turns in one run.
"""

from __future__ import annotations

import argparse
import json
from dataclasses import asdict
from pathlib import Path

import numpy as np
from timing import interleaved

import lowering
from lowering.demo.decoder import DecoderConfig, build_decoder

CAPACITIES = (1024, 8192)
TOKENS = 512  # in the cache


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", type=Path, help="write the figures here")
    parser.add_argument("--repeats", type=int, default=15)
    arguments = parser.parse_args()
    config = DecoderConfig()
    module = lowering.compile(build_decoder(config), donate=("cache_.*",), threads=1)

    steps = {}
    for capacity in CAPACITIES:
        shape = (1, config.kv_heads, capacity, config.head_dim)
        caches = {t.name: np.zeros(shape, np.float32) for t in module.inputs if t.name.startswith("cache_")}
        prompt = np.random.default_rng(0).integers(0, config.vocabulary, (1, TOKENS))
        module.run({"ids": prompt, "write_indices": np.zeros(1, np.int64), **caches})
        # The step is repeated at one position: it writes the same row again.
        token = {"ids": np.array([[7]]), "write_indices": np.array([TOKENS])}
        steps[str(capacity)] = module.bind({**token, **caches})

    timings = interleaved(steps, arguments.repeats)
    for name, t in timings.items():
        spread = f"{t.low * 1e6:.0f} to {t.high * 1e6:.0f}"
        print(f"capacity {name:>5}: {t.median * 1e6:.0f} us ({spread}), CPU {t.cpu * 1e6:.0f}")
    small, large = (timings[str(capacity)] for capacity in CAPACITIES)
    print(
        f"{CAPACITIES[1]} / {CAPACITIES[0]}: {large.median / small.median:.3f} (CPU time {large.cpu / small.cpu:.3f})"
    )
    if arguments.json is not None:
        arguments.json.parent.mkdir(parents=True, exist_ok=True)
        arguments.json.write_text(json.dumps({c: asdict(t) for c, t in timings.items()}, indent=1) + "\n")


if __name__ == "__main__":
    main()
