"""Rewrites that options of `compile` request."""
