"""Emission of attention in TensorIR: addresses, ranges of keys, scores, and the plain lowering."""
