"""Rotary embeddings in every form: which elements are a pair, how pairs are put together, where angles come from."""

from __future__ import annotations

import numpy as np
import onnx
import pytest

from tests.fusion.graphs import check_fused, check_untouched, parse_graph

HALVES = "x1 = Slice ({x}, i0, i{h}, last, i1) x2 = Slice ({x}, i{h}, i{r}, last, i1)"
SPLIT = "x1, x2 = Split <axis = -1, num_outputs = 2> ({x})"
EVERY_OTHER = "x1 = Slice ({x}, i0, i{r}, last, i2) x2 = Slice ({x}, i1, i{r}, last, i2)"
COLUMNS = "xs = Reshape ({x}, columns) x1 = Gather <axis = -1> (xs, s0) x2 = Gather <axis = -1> (xs, s1)"
TURNED = "n = Neg (x2) t = Concat <axis = -1> (n, x1)"
STACKED = "n = Neg (x2) na = Unsqueeze (n, last) xa = Unsqueeze (x1, last) st = Concat <axis = -1> (na, xa) "
STACKED += "t = Reshape (st, {flat})"
MATMUL = "a = Mul ({x}, cos) b = Mul (t, sin) {y} = Add (a, b)"

# cos and sin [1, S, R / 2] of positions p [1, S, 1], then with every angle twice, then where they broadcast.
ANGLES = "f = Mul (p, inverse)"
DOUBLED = {
    False: [
        f"{ANGLES} e = Concat <axis = -1> (f, f) c0 = Cos (e) s0_ = Sin (e)",
        f"{ANGLES} cf = Cos (f) sf = Sin (f) c0 = Concat <axis = 2> (cf, cf) s0_ = Concat <axis = 2> (sf, sf)",
        f"{ANGLES} e = Tile (f, twice) c1_ = Cos (e) s1_ = Sin (e) c0 = Mul (c1_, i_float) s0_ = Mul (i_float, s1_)",
    ],
    True: [
        f"{ANGLES} g = Unsqueeze (f, last) h = Expand (g, pair) e = Reshape (h, rows) c0 = Cos (e) s0_ = Sin (e)",
        f"{ANGLES} g = Unsqueeze (f, last) h = Concat <axis=3> (g, g) e = Reshape (h, rows) c0 = Cos (e) s0_ = Sin (e)",
    ],
}
BROADCAST = "cos = Unsqueeze (c0, heads) sin = Unsqueeze (s0_, heads)"


def make_weights(rotated: int, heads: int = 1, size: int = 8) -> dict[str, np.ndarray]:
    integers = {f"i{n}": [n] for n in (0, 1, 2, 3, 4, 6, 8)} | {
        "last": [-1],
        "heads": [heads],
        "columns": [0, 0, 0, rotated // 2, 2],
        "flat": [0, 0, 0, rotated],
        "pair": [1, 1, 1, 2],
        "rows": [1, -1, rotated],
        "twice": [1, 1, 2],
        "parts": [rotated, size - rotated],
    }
    arrays = {name: np.array(v, np.int64) for name, v in integers.items()}
    arrays |= {"s0": np.array(0), "s1": np.array(1), "i_float": np.array(1.5, np.float32)}
    return arrays | {"inverse": np.geomspace(1, 0.01, rotated // 2).astype(np.float32)}


def make_model(
    nodes: str, rotated: int = 8, x: str = "B, 2, S, 8", heads: int = 1, p: str = "1, S, 1"
) -> onnx.ModelProto:
    text = f"(float[{x}] x, float[{p}] p) => (float[{x}] y) {{ {nodes} }}"
    return parse_graph(text, 18, make_weights(rotated, heads))


def fill_template(nodes: str, x: str = "x", y: str = "y", rotated: int = 8) -> str:
    return nodes.format(x=x, y=y, h=rotated // 2, r=rotated, flat="flat")


@pytest.mark.parametrize("angles", DOUBLED[False])
@pytest.mark.parametrize("split", [HALVES, SPLIT])
def test_case_1_halves(angles: str, split: str) -> None:
    check_fused(
        make_model(fill_template(f"{angles} {BROADCAST} {split} {TURNED} {MATMUL}")),
        {"RotaryEmbedding": 1, "Neg": 0, "Split": 0},
    )


@pytest.mark.parametrize("angles", DOUBLED[True])
@pytest.mark.parametrize("split", [EVERY_OTHER, COLUMNS])
def test_case_2_interleaved(angles: str, split: str) -> None:
    result = check_fused(
        make_model(fill_template(f"{angles} {BROADCAST} {split} {STACKED} {MATMUL}")), {"RotaryEmbedding": 1, "Neg": 0}
    )
    (node,) = (n for n in result.graph if n.op_type == "RotaryEmbedding")
    assert node.attributes["interleaved"].as_int() == 1


@pytest.mark.parametrize("minus", ["n = Mul (x2, minus)", "n = Mul (minus, x2)"])
def test_case_1_minus_as_a_matmul_and_operands_the_other_way_round(minus: str) -> None:
    nodes = f"minus = Constant <value_float = -1.0> () {DOUBLED[False][0]} {BROADCAST} {HALVES} {minus}"
    check_fused(
        make_model(
            fill_template(f"{nodes} t = Concat <axis = 3> (n, x1) a = Mul (cos, x) b = Mul (sin, t) y = Add (b, a)")
        ),
        {"RotaryEmbedding": 1},
    )


@pytest.mark.parametrize("interleaved", [False, True])
def test_case_3_by_halves(interleaved: bool) -> None:
    nodes = f"{ANGLES} c0 = Cos (f) s0_ = Sin (f) {BROADCAST} {EVERY_OTHER if interleaved else HALVES}"
    nodes += " a = Mul (x1, cos) b = Mul (x2, sin) y1 = Sub (a, b) c = Mul (x2, cos) d = Mul (sin, x1) y2 = Add (d, c) "
    if interleaved:
        nodes += "u1 = Unsqueeze (y1, last) u2 = Unsqueeze (y2, last) st = Concat <axis = -1> (u1, u2) "
        nodes += "y = Reshape (st, flat)"
    else:
        nodes += "y = Concat <axis = -1> (y1, y2)"
    check_fused(make_model(fill_template(nodes)), {"RotaryEmbedding": 1, "Mul": 1, "Sub": 0})


@pytest.mark.parametrize(
    "take",
    ["xr = Slice (x, i0, i4, last, i1) xp = Slice (x, i4, i8, last, i1)", "xr, xp = Split <axis = -1> (x, parts)"],
)
def test_case_4_partial(take: str) -> None:
    nodes = f"{take} {DOUBLED[False][0]} {BROADCAST} {HALVES} {TURNED} {MATMUL} y = Concat <axis = -1> (yr, xp)"
    result = check_fused(
        make_model(fill_template(nodes, "xr", "yr", 4), 4), {"RotaryEmbedding": 1, "Concat": 1, "Neg": 0}
    )
    (node,) = (n for n in result.graph if n.op_type == "RotaryEmbedding")
    assert node.attributes["rotary_embedding_dim"].as_int() == 4


def test_case_4_other_trailing_elements_are_not_a_partial_rotation() -> None:
    nodes = (
        f"xr = Slice (x, i0, i4, last, i1) z = Exp (x) xp = Slice (z, i4, i8, last, i1) {DOUBLED[False][0]} {BROADCAST}"
    )
    nodes += f"{HALVES} {TURNED} {MATMUL} y = Concat <axis = -1> (yr, xp)"
    check_fused(make_model(fill_template(nodes, "xr", "yr", 4), 4), {"RotaryEmbedding": 1, "Concat": 2})


@pytest.mark.parametrize("rotated", [8, 4])
@pytest.mark.parametrize("interleaved", [False, True])
def test_case_5_heads_after_the_sequence(rotated: int, interleaved: bool) -> None:
    split, turned = (EVERY_OTHER, STACKED) if interleaved else (HALVES, TURNED)
    nodes = f"{DOUBLED[interleaved][0]} {BROADCAST} {split} {turned} {MATMUL}"
    if rotated == 8:
        nodes = fill_template(nodes)
    else:
        take = "xr = Slice (x, i0, i4, last, i1) xp = Slice (x, i4, i8, last, i1)"
        nodes = fill_template(f"{take} {nodes} y = Concat <axis = -1> (yr, xp)", "xr", "yr", 4)
    check_fused(make_model(nodes, rotated, "B, S, 3, 8", heads=2), {"RotaryEmbedding": 1, "Neg": 0, "Transpose": 0})


@pytest.mark.parametrize("p", ["1, S, 1", "B, S, 1"])
def test_angles_of_one_batch_or_of_all(p: str) -> None:
    nodes = DOUBLED[False][0].replace("Tile", "Tile")
    check_fused(
        make_model(fill_template(f"{nodes} {BROADCAST} {HALVES} {TURNED} {MATMUL}"), p=p), {"RotaryEmbedding": 1}
    )


@pytest.mark.parametrize("ids", ["S", "B, S"])
def test_tables_contain_every_angle_twice_by_their_values(ids: str) -> None:
    angles = np.outer(np.arange(6), [1.0, 0.3, 0.1, 0.03])
    tables = {name: np.tile(f(angles), 2).astype(np.float32) for name, f in (("ct", np.cos), ("st_", np.sin))}
    nodes = "c0 = Gather (ct, ids) s0_ = Gather (st_, ids) " + (
        BROADCAST if ids != "S" else "cos = Identity (c0) sin = Identity (s0_)"
    )
    nodes = fill_template(f"{nodes} {HALVES} {TURNED} {MATMUL}")
    text = f"(float[B, 2, S, 8] x, int64[{ids}] ids) => (float[B, 2, S, 8] y) {{ {nodes} }}"
    check_fused(parse_graph(text, 18, make_weights(8) | tables), {"RotaryEmbedding": 1, "Neg": 0})
    tables["ct"][3, 1] += 0.5
    check_untouched(parse_graph(text, 18, make_weights(8) | tables))


@pytest.mark.parametrize(
    "nodes",
    [
        f"{{twice}} {HALVES} n = Neg (x1) t = Concat <axis = -1> (x2, n) {MATMUL}",  # rotated in the other direction
        f"{{twice}} {HALVES} n = Neg (x1) t = Concat <axis = -1> (n, x2) {MATMUL}",
        f"{{twice}} {HALVES} {TURNED} z = Exp (x) a = Mul (z, cos) b = Mul (t, sin) y = Add (a, b)",
        f"{{twice}} {HALVES} {TURNED} a = Mul (x, cos) b = Mul (t, sin) y = Sub (a, b)",
        f"{{twice}} x1 = Slice (x, i0, i3, last, i1) x2 = Slice (x, i3, i8, last, i1) {TURNED} {MATMUL}",
        f"{{in_a_row}} {HALVES} {TURNED} {MATMUL}",  # angles of pairs that are not rotated
        f"{{twice}} {EVERY_OTHER} {STACKED} {MATMUL}",
        f"{{different}} {HALVES} {TURNED} {MATMUL}",
    ],
)
def test_refuses(nodes: str) -> None:
    different = f"{ANGLES} g = Exp (f) e = Concat <axis = -1> (f, g) c0 = Cos (e) s0_ = Sin (e)"
    angles = {"twice": DOUBLED[False][0], "in_a_row": DOUBLED[True][0], "different": different}
    for name, computed in angles.items():
        nodes = nodes.replace(f"{{{name}}}", f"{computed} {BROADCAST}")
    check_untouched(make_model(fill_template(nodes)))


def test_angles_that_do_not_change_along_the_sequence_refuse() -> None:
    check_untouched(
        make_model(fill_template(f"{DOUBLED[False][0]} {BROADCAST} {HALVES} {TURNED} {MATMUL}"), p="1, 1, 1")
    )
