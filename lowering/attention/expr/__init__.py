"""Expressions over batches, heads, rows and keys: what masks are made of, as plain data.

`node.py` holds the data and its canonical form, `read.py` makes one of TensorIR, `emit.py` makes TensorIR of one, for
scalars or vectors, `interval.py` bounds one over a tile of rows and keys, `evaluate.py` computes one with NumPy.
"""
