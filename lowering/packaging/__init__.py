"""Packages for deployment: a model with its runtime for C++ applications, and wheels for Python."""
