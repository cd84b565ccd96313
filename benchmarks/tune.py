"""`python -m benchmarks tune`: tunes the models of cases at their sizes, for `cpu --tuned`."""

from __future__ import annotations

import argparse
import re

import onnx

import lowering

from .cases.case import Arrays, Case


def run(cases: list[Case], arguments: argparse.Namespace) -> None:
    """One model after the other, each for so many minutes."""
    for case in cases:
        model = case.model()
        donate = tuple(map(re.escape, case.in_place.values()))
        tuning = lowering.tune(
            model,
            arguments.database,
            budget=60 * arguments.minutes,
            sizes=[sizes(model, case.own_feeds())],
            threads=arguments.threads,
            effort=arguments.effort,
            donate=donate,
            seed=arguments.seed,
            **case.options,
        )
        trials, won = sum(o.trials for o in tuning.outcomes), sum(o.gain > 1 for o in tuning.outcomes)
        run = f"a run {tuning.gain:.2f}x by their shares, {tuning.whole_gain or 1.0:.2f}x measured"
        print(f"{case.name}: {trials} trials, {won} kernels won, {run}", flush=True)


def sizes(model: onnx.ModelProto, feeds: Arrays) -> dict[str, int]:
    """Return the symbolic dimensions of a model as they are in arrays."""
    return {
        dim.dim_param: size
        for port in model.graph.input
        if port.name in feeds
        for dim, size in zip(port.type.tensor_type.shape.dim, feeds[port.name].shape)
        if dim.dim_param
    }
