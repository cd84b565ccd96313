"""Fusion of decomposed rotary position embeddings."""
