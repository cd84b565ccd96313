"""Attention: the problem record, its float64 reference, and the plain TensorIR lowering."""
