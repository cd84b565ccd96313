"""Expressions over batches, heads, rows and keys: masks and score modifications as plain data.

`node.py` defines the data and its canonical form, `read.py` reads an expression from TensorIR, `emit.py` emits TensorIR
for scalars or vectors, `interval.py` bounds one over a tile of rows and keys, `evaluate.py` evaluates one with NumPy.
"""
