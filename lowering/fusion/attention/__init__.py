"""Fusion of decomposed attention into Attention nodes."""
