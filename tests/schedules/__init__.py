"""Rules and kernels of targets."""
