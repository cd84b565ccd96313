"""`python -m tests.attacks.fuzz importer --minutes 60`: fuzzes, and tells what was found and where it was raised."""

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
    return told(options.target, out)


def _fuzz(target: str, out: Path, inputs: Path, seconds: int, seed: int) -> None:
    """One process until the time is up, or an input ends it or takes too long, which is then kept."""
    flags = [f"-max_total_time={seconds}", "-timeout=86400", f"-rss_limit_mb={_MEGABYTES}", f"-max_len={_LONGEST}"]
    flags += [f"-seed={seed}", f"-artifact_prefix={out}/kept-", "-print_final_stats=1"]
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


def told(target: str, out: Path) -> int:
    """Prints what was found; 1 if any of it is ours."""
    texts = sorted(out.glob("finding-*.txt"))
    for text in texts:
        place, _, trace = text.read_text().partition("\n\n")
        print(f"{text.stem}: {place}\n    {trace.strip().splitlines()[-1][:300]}")
    ours = len(texts)
    for path in sorted(p for kind in ("late", "death") for p in out.glob(f"{kind}-*")):
        theirs = target == "importer" and _dies("onnx", path)
        again = theirs or _dies(target, path)
        ours += bool(again and not theirs)
        print(f"{path.name}: {theirs or again or 'does not repeat'}{', onnx alone' if theirs else ''}")
    print(f"{ours} findings")
    return int(ours > 0)


def _dies(name: str, path: Path) -> str | None:
    """How a process that takes this input alone ends, and where, if it does not end well and in time."""
    command = [sys.executable, "-m", "tests.attacks.fuzz.blame", name, str(path), str(_SECONDS)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    if done.returncode == 0:
        return None
    frames = [line.strip() for line in done.stderr.splitlines() if line.strip().startswith("File")]
    kind = "takes too long" if "Timeout" in done.stderr else f"ends with {done.returncode}"
    return f"{kind} at {frames[0] if frames else 'an unknown place'}"


if __name__ == "__main__":
    sys.exit(main())
