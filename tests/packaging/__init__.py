"""Wheels, packages and releases."""
