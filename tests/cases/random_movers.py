"""The movers of mover_cases.py: of one tensor, of several, under control flow, and mixed with arithmetic."""

from __future__ import annotations

import numpy as np
from onnx import TensorProto, helper

from tests.cases.mover_cases import FLOATS, HALF, TYPES, Model, Tensor, random_bits, takes

# -- of one tensor -----------------------------------------------------------------------------------------------------


def identity(m: Model, x: Tensor) -> Tensor:
    return m.moved(x, lambda a: a, "Identity")


def transpose(m: Model, x: Tensor) -> Tensor:
    axes = [int(axis) for axis in m.rng.permutation(x.rank)]
    return m.moved(x, lambda a: a.transpose(axes), "Transpose", perm=axes)


def slice_(m: Model, x: Tensor) -> Tensor:
    axis = int(m.rng.integers(x.rank))
    size, step = x.bits.shape[axis], int(m.rng.choice([-2, -1, 1, 2]))
    first, last = (0, size) if size < 3 else (1, size - 1)
    start, end = (first, last) if step > 0 else (last - 1, first - 1 if first else -size - 1)
    window = tuple(
        slice(start, end if end > -size else None, step) if k == axis else slice(None) for k in range(x.rank)
    )
    inputs = [m.constant([value]) for value in (start, end, axis, step)]
    return m.moved(x, lambda a: a[window], "Slice", *inputs)


def reshape(m: Model, x: Tensor) -> Tensor:
    shape = [int(x.bits.size // x.bits.shape[-1]), x.bits.shape[-1]]
    return m.moved(x, lambda a: a.reshape(shape), "Reshape", m.constant(shape))


def unsqueeze(m: Model, x: Tensor) -> Tensor:
    axis = int(m.rng.integers(x.rank))
    return m.moved(x, lambda a: np.expand_dims(a, axis), "Unsqueeze", m.constant([axis]))


def gather(m: Model, x: Tensor) -> Tensor:
    axis = int(m.rng.integers(x.rank))
    size = x.bits.shape[axis]
    indices = m.rng.integers(-size, size, (2, 4) if m.rng.random() < 0.5 else 8)
    return m.moved(x, lambda a: np.take(a, indices, axis), "Gather", m.add_input(indices), axis=axis)


def gather_elements(m: Model, x: Tensor) -> Tensor:
    axis = int(m.rng.integers(x.rank))
    indices = m.rng.integers(0, x.bits.shape[axis], x.bits.shape)
    move = lambda a: np.take_along_axis(a, indices, axis)  # noqa: E731
    return m.moved(x, move, "GatherElements", m.add_input(indices), axis=axis)


def gather_nd(m: Model, x: Tensor) -> Tensor:
    indices = np.stack([m.rng.integers(0, size, 6) for size in x.bits.shape[:-1]], -1)
    return m.moved(x, lambda a: a[tuple(indices.T)], "GatherND", m.add_input(indices))


def tile(m: Model, x: Tensor) -> Tensor:
    repeats = [int(n) for n in m.rng.integers(1, 3, x.rank)]
    return m.moved(x, lambda a: np.tile(a, repeats), "Tile", m.constant(repeats))


def expand(m: Model, x: Tensor) -> Tensor:
    shape = (2, *x.bits.shape)
    return m.moved(x, lambda a: np.broadcast_to(a, shape), "Expand", m.constant(shape))


def pad_with_itself(m: Model, x: Tensor) -> Tensor:
    mode = str(m.rng.choice(["edge", "wrap"] if min(x.bits.shape) < 3 else ["edge", "wrap", "reflect"]))
    pads = m.rng.integers(0, 2, (2, x.rank))
    move = lambda a: np.pad(a, pads.T, mode)  # noqa: E731
    return m.moved(x, move, "Pad", m.constant(pads.reshape(-1)), mode=mode)


def pad(m: Model, x: Tensor) -> Tensor:
    value, pads = m.tensor(x.dtype, ()), m.rng.integers(0, 3, (2, x.rank))

    def move(a: np.ndarray, fill: np.ndarray) -> np.ndarray:
        y = np.full(np.array(a.shape) + pads.sum(0), fill)
        y[tuple(slice(before, before + size) for before, size in zip(pads[0], a.shape))] = a
        return y

    (name,) = m.node("Pad", [x.name, m.constant(pads.reshape(-1)), value.name])
    return Tensor(name, x.dtype, move(x.bits, value.bits), move(x.compared, np.array(True)))


def compress(m: Model, x: Tensor) -> Tensor:
    axis = int(m.rng.integers(x.rank))
    taken = m.rng.random(x.bits.shape[axis]) < 0.7
    taken[0] = True
    return m.moved(x, lambda a: np.compress(taken, a, axis), "Compress", m.constant(taken, "bool"), axis=axis)


def trilu(m: Model, x: Tensor) -> Tensor:
    upper, k = int(m.rng.integers(2)), int(m.rng.integers(-2, 3))
    rows, columns = np.ogrid[: x.bits.shape[-2], : x.bits.shape[-1]]
    is_inside = (columns - rows >= k) if upper else (columns - rows <= k)
    (name,) = m.node("Trilu", [x.name, m.constant(k)], upper=upper)
    return Tensor(name, x.dtype, np.where(is_inside, x.bits, np.zeros((), x.bits.dtype)), x.compared | ~is_inside)


def depth_to_space(m: Model, x: Tensor) -> Tensor:
    if x.bits.size % 4:
        x = m.moved(x, lambda a: np.broadcast_to(a, (4, *a.shape)), "Expand", m.constant((4, *x.bits.shape)))
    (shaped,) = m.node("Reshape", [x.name, m.constant([1, 4, -1, 1])])
    (name,) = m.node("DepthToSpace", [shaped], blocksize=2)
    move = lambda a: a.reshape(1, 2, 2, 1, -1, 1).transpose(0, 3, 4, 1, 5, 2).reshape(1, 1, -1, 2)  # noqa: E731
    return Tensor(name, x.dtype, move(x.bits), move(x.compared))


def reverse_sequence(m: Model, x: Tensor) -> Tensor:
    n, batch = x.bits.shape[:2]
    lengths = m.rng.integers(1, n + 1, batch)

    def move(a: np.ndarray) -> np.ndarray:
        y = a.copy()
        for b, length in enumerate(lengths):
            y[:length, b] = a[:length, b][::-1]
        return y

    return m.moved(x, move, "ReverseSequence", m.add_input(lengths), time_axis=0, batch_axis=1)


def resize(m: Model, x: Tensor) -> Tensor:
    axis = int(m.rng.integers(x.rank))
    scales = [2.0 if k == axis else 1.0 for k in range(x.rank)]
    attributes = {"mode": "nearest", "nearest_mode": "floor", "coordinate_transformation_mode": "asymmetric"}
    move = lambda a: np.repeat(a, 2, axis)  # noqa: E731
    return m.moved(x, move, "Resize", "", m.constant(scales, "float32"), **attributes)


def cast_like_itself(m: Model, x: Tensor) -> Tensor:
    return m.moved(x, lambda a: a, "CastLike", x.name)


UNARY = {
    "Identity": identity, "Transpose": transpose, "Slice": slice_, "Reshape": reshape, "Unsqueeze": unsqueeze,
    "Gather": gather, "GatherElements": gather_elements, "GatherND": gather_nd, "Tile": tile, "Expand": expand,
    "Pad": pad, "Compress": compress, "Trilu": trilu, "DepthToSpace": depth_to_space,
    "ReverseSequence": reverse_sequence, "Resize": resize, "CastLike": cast_like_itself,
}  # fmt: skip

# -- of several tensors ------------------------------------------------------------------------------------------------


def concat(m: Model, x: Tensor) -> Tensor:
    axis = int(m.rng.integers(x.rank))
    added = [m.tensor(x.dtype, x.bits.shape) for _ in range(int(m.rng.integers(1, 3)))]
    operands = [x, *added]
    (name,) = m.node("Concat", [t.name for t in operands], axis=axis)
    bits, compared = ([getattr(t, key) for t in operands] for key in ("bits", "compared"))
    return Tensor(name, x.dtype, np.concatenate(bits, axis), np.concatenate(compared, axis))


def where(m: Model, x: Tensor) -> Tensor:
    other = m.tensor(x.dtype, x.bits.shape[-1:] if m.rng.random() < 0.3 else x.bits.shape)
    condition = m.rng.random(x.bits.shape) < 0.5
    (name,) = m.node("Where", [m.add_input(condition, "bool"), x.name, other.name])
    return Tensor(name, x.dtype, *(np.where(condition, getattr(x, k), getattr(other, k)) for k in ("bits", "compared")))


def split(m: Model, x: Tensor) -> Tensor:
    axis = x.rank - 1
    size = x.bits.shape[axis]
    first = max(size // 2, 1)
    sizes = [first, size - first]
    names = m.node("Split", [x.name, m.constant(sizes)], 2, axis=axis)
    halves = zip(names, *(np.split(a, [first], axis) for a in (x.bits, x.compared)))
    first_half, second_half = (Tensor(name, x.dtype, bits, compared) for name, bits, compared in halves)
    if second_half.bits.size:
        m.output(second_half)
    return first_half


def scatter_elements(m: Model, x: Tensor) -> Tensor:
    axis = x.rank - 1
    updates = m.tensor(x.dtype, x.bits.shape)
    indices = np.argsort(m.rng.random(x.bits.shape), axis)
    y, compared = x.bits.copy(), x.compared.copy()
    np.put_along_axis(y, indices, updates.bits, axis)
    np.put_along_axis(compared, indices, updates.compared, axis)
    (name,) = m.node("ScatterElements", [x.name, m.add_input(indices), updates.name], axis=axis)
    return Tensor(name, x.dtype, y, compared)


def scatter_nd(m: Model, x: Tensor) -> Tensor:
    n = x.bits.shape[0]
    indices = m.rng.permutation(n)[: max(n // 2, 1)]
    updates = m.tensor(x.dtype, (len(indices), *x.bits.shape[1:]))
    y, compared = x.bits.copy(), x.compared.copy()
    y[indices], compared[indices] = updates.bits, updates.compared
    (name,) = m.node("ScatterND", [x.name, m.add_input(indices[:, None]), updates.name])
    return Tensor(name, x.dtype, y, compared)


def tensor_scatter(m: Model, x: Tensor) -> Tensor:
    x = m.tensor(x.dtype, (2, 3, 5, int(m.rng.choice([3, 8, 16]))))
    axis = int(m.rng.integers(1, x.rank))
    size = x.bits.shape[axis]
    length = max(size // 2, 1)
    update = m.tensor(x.dtype, tuple(length if k == axis else n for k, n in enumerate(x.bits.shape)))
    starts = m.rng.integers(0, size - length + 1, x.bits.shape[0])
    y, compared = x.bits.copy(), x.compared.copy()
    for b, start in enumerate(starts):
        rows = tuple(slice(start, start + length) if k == axis else slice(None) for k in range(1, x.rank))
        y[(b, *rows)], compared[(b, *rows)] = update.bits[b], True
    (name,) = m.node("TensorScatter", [x.name, update.name, m.add_input(starts)], axis=axis)
    return Tensor(name, x.dtype, y, compared)


def one_hot(m: Model, x: Tensor) -> Tensor:
    values, indices = m.tensor(x.dtype, (2,)), m.rng.integers(0, 9, (3, 5))
    (name,) = m.node("OneHot", [m.add_input(indices), m.constant([9]), values.name])
    y = np.where(indices[..., None] == np.arange(9), values.bits[1], values.bits[0])
    return Tensor(name, x.dtype, y, np.ones(y.shape, bool))


def constant_of_shape(m: Model, x: Tensor) -> Tensor:
    bits = random_bits(m.rng, x.dtype, (1,))
    number = getattr(TensorProto, x.dtype.upper())
    value = helper.make_tensor("value", number, (1,), bits.tobytes(), raw=True)
    (name,) = m.node("ConstantOfShape", [m.add_input([3, 8])], value=value)
    return Tensor(name, x.dtype, np.broadcast_to(bits, (3, 8)), np.ones((3, 8), bool))


SEVERAL = {
    "Concat": concat, "Where": where, "Split": split, "ScatterElements": scatter_elements, "ScatterND": scatter_nd,
    "TensorScatter": tensor_scatter, "OneHot": one_hot,
}  # fmt: skip

# -- under control flow ------------------------------------------------------------------------------------------------


def branch(m: Model, x: Tensor) -> Tensor:
    other, condition = m.tensor(x.dtype, x.bits.shape), bool(m.rng.integers(2))
    info = [helper.make_tensor_value_info("y", getattr(TensorProto, x.dtype.upper()), x.bits.shape)]
    yes, no = (
        helper.make_graph([helper.make_node("Identity", [t.name], ["y"])], "branch", [], info) for t in (x, other)
    )
    (name,) = m.node("If", [m.add_input(condition, "bool")], then_branch=yes, else_branch=no)
    taken = x if condition else other
    return Tensor(name, x.dtype, taken.bits, taken.compared)


def loop(m: Model, x: Tensor) -> Tensor:
    """Carried through three turns, and transposed in each."""
    kind, axes = getattr(TensorProto, x.dtype.upper()), [1, 0]
    x = reshape(m, x)
    body = helper.make_graph(
        [helper.make_node("Transpose", ["a"], ["b"], perm=axes), helper.make_node("Identity", ["c"], ["d"])],
        "body",
        [
            helper.make_tensor_value_info("i", TensorProto.INT64, []),
            helper.make_tensor_value_info("c", TensorProto.BOOL, []),
            helper.make_tensor_value_info("a", kind, [None, None]),
        ],
        [
            helper.make_tensor_value_info("d", TensorProto.BOOL, []),
            helper.make_tensor_value_info("b", kind, [None, None]),
        ],
    )
    (name,) = m.node("Loop", [m.constant(4), m.constant(True, "bool"), x.name], body=body)
    return Tensor(name, x.dtype, x.bits, x.compared)


CONTROL = {"If": branch, "Loop": loop}

# -- mixed with arithmetic ---------------------------------------------------------------------------------------------


def mixture(m: Model, x: Tensor) -> Tensor:
    """Select elements among added values and moved ones; added values are not compared."""
    moved = where(m, x)
    (total,) = m.node("Add", [x.name, x.name])
    condition = m.rng.random(moved.bits.shape) < 0.5
    (name,) = m.node("Where", [m.add_input(condition, "bool"), total, moved.name])
    result = Tensor(name, x.dtype, moved.bits, moved.compared & ~condition)
    return transpose(m, concat(m, result))


def around_a_reduction(m: Model, x: Tensor) -> Tensor:
    """Add a softmax whose function moves rows, too."""
    (rows,) = m.node("Softmax", [x.name])
    condition = m.rng.random(x.bits.shape) < 0.5
    (name,) = m.node("Where", [m.add_input(condition, "bool"), rows, x.name])
    return Tensor(name, x.dtype, x.bits, x.compared & ~condition)


def select_after_matmul(m: Model, x: Tensor) -> Tensor:
    """Add a mover in the epilogue of a matmul."""
    a, b, x = m.tensor(x.dtype, (5, 16)), m.tensor(x.dtype, (16, 24)), m.tensor(x.dtype, (5, 24))
    (matmul,) = m.node("MatMul", [a.name, b.name])
    condition = m.rng.random((5, 24)) < 0.5
    (name,) = m.node("Where", [m.add_input(condition, "bool"), matmul, x.name])
    return Tensor(name, x.dtype, x.bits, x.compared & ~condition)


MIXED = (mixture, around_a_reduction)

# -- random models -----------------------------------------------------------------------------------------------------


def movers_of(dtype: str) -> list:
    """Return the movers that ONNX has for a type."""
    movers = [mover for operator, mover in {**UNARY, **SEVERAL}.items() if takes(operator, dtype)]
    movers += CONTROL.values()
    if takes("ConstantOfShape", dtype):
        movers.append(constant_of_shape)
    if takes("Pad", dtype):
        movers.append(pad_with_itself)
    return [*movers, *(MIXED if dtype in FLOATS else ()), *([select_after_matmul] if dtype in HALF else [])]


def random_model(seed: int, count: int, dtypes: tuple[str, ...] = TYPES) -> Model:
    """Draw a model with `count` results, half of half precision: a mover of any type, and a chain after it."""
    m = Model(np.random.default_rng(seed))
    order = m.rng.permutation(1000)
    for n in range(count):
        half = tuple(dtype for dtype in dtypes if dtype in HALF)
        dtype = str(m.rng.choice(half if half and m.rng.random() < 0.5 else dtypes))
        movers = movers_of(dtype)
        x = movers[order[n] % len(movers)](m, m.tensor(dtype))
        for _ in range(int(m.rng.integers(0, 3))):
            if x.rank < 2 or x.bits.size > 4096:
                break
            chained = [operator for operator in (*UNARY, "Concat", "Where") if takes(operator, dtype)]
            x = {**UNARY, **SEVERAL}[str(m.rng.choice(chained))](m, x)
        m.output(x)
    return m
