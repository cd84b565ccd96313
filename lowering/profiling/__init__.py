"""Measured and expected run times of models."""
