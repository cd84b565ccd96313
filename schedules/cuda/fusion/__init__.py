"""Kernels of fused functions: norm prologues, epilogues and shared launches."""
