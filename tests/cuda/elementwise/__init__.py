"""All other kernels."""
