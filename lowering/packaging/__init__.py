"""What is shipped: a model with its runtime for C++ applications, and as wheels for Python."""
