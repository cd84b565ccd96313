"""A kernel never serves a mod that has changed, whatever it was that changed."""

from __future__ import annotations

import functools
import sys
import types
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from lowering import flex
from lowering.flex.fingerprint import fingerprint

Q = np.arange(1, 25, dtype="f").reshape(1, 1, 6, 4) / 24


def run_mods(mods: list[Callable[..., Any]]) -> list[float]:
    return [float(flex.flex_attention(Q, Q, Q, score_mod=mod).sum()) for mod in mods]


def assert_served(changing: Callable[[float], Callable[..., Any]]) -> None:
    """changing(x) gives a mod that multiplies scores by x, perhaps the same function as before."""
    values = (1.0, 3.0, 1.0, -2.0, 0.0, 3.0)
    actual = [run_mods([changing(x)])[0] for x in values]
    expected = [run_mods([lambda s, b, h, i, j, x=x: s * x])[0] for x in values]
    assert actual == expected
    assert len(set(actual)) == 4


def test_cells_that_change() -> None:
    factor = 1.0

    def mod(s, b, h, i, j):
        return s * factor

    def changing(x: float) -> Callable[..., Any]:
        nonlocal factor
        factor = x
        return mod

    assert_served(changing)


FACTOR = 1.0


def by_global(s, b, h, i, j):
    return s * FACTOR


def calls_another(s, b, h, i, j):
    return by_global(s, b, h, i, j)


def calls_nested(s, b, h, i, j):
    return (lambda: s * FACTOR)()


class Holder:
    factor = 1.0

    def method(self, s, b, h, i, j):
        return s * self.factor

    def __call__(self, s, b, h, i, j):
        return s * self.factor

    @classmethod
    def of_class(cls, s, b, h, i, j):
        return s * cls.factor

    @staticmethod
    def of_nobody(s, b, h, i, j):
        return s * Holder.factor


SETTINGS = types.ModuleType("settings")
HOLDER = Holder()


def by_module(s, b, h, i, j):
    return s * SETTINGS.factor


def by_object(s, b, h, i, j):
    return s * HOLDER.factor


def by_class(s, b, h, i, j):
    return s * Holder.factor


def by_attribute(s, b, h, i, j):
    return s * by_attribute.factor


def by_name(s, b, h, i, j):
    return s * globals()["FACTOR"]


def by_import(s, b, h, i, j):
    from settings_of_test import factor

    return s * factor


@pytest.mark.parametrize("mod", [by_global, calls_another, calls_nested, by_name], ids=lambda mod: mod.__name__)
def test_globals_that_change(mod: Callable[..., Any], monkeypatch: pytest.MonkeyPatch) -> None:
    def changing(x: float) -> Callable[..., Any]:
        monkeypatch.setitem(globals(), "FACTOR", x)
        return mod

    assert_served(changing)


@pytest.mark.parametrize(
    ("mod", "holder"),
    [
        (by_module, SETTINGS),
        (by_object, HOLDER),
        (by_class, Holder),
        (by_attribute, by_attribute),
        (HOLDER.method, HOLDER),
        (HOLDER, HOLDER),
        (Holder.of_class, Holder),
        (Holder.of_nobody, Holder),
        (by_import, types.ModuleType("settings_of_test")),
    ],
    ids=["module", "object", "class", "attribute", "method", "callable", "class method", "static method", "import"],
)
def test_attributes_that_change(mod: Callable[..., Any], holder: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "settings_of_test", holder)

    def changing(x: float) -> Callable[..., Any]:
        monkeypatch.setattr(holder, "factor", x, raising=False)
        return mod

    assert_served(changing)


def test_mutable_objects_in_closures() -> None:
    container: Any
    for container, put in (
        ([1.0], lambda container, x: container.__setitem__(0, x)),
        ({0: 1.0}, lambda container, x: container.__setitem__(0, x)),
        (np.ones(1), lambda container, x: container.__setitem__(0, x)),
        (([1.0],), lambda container, x: container[0].__setitem__(0, x)),
    ):

        def changing(x: float, container: Any = container, put: Any = put) -> Callable[..., Any]:
            put(container, x)

            def mod(s, b, h, i, j):
                element = container[0]
                return s * float(element[0] if isinstance(element, list) else element)

            return mod

        assert_served(changing)


def test_methods_of_objects_in_closures() -> None:
    """They are builtin functions, and their results change."""
    container = {"factor": 1.0}
    get = container.get

    def mod(s, b, h, i, j):
        return s * get("factor")

    assert_served(lambda x: container.update(factor=x) or mod)


def test_defaults_that_change() -> None:
    def mod(s, b, h, i, j, factor=1.0):
        return s * factor

    def named(s, b, h, i, j, *, factor=1.0):
        return s * factor

    assert_served(lambda x: setattr(mod, "__defaults__", (x,)) or mod)
    assert_served(lambda x: setattr(named, "__kwdefaults__", {"factor": x}) or named)


def test_code_that_changes() -> None:
    def mod(s, b, h, i, j):
        return s * 1.0

    source = "def other(s, b, h, i, j):\n    return s * {}"

    def changing(x: float) -> Callable[..., Any]:
        scope: dict[str, Any] = {}
        exec(source.format(x), scope)
        mod.__code__ = scope["other"].__code__
        return mod

    assert_served(changing)


def test_partials() -> None:
    def scaled(factor, s, b, h, i, j, shift=0):
        return s * factor + shift

    assert_served(lambda x: functools.partial(scaled, x))
    assert_served(lambda x: functools.partial(functools.partial(scaled, shift=0), x))


def test_functions_made_in_a_loop() -> None:
    """With one code object, by a cell that all of them share and by cells of their own."""
    shared = [lambda s, b, h, i, j: s * factor for factor in (1.0, 3.0)]  # noqa: B023
    assert run_mods(shared)[0] == run_mods(shared)[1]

    def scaled(factor: float) -> Callable[..., Any]:
        return lambda s, b, h, i, j: s * factor

    own = [scaled(factor) for factor in (1.0, 3.0, -0.0, 0.0)]
    assert run_mods(own) == run_mods([lambda s, b, h, i, j, x=x: s * x for x in (1.0, 3.0, -0.0, 0.0)])
    assert fingerprint(own[2]) != fingerprint(own[3])
    defined = []
    for factor in (1.0, 3.0):

        def mod(s, b, h, i, j, factor=factor):
            return s * factor

        defined.append(mod)
    assert run_mods(defined) == run_mods(own[:2])


def test_functions_that_call_themselves() -> None:
    def mod(s, b, h, i, j, left=3):
        return s if left == 0 else mod(s * 2, b, h, i, j, left - 1)

    def even(s, left):
        return s if left == 0 else odd(s * 2, left - 1)

    def odd(s, left):
        return even(s * 2, left - 1)

    expected = run_mods([lambda s, b, h, i, j: s * 8, lambda s, b, h, i, j: s * 16])
    assert run_mods([mod, lambda s, b, h, i, j: even(s, 4)]) == expected
    assert fingerprint(mod) is not None


def test_numbers_that_are_equal_and_differ() -> None:
    """True, 1 and 1.0 are different to a mod: i // 1.0 is not an integer."""

    def divided(by: Any) -> Callable[..., Any]:
        return lambda s, b, h, i, j: s + i // by * flex.where(s > 0, 1, 0)

    assert len({fingerprint(divided(by)) for by in (True, 1, 1.0, np.int64(1), np.float32(1))}) == 5


def test_combined_mods_are_told_apart_and_found_again() -> None:
    masks = [flex.and_masks, flex.or_masks]
    mods = [flex.masks.causal, flex.masks.sliding_window(2), flex.masks.sliding_window(3)]
    combined = [mask(a, b) for mask in masks for a in mods for b in mods if a is not b]
    assert len({fingerprint(mod) for mod in combined}) == len(combined)
    again = flex.and_masks(flex.masks.causal, flex.masks.sliding_window(2))
    assert fingerprint(again) == fingerprint(combined[0]) is not None
