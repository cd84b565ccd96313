"""Operators that `serve` inserts into a decoder (lowering/graph/paged/paged_decoder.py).

They belong to the compiler's own domain. The tokens of all requests form a ragged batch: request r has rows
row_starts[r] to row_starts[r + 1] - 1, which follow its past_lengths[r] tokens in the cache. Tables are int64. There is
one file per operator.
"""
