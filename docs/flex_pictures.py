"""Draws docs/pictures, the pictures of docs/flex.md: `python docs/flex_pictures.py`."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np

from lowering import flex
from lowering.flex import MaskPicture, masks

PICTURES = Path(__file__).parent / "pictures"

IDS = np.array([[0] * 100 + [1] * 40 + [2] * 116])
TREE = [-1, 0, 0, 0, 1, 1, 2, 3, 4, 4, 5, 8, 9, 11, 12, 13]
SHOWN = np.random.default_rng(0).random((16, 16)) < 0.3
PAGES = [[9, 2, 12, 5, 0, -1]]


def pictures() -> dict[str, MaskPicture]:
    """Of each mask of the library one, by its name."""
    documents = masks.documents([100, 30, 80, 46])
    answers = masks.documents([90, 60, 40, 66], [-1, 0, 0, 0])
    return {
        "full": drawn(masks.full),
        "causal": drawn(masks.causal),
        "sliding_window": drawn(masks.sliding_window(70)),
        "local": drawn(masks.local(60, 25)),
        "dilated": drawn(masks.dilated(12, 3), 32, 32, 1),
        "prefix_lm": drawn(masks.prefix_lm(100)),
        "prefix_lm_by_batch": drawn(masks.prefix_lm_by_batch, prefix=np.array([100])),
        "padding": drawn(masks.padding, lengths=np.array([180])),
        "and_masks": drawn(masks.and_masks(masks.causal, masks.document_by_batch), document=IDS),
        "or_masks": drawn(masks.or_masks(masks.sliding_window(40), attention_sink)),
        "shifted": drawn(masks.shifted(masks.causal, 160), 96),
        "shifted_by_batch": drawn(masks.shifted_by_batch(masks.sliding_window(70)), 96, offset=np.array([160])),
        "paged": drawn(masks.paged(masks.shifted(masks.causal, 40), 16), 32, **masks.pages(PAGES, [72], 16, 16)),
        "document": drawn(masks.document(masks.causal), **documents),
        "document_by_batch": drawn(masks.document_by_batch, document=IDS),
        "shared_prefix": drawn(masks.shared_prefix, **answers),
        "tree": drawn(masks.tree, 16, 32, 1, ancestors=masks.ancestors_of(TREE), context=np.array([16])),
        "neighborhood": drawn(masks.neighborhood((16, 16), 7), block=4),
        "sliding_tile": drawn(masks.sliding_tile((24, 24), 4, 3), 576, 576, 16),
        "block_sparse": drawn(masks.block_sparse(16), block=16, shown=SHOWN),
    }


def drawn(mask: Any, rows: int = 256, keys: int = 256, block: int = 8, **captures: Any) -> MaskPicture:
    return flex.show(mask, Q_LEN=rows, KV_LEN=keys, BLOCK_SIZE=block, captures=captures)


def attention_sink(b: Any, h: Any, i: Any, j: Any) -> Any:
    """The first keys, up to the row's own position."""
    return (j < 16) & (i >= j)


def main() -> None:
    PICTURES.mkdir(exist_ok=True)
    for name, picture in pictures().items():
        picture.save(PICTURES / f"{name}.svg")


if __name__ == "__main__":
    main()
