"""Attacks on operators whose indices and sizes come from data, by name: inputs of calls, legal ones and illegal ones.

`python -m tests.ops.attacks NAME` runs the attacks of that name in a process of its own. The first that fails ends it.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import Any

import numpy as np

from .operator_attack import Attack, run_attack

BIG = 2**62


def floats(*shape: int) -> np.ndarray:
    return np.arange(1, 1 + np.prod(shape, dtype=int), dtype=np.float32).reshape(shape)


def ints(*values: Any) -> np.ndarray:
    return np.array(values, np.int64)


def scalar(value: int) -> np.ndarray:
    return np.array(value, np.int64)


X, NONE, ROWS = floats(2, 3), floats(0, 3), floats(2, 0)
_AB, _N = ["a", "b"], ["n"]


def _attack_axes(operator: str, legal: Sequence[np.ndarray], x: np.ndarray = X, **attributes: Any) -> Attack:
    """Attack an operator whose second input names axes of the first."""
    calls = [(True, [x, a]) for a in legal] + [(False, [x, np.full_like(legal[0], v)]) for v in (2, 5, -3, BIG, -BIG)]
    return Attack(operator, [_AB, legal[0].shape], calls, attributes=attributes)


def _attack_channels(operator: str, vectors: int, opset: int = 22, **attributes: Any) -> Attack:
    """Attack an operator on [N, C, D] with vectors of [C]; calls also pass each vector shorter and longer."""
    x, whole = floats(2, 4, 3), [floats(4)] * vectors
    corrupted = [[*whole[:k], floats(n), *whole[k + 1 :]] for k in range(vectors) for n in (1, 3, 900)]
    calls = [(True, [x, *whole]), *((False, [x, *v]) for v in corrupted)]
    dims = [["n", "c", "d"], *([f"v{k}"] for k in range(vectors))]
    return Attack(operator, dims, calls, opset=opset, attributes=attributes)


ATTACKS: dict[str, list[Attack]] = {
    "channels": [
        _attack_channels("BatchNormalization", 4, opset=15),
        _attack_channels("InstanceNormalization", 2),
        _attack_channels("GroupNormalization", 2, num_groups=2),
    ],
    "Conv": [
        Attack(
            "Conv",
            [["n", "c", "d"], ["m", "g", 2], ["b"]],
            [
                (True, [floats(1, 2, 3), floats(4, 2 // group, 2), floats(4)]),
                *((False, [floats(1, 2, 3), floats(4, 2 // group, 2), floats(b)]) for b in (1, 3, 900)),
                (False, [floats(1, 2, 3), floats(4, 9, 2), floats(4)]),
                (False, [floats(1, 2, 1), floats(4, 2 // group, 2), floats(4)]),
            ],
            attributes={"group": group},
            opset=22,
        )
        for group in (1, 2)
    ],
    "windows": [
        Attack(
            operator,
            [["n", "c", "d"]],
            [
                (True, [floats(1, 2, 4)]),
                (True, [floats(1, 2, 3)]),
                (False, [floats(1, 2, 2)]),
                (False, [floats(1, 2, 0)]),
            ],
            attributes={"kernel_shape": [3]},
            opset=22,
        )
        for operator in ("MaxPool", "AveragePool")
    ],
    "PRelu": [
        Attack(
            "PRelu",
            [_AB, ["c", "d"]],
            [(True, [-X, X]), (False, [-X, floats(4, 3)]), (False, [-X[:1], X])],
            opset=16,
        )
    ],
    "Gather": [
        Attack(
            "Gather",
            [_AB, _N],
            [
                (True, [X, ints(0, -2, 1)]),
                *((False, [X, ints(0, v)]) for v in (2, -3, BIG, -BIG, 2**31)),
                (False, [NONE, ints(0)]),
                (True, [NONE, ints()]),
            ],
        )
    ],
    "GatherElements": [
        Attack(
            "GatherElements",
            [_AB, ["c", "d"]],
            [
                (True, [X, ints([0, 1, -1])]),
                (False, [X, ints([0, 1, 2])]),
                (False, [X, np.zeros((1, 9), np.int64)]),
                (False, [NONE, ints([0, 0, 0])]),
                (False, [ROWS, ints([0])]),
            ],
        )
    ],
    "GatherND": [
        Attack(
            "GatherND",
            [_AB, ["n", 2]],
            [
                (True, [X, ints([0, -3], [1, 2])]),
                (False, [X, ints([0, 3])]),
                (False, [X, ints([-3, 0])]),
                (False, [ROWS, ints([0, 0])]),
            ],
        ),
        Attack(
            "GatherND",
            [_AB, ["c", 1]],
            [(True, [X, ints([2], [0])]), (False, [X, ints([2], [0], [1])]), (False, [X, ints([2], [3])])],
            attributes={"batch_dims": 1},
        ),
    ],
    "ScatterElements": [
        Attack(
            "ScatterElements",
            [_AB, ["c", "d"], ["e", "f"]],
            [
                (True, [X, ints([1, 0]), floats(1, 2)]),
                (False, [X, ints([2, 0]), floats(1, 2)]),
                (False, [X, np.zeros((1, 9), np.int64), floats(1, 9)]),
                (False, [X, ints([1, 0]), floats(1, 1)]),
                (False, [NONE, ints([0]), floats(1, 1)]),
            ],
        ),
    ],
    "ScatterND": [
        Attack(
            "ScatterND",
            [_AB, ["n", 1], ["c", "d"]],
            [
                (True, [X, ints([1], [-2]), floats(2, 3)]),
                (False, [X, ints([2], [0]), floats(2, 3)]),
                (False, [X, ints([1], [0]), floats(1, 3)]),
                (False, [X, ints([1]), floats(1, 2)]),
            ],
        ),
    ],
    "Scatter": [
        Attack(
            "Scatter",
            [_AB, ["c", "d"], ["e", "f"]],
            [(True, [X, ints([1, 0]), floats(1, 2)]), (False, [X, ints([1, 0]), floats(1, 1)])],
            opset=10,
        )
    ],
    "Slice": [
        Attack(
            "Slice",
            [_AB, [1], [1], [1], [1]],
            [
                (True, [X, ints(1), ints(3), ints(1), ints(1)]),
                (True, [X, ints(BIG), ints(-BIG), ints(-1), ints(-1)]),
                (True, [X, ints(0), ints(BIG), ints(1), ints(BIG)]),
                (True, [NONE, ints(5), ints(-5), ints(0), ints(-1)]),
                (False, [X, ints(1), ints(3), ints(5), ints(1)]),
                (False, [X, ints(1), ints(3), ints(1), ints(0)]),
            ],
        )
    ],
    "Pad": [
        Attack(
            "Pad",
            [_AB, [4]],
            [
                (True, [X, ints(0, 1, 1, 2)]),
                *((mode == "constant", [x, ints(1, 1, 1, 1)]) for x in (NONE, ROWS)),
                (False, [X, ints(0, -5, 0, 0)]),
                (False, [X, ints(0, BIG, 0, BIG)]),
            ],
            attributes={"mode": mode},
        )
        for mode in ("constant", "edge", "reflect", "wrap")
    ],
    "Expand": [
        Attack(
            "Expand",
            [["a"], [2]],
            [
                (True, [floats(1), ints(2, 3)]),
                (True, [floats(1), ints(2, 0)]),
                *((False, [floats(1), ints(*s)]) for s in ([2**32, 2**32], [-1, 2], [BIG, 4], [2**20, 2**30])),
                (False, [floats(3), ints(1, 2)]),
            ],
        )
    ],
    "ConstantOfShape": [
        Attack(
            "ConstantOfShape",
            [[2]],
            [(True, [ints(2, 3)]), (True, [ints(0, 3)])]
            + [(False, [ints(*s)]) for s in ([2**61, 2], [-1, -1], [2**32, 2**32], [2**20, 2**30])],
        )
    ],
    "Range": [
        Attack(
            "Range",
            [[], [], []],
            [(True, [scalar(v) for v in a]) for a in ([0, 7, 2], [5, -7, -3], [5, 7, -3])]
            + [(False, [scalar(v) for v in a]) for a in ([0, BIG, 1], [0, 7, 0], [-(2**63), 2**63 - 1, 1])],
        ),
        Attack(
            "Range",
            [[], [], []],
            [(True, [np.float32(v) for v in (0, 7, 2)])]
            + [(False, [np.float32(v) for v in a]) for a in ([0, 3e38, 1e-3], [0, 7, 0], [np.nan, 7, 1])],
        ),
    ],
    "OneHot": [
        Attack(
            "OneHot",
            [_N, [], ["k"]],
            [(True, [ints(0, -1, 1), scalar(3), floats(2)])]
            + [(False, [ints(0), scalar(d), floats(2)]) for d in (BIG, -1)]
            + [(False, [ints(0), scalar(3), floats(1)])],
        )
    ],
    "Reshape": [
        Attack(
            "Reshape",
            [["a"], [3]],
            [(True, [floats(4), ints(2, -1, 1)]), (True, [floats(0), ints(0, 2, 3)])]
            + [(False, [floats(4), ints(*s)]) for s in ([2**62 + 1, 4, 1], [-2, -2, 1], [3, 1, 1], [2**32, 2**32, 4])]
            + [(False, [floats(1), ints(-1, -1, 1)])],
        )
    ],
    "Tile": [
        Attack(
            "Tile",
            [_AB, [2]],
            [(True, [X, ints(2, 1)]), (True, [X, ints(0, 2)]), (True, [ROWS, ints(2, 2)])]
            + [(False, [X, ints(*t)]) for t in ([-1, -1], [BIG, BIG], [2**31, 2**31])],
        )
    ],
    "ReverseSequence": [
        Attack(
            "ReverseSequence",
            [_AB, _N],
            [(True, [X, ints(1, 2, 2)])]
            + [(False, [X, ints(*lengths)]) for lengths in ([1, 3, 2], [1, -1, 2], [1, 1], [1, BIG, 1])],
        )
    ],
    "Compress": [
        Attack(
            "Compress",
            [_AB, _N],
            [(True, [X, np.array([True])]), (False, [X, np.ones(5000, bool)])],
            attributes={"axis": 0},
        )
    ],
    "TopK": [
        Attack(
            "TopK",
            [_AB, [1]],
            [(True, [X, ints(2)]), (True, [ROWS, ints(0)]), *((False, [X, ints(k)]) for k in (4, -1, BIG))],
            results=2,
        )
    ],
    "Split": [
        Attack(
            "Split",
            [_AB, [2]],
            [(True, [X, ints(0, 2)]), *((False, [X, ints(*s)]) for s in ([3, -1], [1, 2], [BIG, -BIG + 2]))],
            results=2,
        )
    ],
    "Trilu": [
        Attack("Trilu", [_AB, []], [(True, [X, scalar(k)]) for k in (0, 1, -1)]),
    ],
    "ArgMax": [Attack("ArgMax", [_AB], [(True, [X]), (False, [NONE])])],
    "axes": [
        _attack_axes("CumSum", [scalar(1), scalar(-2)]),
        _attack_axes("ReduceSum", [ints(1), ints(-2)]),
        _attack_axes("ReduceMax", [ints(1), ints(-2)], keepdims=0),
        _attack_axes("Squeeze", [ints(1), ints(-1)], floats(2, 1)),
        Attack("Unsqueeze", [_AB, [1]], [(True, [X, ints(2)]), *((False, [X, ints(v)]) for v in (3, -4, BIG))]),
    ],
    "RotaryEmbedding": [
        Attack(
            "RotaryEmbedding",
            [["b", 2, "s", 4], ["p", 2], ["p", 2], ["b", "s"]],
            [
                (True, [floats(1, 2, 2, 4), floats(3, 2), floats(3, 2), ints([0, 2])]),
                *((False, [floats(1, 2, 2, 4), floats(3, 2), floats(3, 2), ints([0, v])]) for v in (3, -4, BIG, -BIG)),
                (False, [floats(1, 2, 2, 4), floats(0, 2), floats(0, 2), ints([0, 0])]),
            ],
        )
    ],
    "Attention": [
        Attack(
            "Attention",
            [["b", 2, "s", 4], ["b", 2, "t", 4], ["b", 2, "t", 4], [1, "m2", "m3"][3 - rank :]],
            [
                (
                    True,
                    [floats(1, 2, s, 4), floats(1, 2, 3, 4), floats(1, 2, 3, 4), np.zeros([1, s, 3][3 - rank :], "f")],
                )
                for s in (2, 0)
            ]
            + [
                (
                    False,
                    [floats(1, 2, 2, 4), floats(1, 2, 3, 4), floats(1, 2, 3, 4), np.zeros([1, 2, 4][3 - rank :], "f")],
                )
            ],
            opset=24,
        )
        for rank in (2, 3)
    ],
}


if __name__ == "__main__":
    for attack in ATTACKS[sys.argv[1]]:
        run_attack(attack)
