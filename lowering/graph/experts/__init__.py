"""Mixtures of experts as nodes over rows sorted by expert."""
