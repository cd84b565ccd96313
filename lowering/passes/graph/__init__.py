"""Passes over the Relax computation of a model and its kernels before scheduling."""
