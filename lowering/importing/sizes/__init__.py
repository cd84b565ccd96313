"""Sizes of tensors: assumptions about them, and the kernel that stores them."""
