"""Convolutions, pools, norms, recurrences and resampling."""
