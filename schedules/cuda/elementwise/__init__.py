"""Element-wise functions, reductions, sorts and loops on GPUs."""
