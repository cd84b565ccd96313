"""Attention and its caches."""
