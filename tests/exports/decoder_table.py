"""Which decoders of ONNX Runtime's exporter get which of `static_cache` and `serve`, measured.

`python tests/exports/mobius_models.py --all --folder F`, then `python tests/exports/decoder_table.py F` writes
docs/decoders.md. Each model is measured in a process of its own.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

PAGE = Path(__file__).resolve().parents[2] / "docs" / "decoders.md"

HEADER = """# Decoders

Written by `python tests/exports/decoder_table.py F`; do not edit. Architectures as ONNX Runtime's exporter
(mobius-onnx) writes them, with tiny random weights
([tests/exports/mobius_models.py](../tests/exports/mobius_models.py)): their Attention nodes hold the caches. Errors are
the largest difference from onnxruntime's logits for whole sequences, relative to the largest logit.

*In place*: `static_cache=48`, three sequences, a prompt in two calls and 8 steps. *Served*: four requests of 3 to 40
tokens over a paged cache. Decoders that read what an encoder made have a source for each sequence and request.

| architecture | caches | states | in place | served |
|---|---|---|---|---|
"""


def measure(path: Path) -> dict[str, Any]:
    """Errors by form, or the reason why there are none."""
    import test_decoders as cases

    cases.FOLDER = path.parent
    found: dict[str, Any] = {}
    for name, run in (("in place", cases.error_in_place), ("served", cases.error_served)):
        try:
            found[name] = run(path.stem, None)
        except Exception as error:
            found[name] = str(error).replace("|", "/").split(". ")[0][:160]
    if isinstance(found["in place"], float):
        manifest = cases.compiled(path.stem).manifest
        assert manifest.decoder is not None
        found["states"] = len(manifest.decoder.states)
        found["caches"] = len(manifest.donated.keys() - manifest.decoder.states.keys())
    return found


def row(name: str, found: dict[str, Any]) -> str:
    cells = [f"{value:.1e}" if isinstance(value, float) else value for value in map(found.get, ("in place", "served"))]
    return f"| {name} | {found.get('caches', '-')} | {found.get('states', '-')} | {' | '.join(map(str, cells))} |"


def measured_apart(path: Path) -> str:
    """The row of a model, measured in a process of its own."""
    command = [sys.executable, __file__, str(path.parent), "--one", str(path)]
    done = subprocess.run(command, capture_output=True, text=True)
    found = json.loads(done.stdout.splitlines()[-1]) if done.returncode == 0 else {"in place": done.stderr[-100:]}
    text = row(path.stem, found)
    print(text, flush=True)
    return text


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("folder", type=Path)
    parser.add_argument("--one", type=Path, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.one:
        print(json.dumps(measure(arguments.one)))
        return
    paths = sorted(arguments.folder.glob("*.onnx"))
    with ThreadPoolExecutor(os.cpu_count()) as pool:
        rows = list(pool.map(measured_apart, paths))
    PAGE.write_text(HEADER + "\n".join(rows) + "\n")


if __name__ == "__main__":
    sys.path.append(str(Path(__file__).parents[1]))  # for `thinned`
    main()
