"""Operators that implement a mixture of experts (lowering/graph/experts/experts.py).

They belong to the compiler's own domain. Each row of a tensor is processed by one expert. Rows are first sorted by
expert, so that the rows of an expert are contiguous. There is one file per operator.
"""
