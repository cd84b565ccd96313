"""Damaged models: each damage changes something, and each end is reported by its kind."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from typing import Any

import pytest

import lowering

from .mutants import __main__ as mutants
from .mutants import trial
from .mutants.damage import DAMAGES


@pytest.mark.parametrize("damage", sorted(DAMAGES))
def test_damages_change_models_and_repeat(damage: str) -> None:
    first = sorted(DAMAGES).index(damage)
    changed = 0
    for seed in range(first, first + 8 * len(DAMAGES), len(DAMAGES)):
        name, sample, data = mutants.mutant(seed)
        assert name == damage and mutants.mutant(seed) == (name, sample, data)
        changed += data != (sample / trial.MODEL).read_bytes()
    assert changed > 4


def late(path: object) -> Any:
    time.sleep(60)


def foreign(path: object) -> Any:
    raise lowering.LoweringError("run.kernel_failed", "tvm.error.InternalError: Check failed")


def raw(path: object) -> Any:
    raise KeyError("x")


def refused(path: object) -> Any:
    raise lowering.LoweringError("node.input_missing", "node 'a' has no input. Give it one.")


@pytest.mark.parametrize(
    ("check", "kind"),
    [(raw, "raw"), (foreign, "unclear"), (refused, "refused"), (late, "hang"), (lambda path: os.abort(), "crash")],
)
def test_ends(check: Callable[[object], Any], kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lowering, "check", check)
    monkeypatch.setattr(mutants, "_SECONDS", 2)
    assert mutants.judged(b"", [], compiles=False)[0] == kind


@pytest.mark.parametrize("name", ["artifact", "half"])
def test_files_that_are_left(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A compile that was rejected leaves a file."""

    def compile_to(folder: Any, path: Any) -> None:
        folder.with_name(name).mkdir()
        raise lowering.LoweringError("node.input_missing", "node 'a' has no input. Give it one.")

    monkeypatch.setattr(lowering, "check", refused)
    monkeypatch.setattr(trial.compiler, "compile_to", compile_to)
    kind, detail, _ = mutants.judged(b"", [], compiles=True)
    assert kind == "leftover files" and name in detail


@pytest.mark.parametrize("seed", range(len(DAMAGES)))
def test_one_of_each_damage(seed: int) -> None:
    kind, detail, _ = mutants.judged(mutants.mutant(seed)[2], [], compiles=False)
    assert kind in mutants.FINE, detail


@pytest.mark.slow
@pytest.mark.timeout(4 * 3600)
def test_fifteen_hundred_mutants(monkeypatch: pytest.MonkeyPatch) -> None:
    """`python -m tests.attacks.mutants` tells on the way."""
    monkeypatch.setattr("sys.argv", ["mutants"])
    assert mutants.main() == 0
