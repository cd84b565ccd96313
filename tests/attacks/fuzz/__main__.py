"""`python -m tests.attacks.fuzz importer --minutes 60`: fuzzes, and reports findings and where they were raised."""

from __future__ import annotations

import argparse
import hashlib
import importlib
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from .notes import CURRENT, ROOT

# Seconds for one input, and megabytes of a process.
_SECONDS, _MEGABYTES = 25, 5000
# Bytes of an input.
_LONGEST = 8192


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.attacks.fuzz", description=__doc__)
    parser.add_argument("target", choices=("importer", "loader"))
    parser.add_argument("--minutes", type=float, default=60)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--out", type=Path, help="a folder for what is found; default: a new one")
    options = parser.parse_args()
    out = options.out or Path(tempfile.mkdtemp(prefix=f"fuzz-{options.target}-"))
    out.mkdir(parents=True, exist_ok=True)
    inputs = out / "corpus"
    if not inputs.exists():
        inputs.mkdir()
        for k, data in enumerate(importlib.import_module(f"tests.attacks.fuzz.{options.target}").corpus()):
            (inputs / f"seed-{k}").write_bytes(data)
    print(f"inputs and findings in {out}, seed {options.seed}", flush=True)
    end, seed = time.monotonic() + 60 * options.minutes, options.seed
    while (left := int(end - time.monotonic())) > 5:
        _fuzz(options.target, out, inputs, left, seed)
        seed += 1
    return report_findings(options.target, out)


def _fuzz(target: str, out: Path, inputs: Path, seconds: int, seed: int) -> None:
    """Run one process until the time is up, or an input ends it or takes too long; that input is saved."""
    flags = [f"-max_total_time={seconds}", "-timeout=86400", f"-rss_limit_mb={_MEGABYTES}", f"-max_len={_LONGEST}"]
    flags += [f"-seed={seed}", f"-artifact_prefix={out}/saved-", "-print_final_stats=1"]
    command = [sys.executable, "-m", "tests.attacks.fuzz.target", target, str(out), *flags, str(inputs)]
    current = out / CURRENT
    current.unlink(missing_ok=True)
    with (out / "log.txt").open("ab") as log:
        process = subprocess.Popen(command, cwd=ROOT, stdout=log, stderr=log)
        late = False
        while process.poll() is None and not late:
            time.sleep(1)
            late = current.exists() and time.time() - current.stat().st_mtime > _SECONDS
        process.kill()
        process.wait()
    if late or (process.returncode and current.exists()):
        digest = hashlib.sha256(current.read_bytes()).hexdigest()[:12]
        current.rename(out / f"{'late' if late else 'death'}-{digest}")


def report_findings(target: str, out: Path) -> int:
    """Print the findings; return 1 if any is a fault of the compiler."""
    texts = sorted(out.glob("finding-*.txt"))
    for text in texts:
        location, _, trace = text.read_text().partition("\n\n")
        print(f"{text.stem}: {location}\n    {trace.strip().splitlines()[-1][:300]}")
    count = len(texts)
    for path in sorted(p for kind in ("late", "death") for p in out.glob(f"{kind}-*")):
        onnx_death = target == "importer" and _dies("onnx", path)
        death = onnx_death or _dies(target, path)
        count += bool(death and not onnx_death)
        print(f"{path.name}: {onnx_death or death or 'does not repeat'}{', onnx alone' if onnx_death else ''}")
    print(f"{count} findings")
    return int(count > 0)


def _dies(name: str, path: Path) -> str | None:
    """Return how and where a process that takes this input alone ends, or None if it ends well and in time."""
    command = [sys.executable, "-m", "tests.attacks.fuzz.blame", name, str(path), str(_SECONDS)]
    process = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    if process.returncode == 0:
        return None
    frames = [line.strip() for line in process.stderr.splitlines() if line.strip().startswith("File")]
    kind = "takes too long" if "Timeout" in process.stderr else f"ends with {process.returncode}"
    return f"{kind} at {frames[0] if frames else 'an unknown location'}"


if __name__ == "__main__":
    sys.exit(main())
