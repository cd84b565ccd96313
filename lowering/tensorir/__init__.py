"""Utilities for TensorIR that several packages share."""
