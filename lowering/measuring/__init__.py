"""Checking and timing kernels that were built elsewhere: needs the runtime, never the compiler."""
