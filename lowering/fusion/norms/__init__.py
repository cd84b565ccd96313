"""Fusion of decomposed layer norms and RMS norms."""
