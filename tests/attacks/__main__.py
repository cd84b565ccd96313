"""`python -m tests.attacks [operator ...] [--cases N] [--seed N]`: attacks, and a table of how they ended."""

from __future__ import annotations

import argparse
import sys

from .campaign import campaign, name_of, tabulated, text
from .generators import GENERATORS
from .pool import FINDINGS, attack_all


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.attacks", description=__doc__)
    parser.add_argument("operators", nargs="*", help="Gather, com.microsoft.Gelu, ...; default: all")
    parser.add_argument("--cases", type=int, default=1000, help="calls in all, about")
    parser.add_argument("--calls", type=int, default=3, help="calls of each compiled model")
    parser.add_argument("--seed", type=int, help="one attack on each operator, by this number, told call by call")
    parser.add_argument("--first-seed", type=int, default=0, help="where the seeds of --cases begin")
    parser.add_argument("--processes", type=int, default=2)
    options = parser.parse_args()
    names = {name_of(*key): key for key in sorted(GENERATORS)}
    unknown = set(options.operators) - set(names)
    if unknown:
        parser.error(f"no such operator: {', '.join(sorted(unknown))}. There are {', '.join(names)}.")
    chosen = [names[n] for n in options.operators or names]
    if options.seed is not None:
        attacks = [(domain, op, options.seed, options.calls) for domain, op in chosen]
        running = (o for outcomes in attack_all(attacks, min(options.processes, len(attacks))) for o in outcomes)
    else:
        running = campaign(chosen, options.cases, options.calls, options.first_seed, options.processes)
    outcomes = []
    for outcome in running:
        outcomes.append(outcome)
        if outcome.kind in FINDINGS or options.seed is not None:
            print(outcome, flush=True)
    print(text(tabulated(outcomes)))
    return int(any(o.kind in FINDINGS for o in outcomes))


if __name__ == "__main__":
    sys.exit(main())
