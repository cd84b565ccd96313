"""NegativeLogLikelihoodLoss and SoftmaxCrossEntropyLoss, by the function bodies that ONNX gives them."""

from __future__ import annotations

import numpy as np

from tests.ops.expectations import Expectations

RNG = np.random.default_rng(0)


def compute_loss(
    scores: np.ndarray, target: np.ndarray, weights: np.ndarray | None, reduction: str, ignored: int | None
) -> np.ndarray:
    """Return -w[t] log p[t] of each label t; ignored labels have weight 0, and a mean is over the weights."""
    wide = np.moveaxis(scores.astype(np.float64), 1, -1).reshape(-1, scores.shape[1])
    labels = target.ravel()
    is_counted = np.ones(labels.shape, bool) if ignored is None else labels != ignored
    chosen = np.where(is_counted, labels, 0)
    weight = np.where(is_counted, 1.0 if weights is None else weights.astype(np.float64)[chosen], 0.0)
    losses = -wide[np.arange(labels.size), chosen] * weight
    if reduction == "none":
        return losses.reshape(target.shape).astype(scores.dtype)
    total = losses.sum() / (weight.sum() if reduction == "mean" else 1.0)
    return np.asarray(total, scores.dtype)


def compute_log_softmax(x: np.ndarray) -> np.ndarray:
    wide = x.astype(np.float64)
    wide = wide - wide.max(axis=1, keepdims=True)
    return wide - np.log(np.exp(wide).sum(axis=1, keepdims=True))


def test_losses() -> None:
    """Several ranks and types, with and without weights and ignored classes; log probabilities are an output, too."""
    case = Expectations()
    for dtype, shape, weighted, reduction, ignored in (
        ("float32", (3, 5), False, "none", None),
        ("float32", (6, 5), True, "mean", 2),
        ("float64", (2, 4, 6), True, "sum", None),
        ("float32", (2, 3, 4, 2), True, "mean", -1),
        ("float64", (2, 3, 4, 2), False, "none", 1),
    ):
        x = RNG.standard_normal(shape).astype(dtype)
        target = RNG.integers(0, shape[1], (shape[0], *shape[2:]))
        if ignored is not None:
            target.flat[:2] = ignored
        weights = RNG.uniform(0.5, 2, shape[1]).astype(dtype) if weighted else None
        inputs = [x, target, *([] if weights is None else [weights])]
        attributes = {"reduction": reduction} | ({} if ignored is None else {"ignore_index": ignored})
        dims = [("n", *shape[1:]), ("n", *shape[2:]), *([] if weights is None else [None])]
        expected = compute_loss(x, target, weights, reduction, ignored)
        case.expect("NegativeLogLikelihoodLoss", inputs, expected, dims=dims, **attributes)
        log_p = compute_log_softmax(x)
        expected = compute_loss(log_p, target, weights, reduction, ignored).astype(dtype)
        case.expect("SoftmaxCrossEntropyLoss", inputs, expected, **attributes)
        case.expect("SoftmaxCrossEntropyLoss", inputs, expected, log_p.astype(dtype), **attributes)
    case.check()
