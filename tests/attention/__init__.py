"""The record of an attention, and its kernels."""
