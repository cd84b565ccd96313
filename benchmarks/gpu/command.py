"""The command `python -m benchmarks cuda`; see there for the arguments."""

from __future__ import annotations

import argparse
import platform
import subprocess
import sys
import tempfile
from pathlib import Path


def run(arguments: argparse.Namespace) -> None:
    """Builds a bundle, or builds one and measures it here, or draws what was measured."""
    from .bundling import bundle

    python = arguments.python or ".".join(platform.python_version_tuple()[:2])
    if arguments.draw is not None:
        draw(arguments.draw)
    elif arguments.bundle is not None:
        plan = bundle.write(arguments.bundle, python)
        print(
            f"{len(plan.kernels)} kernels, {len(plan.cases)} cases and {len(plan.programs)} programs, "
            f"{bundle.size(arguments.bundle) / 1e6:.1f} MB. "
            f"On a host with a Hopper GPU and PyTorch: cd {arguments.bundle.name} && python measure.py --out results"
        )
    elif arguments.out is None:
        sys.exit("Name the folder of the results with --out, or build a bundle for another host with --bundle.")
    else:
        with tempfile.TemporaryDirectory() as folder:
            bundle.write(Path(folder), python)
            command = [sys.executable, f"{folder}/measure.py", "--out", arguments.out, "--minutes", arguments.minutes]
            command += ["--with", *arguments.requested] if arguments.requested else []
            command += ["--copy", arguments.copy] if arguments.copy else []
            sys.exit(subprocess.run([*map(str, command), "--", *arguments.case]).returncode)


def draw(path: Path) -> None:
    """Print the table and draw the picture of a results file. The cases are those of this version."""
    from . import report, results
    from .bundling import cases
    from .plan import Plan

    stored = results.read(path)
    plan = Plan(stored.bundle, *cases.plan())
    print(report.table(plan, stored))
    report.draw(plan, stored, path.with_suffix(".png"))
