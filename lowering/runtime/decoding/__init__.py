"""Decoders, which own a model's caches between calls."""
