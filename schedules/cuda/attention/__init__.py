"""Attention on GPUs."""
