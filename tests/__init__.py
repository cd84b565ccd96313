"""Tests: `pytest` runs those that are not slow."""
